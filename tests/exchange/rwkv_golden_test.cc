// RWKV-5, 6 and 7 against RWKV-LM: logits, loss, every gradient, states, read from files
// under its names.
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "base/safetensors.h"
#include "exchange/hugging_face.h"
#include "nn/testing.h"

namespace assay::exchange {

using namespace nn;

namespace {

struct RwkvGolden : testing::TestWithParam<std::pair<const char*, const char*>> {
  void SetUp() override {
    const fs::path file = golden_folder() / (std::string(GetParam().first) + ".safetensors");
    if (!fs::exists(file))
      GTEST_SKIP() << GetParam().first << " is in the complete golden data only";
    for (auto& [name, tensor] : load_tensors(file)) golden[name] = tensor;
    metadata = Safetensors(file).metadata();
    folder = fs::path(testing::TempDir()) / GetParam().first;
    fs::remove_all(folder);
    make_folder(folder);
    write_file(folder / "config.json", config().dump());
    save_tensors(folder / "model.safetensors", starting_with("param."));
  }
  nlohmann::json config() const {
    nlohmann::json out = {{"model_type", GetParam().second}};
    for (const auto& [key, value] : metadata)
      if (key != "op")
        out[key.starts_with("lora_") ? "d_" + key.substr(5) + "_lora" : key] = std::stoll(value);
    return out;
  }
  NamedTensors starting_with(const std::string& prefix) const {
    NamedTensors out;
    for (const auto& [name, tensor] : golden)
      if (name.starts_with(prefix)) out.emplace_back(name.substr(prefix.size()), tensor);
    return out;
  }
  std::shared_ptr<LanguageModel> model(at::ScalarType dtype) const {
    auto model = read_hugging_face(folder);
    model->to(dtype);
    return model;
  }
  std::map<std::string, at::Tensor> golden;
  std::map<std::string, std::string> metadata;
  fs::path folder;
};

// Each time mix and channel mix by itself, from its stored input. The selection holds
// the first layer.
TEST_P(RwkvGolden, MixersOfEachLayer) {
  const at::NoGradGuard no_grad;
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    SCOPED_TRACE(c10::toString(dtype));
    const double tolerance = dtype == at::kDouble ? 1e-11 : 1e-5;
    const auto m = model(dtype);
    std::map<std::string, at::Tensor> handed;
    for (size_t i = 0; i < m->layers.size(); ++i) {
      SCOPED_TRACE(i);
      const auto activation = [&](const char* name) {
        return golden.at(fmt::format("act.blocks.{}.{}", i, name));
      };
      State of_mixer;
      State of_channel_mixer;
      of_mixer.context.handed = handed;
      const at::Tensor mixed =
          m->layers[i]->mixer->forward(activation("att.in").to(dtype), of_mixer);
      handed = of_mixer.context.handed;
      EXPECT_LE(relative_error(mixed, activation("att.out")), tolerance);
      const at::Tensor y =
          m->layers[i]->channel_mixer->forward(activation("ffn.in").to(dtype), of_channel_mixer);
      EXPECT_LE(relative_error(y, activation("ffn.out")), tolerance);
    }
  }
}

TEST_P(RwkvGolden, LogitsLossAndStates) {
  if (!golden_data_is_complete()) GTEST_SKIP() << "logits are in the complete golden data only";
  const at::NoGradGuard no_grad;
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    SCOPED_TRACE(c10::toString(dtype));
    const double tolerance = dtype == at::kDouble ? 1e-11 : 1e-5;
    const auto m = model(dtype);
    ModelState state;
    EXPECT_LE(relative_error(m->logits(golden.at("in.tokens"), state), golden.at("out.logits")),
              tolerance);
    EXPECT_LE(relative_error(m->loss(golden.at("in.tokens")), golden.at("out.loss")), tolerance);
    for (size_t i = 0; i < state.layers.size(); ++i) {
      at::Tensor S = state.layers[i].tensors().at("S");  // ours is [B, H, key, value]
      if (m->spec.config.pattern.front() == "rwkv7") S = S.transpose(2, 3);
      EXPECT_LE(relative_error(S, golden.at(fmt::format("out.state.blocks.{}", i))), tolerance)
          << "layer " << i;
    }
  }
}

TEST_P(RwkvGolden, Gradients) {
  if (!golden_data_is_complete()) GTEST_SKIP() << "gradients are in the complete golden data only";
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    SCOPED_TRACE(c10::toString(dtype));
    const double tolerance = dtype == at::kDouble ? 1e-11 : 1e-4;
    const auto m = model(dtype);
    m->loss(golden.at("in.tokens")).backward();
    const NamedTensors expected =
        from_hugging_face(m->spec, starting_with("grad.param."), "golden gradients");
    size_t compared = 0;
    for (const auto& [name, gradient] : expected) {
      EXPECT_LE(relative_error(m->named_parameters()[name].grad(), gradient), tolerance) << name;
      ++compared;
    }
    EXPECT_EQ(compared, m->parameters().size());
  }
}

TEST_P(RwkvGolden, TheWayBack) {
  const auto m = model(at::kFloat);
  const NamedTensors back =
      from_hugging_face(m->spec, to_hugging_face(m->spec, named_parameters_of(*m)), "export");
  for (const auto& [name, tensor] : back)
    EXPECT_TRUE(at::equal(tensor, m->named_parameters()[name])) << name;
  EXPECT_EQ(back.size(), m->parameters().size());
}

// An export holds the tensors that RWKV-LM wrote, bitwise equal and under the same names. It may
// omit v0, v1 and v2 of block 0, which the model never reads.
TEST_P(RwkvGolden, ExportsWhatItImported) {
  const fs::path out = folder.string() + "_out";
  fs::remove_all(out);
  write_hugging_face(out, *model(at::kFloat), {}, GetParam().second);
  std::map<std::string, at::Tensor> written;
  for (auto& [name, tensor] : load_tensors(out / "model.safetensors")) written[name] = tensor;
  size_t unread = 0;
  for (const auto& [name, tensor] : starting_with("param.")) {
    const bool of_later_block = name.find(".ln0.") != std::string::npos && !written.contains(name);
    if (of_later_block || (name.starts_with("blocks.0.att.v") &&
                           name.size() == std::string("blocks.0.att.v0").size()))
      ++unread;
    else EXPECT_TRUE(written.contains(name) && at::equal(written[name], tensor)) << name;
  }
  EXPECT_EQ(written.size() + unread, starting_with("param.").size());
  const auto settings = nlohmann::json::parse(read_file(out / "config.json"));
  const auto theirs = config();
  // The ranks of x060 are constants of its trainer, not settings.
  for (const auto& [key, value] : theirs.items())
    if (!key.ends_with("_lora") || GetParam().second != std::string("rwkv_lm_x060"))
      EXPECT_EQ(settings.value(key, nlohmann::json()), value) << key;
  EXPECT_EQ(hugging_face_spec(out).toml(), hugging_face_spec(folder).toml());
}

// RWKV-LM's demos give each block a first norm and use that of block 0 only.
TEST_P(RwkvGolden, FirstNormOfLaterBlocksIsLeftOut) {
  NamedTensors tensors = starting_with("param.");
  const auto m = model(at::kFloat);
  std::erase_if(tensors, [](const auto& t) { return t.first.find("blocks.1.ln0.") == 0; });
  const at::Tensor norm = at::full({m->spec.config.d_model}, NAN);
  for (const char* name : {"blocks.1.ln0.weight", "blocks.1.ln0.bias"})
    tensors.emplace_back(name, norm);
  save_tensors(folder / "model.safetensors", tensors);
  const auto with_norm = model(at::kFloat);
  for (const auto& parameter : m->named_parameters())
    EXPECT_TRUE(at::equal(parameter.value(), with_norm->named_parameters()[parameter.key()]))
        << parameter.key();
  tensors.emplace_back("blocks.0.att.vx", norm);
  save_tensors(folder / "model.safetensors", tensors);
  EXPECT_THROW(model(at::kFloat), BadInput);
}

INSTANTIATE_TEST_SUITE_P(Models, RwkvGolden,
                         testing::Values(std::pair("rwkv5_model_T65", "rwkv_lm_x052"),
                                         std::pair("rwkv6_model_T65", "rwkv_lm_x060"),
                                         std::pair("rwkv7_model_T64", "rwkv_lm_x070"),
                                         std::pair("rwkv7_model_T65", "rwkv_lm_x070")),
                         [](const auto& info) { return info.param.first; });

}  // namespace
}  // namespace assay::exchange
