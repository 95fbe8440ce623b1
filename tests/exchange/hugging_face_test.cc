// Models that transformers wrote: what they compute, their gradients, how they train, and
// the way back.
#include "exchange/hugging_face.h"

#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <set>

#include "exchange/hybrids.h"
#include "exchange/model_files.h"
#include "nn/testing.h"

namespace assay::exchange {

using namespace nn;

namespace {

struct Golden {
  std::string name;  // of the folder
  // Errors of another float64 implementation against the reference in float32
  double logits;
  double gradients;
  double training;
  // Settings that mean the same with other values
  std::set<std::string> written_otherwise = {};
};

// Float32 rounds on both sides; in float64 all that is left is the rounding of the reference, known
// to one digit.
double slack_of(at::ScalarType dtype) { return dtype == at::kFloat ? 10 : 1.5; }

struct HuggingFace : testing::TestWithParam<Golden> {
  void SetUp() override {
    folder = golden_folder() / GetParam().name;
    if (!fs::exists(folder))
      GTEST_SKIP() << GetParam().name << " is in the complete golden data only";
    for (auto& [name, tensor] : load_tensors(folder / "reference.safetensors"))
      reference[name] = tensor;
  }
  std::shared_ptr<LanguageModel> model(at::ScalarType dtype) const {
    auto model = read_hugging_face(folder);
    model->to(dtype);
    return model;
  }
  std::string layout() const {
    return nlohmann::json::parse(read_file(folder / "config.json"))["model_type"];
  }
  fs::path folder;
  std::map<std::string, at::Tensor> reference;
};

NamedTensors gradients(LanguageModel& model, const at::Tensor& tokens, const std::string& layout) {
  model.zero_grad();
  model.loss(tokens).backward();
  NamedTensors out;
  for (const auto& item : model.named_parameters())
    out.emplace_back(item.key(), item.value().grad());
  return to_hugging_face(model.spec, out, layout);
}

// The loss before each of ten AdamW steps and after the last.
at::Tensor training_losses(LanguageModel& model, const at::Tensor& tokens) {
  torch::optim::AdamW optimizer(
      model.parameters(),
      torch::optim::AdamWOptions(1e-3).betas({0.9, 0.95}).eps(1e-8).weight_decay(0));
  std::vector<double> losses;
  for (int step = 0; step <= 10; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = model.loss(tokens);
    losses.push_back(loss.item<double>());
    loss.backward();
    optimizer.step();
  }
  return at::tensor(losses, at::kDouble);
}

TEST_P(HuggingFace, ComputesWhatTransformersComputes) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    SCOPED_TRACE(c10::toString(dtype));
    const double slack = slack_of(dtype);
    const auto m = model(dtype);
    const at::Tensor tokens = reference.at("in.tokens");
    if (ModelState state; reference.contains("out.logits"))
      EXPECT_LE(relative_error(m->logits(tokens, state), reference.at("out.logits")),
                slack * GetParam().logits);
    EXPECT_LE(relative_error(m->token_losses(tokens), reference.at("out.token_loss")),
              slack * GetParam().logits);
    EXPECT_LE(relative_error(m->loss(tokens), reference.at("out.loss")), slack * GetParam().logits);
  }
}

TEST_P(HuggingFace, HasItsGradients) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    SCOPED_TRACE(c10::toString(dtype));
    const double slack = slack_of(dtype);
    const auto m = model(dtype);
    const NamedTensors found = gradients(*m, reference.at("in.tokens"), layout());
    for (const auto& [name, gradient] : found) {
      const bool left_out = !golden_data_is_complete() && gradient.squeeze().dim() > 1;
      ASSERT_EQ(reference.contains("grad." + name), !left_out) << name;
      if (left_out) continue;
      EXPECT_LE(relative_error(gradient, reference.at("grad." + name)),
                slack * GetParam().gradients)
          << name;
    }
  }
}

TEST_P(HuggingFace, TokenByTokenEqualsTheWholeSequence) {
  const at::NoGradGuard no_grad;
  const auto m = model(at::kDouble);
  const at::Tensor tokens = reference.at("in.tokens").slice(1, 0, 24);
  ModelState whole;
  ModelState decoded;
  std::vector<at::Tensor> steps = {m->logits(tokens.slice(1, 0, 5), decoded)};
  for (int64_t t = 5; t < tokens.size(1); ++t)
    steps.push_back(m->logits(tokens.slice(1, t, t + 1), decoded));
  EXPECT_LE(relative_error(at::cat(steps, 1), m->logits(tokens, whole)), 1e-12);
}

TEST_P(HuggingFace, TrainsAlike) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    SCOPED_TRACE(c10::toString(dtype));
    const auto m = model(dtype);
    const double slack = slack_of(dtype);
    EXPECT_LE(relative_error(training_losses(*m, reference.at("in.tokens")),
                             reference.at("out.train_losses")),
              slack * GetParam().training);
  }
}

TEST_P(HuggingFace, ExportsWhatItImported) {
  const fs::path out = fs::path(testing::TempDir()) / ("export_" + GetParam().name);
  const fs::path ours = out.string() + "_ours";
  for (const auto& old : {out, ours}) fs::remove_all(old);
  save_model(ours, open_model(folder));
  export_model(out, open_model(ours), {}, layout());
  const Safetensors written(out / "model.safetensors");
  const Safetensors source(folder / "model.safetensors");
  ASSERT_EQ(written.tensors().size(), source.tensors().size());
  for (const TensorEntry& tensor : source.tensors()) {
    const TensorEntry& copy = written.at(tensor.name);
    EXPECT_EQ(copy.shape, tensor.shape) << tensor.name;
    EXPECT_TRUE(std::ranges::equal(copy.bytes, tensor.bytes)) << tensor.name;
  }
  const auto config = nlohmann::json::parse(read_file(out / "config.json"));
  const auto original = nlohmann::json::parse(read_file(folder / "config.json"));
  for (const auto& [key, value] : config.items())
    if (original.contains(key) && !key.ends_with("_token_id") && key != "use_cache" &&
        !GetParam().written_otherwise.contains(key))
      EXPECT_EQ(value, original[key]) << key;
  EXPECT_EQ(hugging_face_spec(out).toml(), hugging_face_spec(folder).toml());
}

INSTANTIATE_TEST_SUITE_P(
    Golden, HuggingFace,
    testing::Values(
        Golden{"hf_gpt2", 4e-7, 8e-7, 1e-7}, Golden{"hf_llama_mha", 1e-6, 1e-6, 6e-8},
        Golden{"hf_llama_gqa", 7e-7, 1e-6, 1e-7}, Golden{"hf_mamba", 9e-7, 3e-6, 1e-7},
        Golden{"hf_mamba2", 7e-7, 1e-6, 1e-7}, Golden{"hf_gated_deltanet", 2e-6, 4e-6, 5e-7},
        Golden{"hf_lfm2", 8e-7, 9e-7, 1e-7, {"block_auto_adjust_ff_dim", "intermediate_size"}},
        Golden{"hf_qwen3_next_hybrid", 2e-6, 4e-6, 8e-8},
        Golden{"hf_qwen3_5", 4e-6, 1e-5, 2e-6, {"rope_parameters"}},
        Golden{"hf_olmo_hybrid_published", 2e-6, 5e-6, 8e-8},
        Golden{"hf_granite_hybrid", 3e-7, 2e-6, 1e-7, {"layer_types"}},
        Golden{"hf_granite_hybrid_rope", 2e-7, 6e-7, 1e-7}, Golden{"hf_qwen3", 7e-7, 1e-6, 6e-8},
        Golden{"hf_mistral_swa", 5e-7, 8e-7, 8e-8}),
    [](const auto& info) { return info.param.name; });

// transformers 5.24 cuts the convolution into thirds, and calls the norm after attention otherwise.
TEST(HuggingFaceFiles, OlmoHybridAsTransformersWritesItIsRead) {
  const fs::path folder = golden_folder() / "hf_olmo_hybrid";
  if (!fs::exists(folder)) GTEST_SKIP() << "hf_olmo_hybrid is in the complete golden data only";
  const auto model = read_hugging_face(folder);
  model->to(at::kDouble);
  std::map<std::string, at::Tensor> reference;
  for (auto& [name, tensor] : load_tensors(folder / "reference.safetensors"))
    reference[name] = tensor;
  ModelState state;
  EXPECT_LE(
      relative_error(model->logits(reference.at("in.tokens"), state), reference.at("out.logits")),
      5e-6);
}

// ---- What has no golden data: layouts, refusals. ----

const char* const kLlama =
    R"({"model_type": "llama", "vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2,
  "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 20,
  "rms_norm_eps": 1.25e-6, "attention_bias": true, "mlp_bias": true, "rope_theta": 500000.0,
  "tie_word_embeddings": true})";

struct HuggingFaceFolder : testing::Test {
  HuggingFaceFolder()
      : folder(fs::path(testing::TempDir()) /
               testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(folder);
    make_folder(folder);
    config = nlohmann::json::parse(kLlama);
  }
  void write_config() { write_file(folder / "config.json", config.dump()); }
  // A model of `config`, its weights random, in the folder.
  std::shared_ptr<LanguageModel> write() {
    write_config();
    auto model = std::make_shared<LanguageModel>(hugging_face_spec(folder));
    const at::NoGradGuard no_grad;
    at::Generator noise = generator("weights");
    for (auto& parameter : model->parameters())
      parameter.copy_(at::randn(parameter.sizes(), noise));
    tensors = to_hugging_face(model->spec, named_parameters_of(*model), layout);
    save_tensors(folder / "model.safetensors", tensors);
    return model;
  }
  void expect_refused(const std::string& words) {
    try {
      read_hugging_face(folder);
      ADD_FAILURE() << "was accepted; expected a message with: " << words;
    } catch (const BadInput& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  }
  void expect_equals(const LanguageModel& model) {
    const NamedTensors wanted = named_parameters_of(model);
    const NamedTensors found = named_parameters_of(*read_hugging_face(folder));
    ASSERT_EQ(found.size(), wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i)
      EXPECT_TRUE(at::equal(found[i].second, wanted[i].second)) << wanted[i].first;
  }
  fs::path folder;
  nlohmann::json config;
  std::string layout;  // of `tensors`; empty: the first that fits
  NamedTensors tensors;
};

TEST_F(HuggingFaceFolder, BiasesAndTheOlderRopeThetaAreRead) {
  expect_equals(*write());
  const ConfigNode model = ConfigNode::parse(hugging_face_spec(folder).toml()).child("model");
  EXPECT_EQ(model.child("attention").value("rope_base"), "500000.0");
  EXPECT_EQ(model.value("norm_eps"), "1.25e-06");
  EXPECT_EQ(model.child("attention").value("bias"), "true");
}

TEST_F(HuggingFaceFolder, ShardsAreRead) {
  const auto model = write();
  fs::remove(folder / "model.safetensors");
  nlohmann::json map;
  NamedTensors halves[2];
  for (size_t i = 0; i < tensors.size(); ++i) {
    halves[i % 2].push_back(tensors[i]);
    map[tensors[i].first] = fmt::format("model-{}.safetensors", i % 2);
  }
  for (int i : {0, 1}) save_tensors(folder / fmt::format("model-{}.safetensors", i), halves[i]);
  write_file(folder / "model.safetensors.index.json", nlohmann::json{{"weight_map", map}}.dump());
  expect_equals(*model);
  halves[0].push_back(halves[1].front());
  save_tensors(folder / "model-0.safetensors", halves[0]);
  expect_refused(fmt::format("model-1.safetensors: tensor '{}' is in {}, too", tensors[1].first,
                             (folder / "model-0.safetensors").string()));
  map[tensors[0].first] = "../elsewhere.safetensors";
  write_file(folder / "model.safetensors.index.json", nlohmann::json{{"weight_map", map}}.dump());
  expect_refused("is not a file name");
}

TEST_F(HuggingFaceFolder, NamesOfTheBareModelBuffersAndARepeatedTiedHeadAreRead) {
  const auto model = write();
  NamedTensors bare = {{"layers.0.self_attn.rotary_emb.inv_freq", at::ones(2)},
                       {"lm_head.weight", tensors[0].second}};
  ASSERT_EQ(tensors[0].first, "model.embed_tokens.weight");
  for (const auto& [name, tensor] : tensors) bare.emplace_back(name.substr(6), tensor);
  save_tensors(folder / "model.safetensors", bare);
  expect_equals(*model);
  bare[1].second = tensors[0].second + 1;
  save_tensors(folder / "model.safetensors", bare);
  expect_refused("lm_head.weight");
}

TEST_F(HuggingFaceFolder, BrokenTensorsAreRefusedByName) {
  write();
  const auto broken = [&](const std::string& name, auto&& change) {
    NamedTensors changed;
    for (const auto& [n, tensor] : tensors)
      if (n != name) changed.emplace_back(n, tensor);
      else change(changed, tensor);
    save_tensors(folder / "model.safetensors", changed);
    expect_refused(name);
  };
  broken("model.layers.1.self_attn.k_proj.weight", [](auto&, const auto&) {});
  broken("model.layers.0.self_attn.k_proj.weight", [](auto& out, const auto& x) {
    out.emplace_back("model.layers.0.self_attn.k_proj.weight", x.slice(0, 1));
  });
  broken("model.layers.0.mlp.up_proj.weight", [](auto& out, const auto& x) {
    out.emplace_back("model.layers.0.mlp.up_proj.weight", x.slice(1, 1));
  });
  broken("model.norm.weight", [](auto& out, const auto& x) {
    out.emplace_back("model.norm.weight", x);
    out.emplace_back("model.norm.weight_scale", x);
  });
  save_tensors(folder / "model.safetensors", tensors);
  config["vocab_size"] = int64_t{1} << 40;  // refused before such a model is made
  write_config();
  expect_refused("config.json: 'vocab_size'");
  config["vocab_size"] = 11;
  const auto layers = config["num_hidden_layers"];
  config["num_hidden_layers"] = 1'000'000'000;
  write_config();
  expect_refused("config.json: 'num_hidden_layers'");
  config["num_hidden_layers"] = layers;
  write_config();
  fs::remove(folder / "model.safetensors");
  expect_refused("model.safetensors.index.json");
}

TEST_F(HuggingFaceFolder, SettingsThatAreNotUnderstoodAreRefusedByName) {
  write();
  const std::vector<std::pair<std::string, nlohmann::json>> wrong = {
      {"model_type", "lama"},
      {"hidden_act", "relu"},
      {"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}},
      {"rope_scaling", {{"rope_type", "default"}, {"factor", 2.0}}},
      {"rope_parameters", {{"rope_type", "llama3"}}},
      {"rope_parameters", {{"type", "linear"}, {"rope_theta", 1e4}}},
      {"rope_parameters", {{"rope_type", "default"}, {"factor", 4.0}}},
      {"rope_parameters", {{"original_max_position_embeddings", 4096}}},
      {"hidden_size", nullptr},
      {"hidden_size", "12"},
      {"num_hidden_layers", 0},
      {"num_attention_heads", 0},
      {"num_key_value_heads", -3},
      {"intermediate_size", 2.5},
      {"tie_word_embeddings", "yes"},
      {"quantization_config", {{"bits", 4}}}};
  for (const auto& [key, value] : wrong) {
    config = nlohmann::json::parse(kLlama);
    config[key] = value;
    write_config();
    SCOPED_TRACE(config[key].dump());
    expect_refused(key == "num_hidden_layers"     ? "num_layers"
                   : key == "num_attention_heads" ? "num_heads"
                   : key == "num_key_value_heads" ? "num_kv_heads"
                                                  : key);
  }
  for (const char* text : {"", "[1, 2]", "{\"model_type\": "}) {
    write_file(folder / "config.json", text);
    expect_refused("config.json");
  }
  config = {{"model_type", "mamba"},
            {"vocab_size", 8},
            {"hidden_size", 4},
            {"num_hidden_layers", 1},
            {"use_bias", true}};
  write_config();
  expect_refused("use_bias");
}

std::string pattern_of(const fs::path& folder) {
  return ConfigNode::parse(hugging_face_spec(folder).toml()).child("model").value("pattern");
}

TEST_F(HuggingFaceFolder, LayersOfSeveralKindsAreReadBack) {
  const std::map<std::string, std::string> patterns = {
      {"lfm2", R"(["base_conv", "attention"])"},
      {"qwen3_next", R"(["gated_delta_net", "attention"])"},
      {"qwen3_5", R"(["gated_delta_net", "gated_delta_net", "gated_delta_net", "attention"])"},
      {"olmo_hybrid", R"(["gated_delta_net", "gated_delta_net", "gated_delta_net", "attention"])"},
      {"granitemoehybrid", R"(["mamba2", "attention"])"},
      {"qwen2", R"(["attention"])"}};
  for (const auto& [name, text] : kHybrids) {
    SCOPED_TRACE(name);
    config = nlohmann::json::parse(text);
    layout = name == "qwen3_5" ? "qwen3_5_text" : name;
    const auto model = write();
    EXPECT_EQ(pattern_of(folder), patterns.at(name));
    expect_equals(*model);
    // And from the config.json that export writes
    config = hugging_face_config(model->spec, layout);
    write_config();
    EXPECT_EQ(hugging_face_spec(folder).toml(), model->spec.toml());
    expect_equals(*model);
  }
}

TEST_F(HuggingFaceFolder, SettingsOfLayersThatAreNotUnderstoodAreRefusedByName) {
  struct Wrong {
    std::string layout;
    std::string key;
    nlohmann::json value;
    std::string words = "";  // of the message; empty: the key
  };
  const std::vector<Wrong> wrong = {
      {"lfm2", "layer_types", {"conv", "conv"}},
      {"lfm2", "layer_types", {"conv", "mamba", "conv"}, "of the kind \"mamba\""},
      {"lfm2", "rope_parameters", {{"rope_type", "yarn"}}, "rope_type"},
      {"lfm2", "num_hidden_layers", 1'000'000'000},
      {"lfm2", "num_hidden_layers", 0},
      {"qwen3_next", "num_experts", 512},
      {"qwen3_next", "full_attention_interval", 0},
      {"qwen3_next", "layer_types", "linear_attention"},
      {"olmo_hybrid", "layer_types", std::vector<std::string>(4, "linear_attention"),
       "must be of the kind 'full_attention'"},
      {"granitemoehybrid", "num_local_experts", 8},
      {"granitemoehybrid", "num_local_experts", nullptr},
      {"granitemoehybrid", "mamba_n_heads", 3},
      {"granitemoehybrid", "mamba_d_head", 8},
      {"granitemoehybrid", "mamba_proj_bias", true},
      {"granitemoehybrid", "position_embedding_type", "alibi"},
      {"qwen2", "use_sliding_window", true},
      {"qwen2", "model_type", "qwen3_moe", "because they have experts"},
      {"qwen2", "model_type", "kimi_linear", "multi-head latent attention"}};
  for (const auto& [name, key, value, words] : wrong) {
    config = nlohmann::json::parse(kHybrids.at(name));
    config[key] = value;
    write_config();
    SCOPED_TRACE(name + ": " + key);
    expect_refused(words.empty() ? key : words);
  }
}

// The text model of a model with several parts is read.
TEST_F(HuggingFaceFolder, TextOfAMultimodalModelIsRead) {
  config = nlohmann::json::parse(kHybrids.at("qwen3_5"));
  layout = "qwen3_5_text";
  const auto model = write();
  NamedTensors whole = {{"model.visual.patch_embed.weight", at::ones(2)},
                        {"mtp.norm.weight", at::ones(2)}};
  for (const auto& [name, tensor] : tensors)
    whole.emplace_back(name.starts_with("model.") ? "model.language_model." + name.substr(6) : name,
                       tensor);
  save_tensors(folder / "model.safetensors", whole);
  expect_equals(*model);
}

TEST_F(HuggingFaceFolder, ScalesAndNormsAfterPartsHaveNoPlaceInLlama) {
  for (const char* setting : {"residual_scale = 0.5", "post_norm = [\"attention\"]"}) {
    const auto model =
        make_model(fmt::format("[model]\nvocab_size = 8\nd_model = 8\n"
                               "channel_mixer = \"swiglu\"\n{}\n",
                               setting));
    SCOPED_TRACE(setting);
    EXPECT_THROW(hugging_face_config(model->spec, "llama"), BadInput);
  }
}

TEST_F(HuggingFaceFolder, PositionsWithoutScalingAreReadInEveryForm) {
  const auto model = write();
  for (const auto& [key, value] : std::vector<std::pair<std::string, nlohmann::json>>{
           {"rope_scaling", {{"rope_type", "default"}}},
           {"rope_scaling", {{"type", "default"}}},
           {"rope_parameters", {{"type", "default"}, {"rope_theta", 500000.0}}},
           {"rope_parameters", {{"rope_type", nullptr}, {"factor", nullptr}}}}) {
    config = nlohmann::json::parse(kLlama);
    config[key] = value;
    write_config();
    SCOPED_TRACE(config.dump());
    expect_equals(*model);
  }
}

TEST_F(HuggingFaceFolder, TiedEmbeddingUnderTheNameOfTheHeadIsRead) {
  const auto llama = write();
  ASSERT_EQ(tensors[0].first, "model.embed_tokens.weight");
  tensors[0].first = "lm_head.weight";
  save_tensors(folder / "model.safetensors", tensors);
  expect_equals(*llama);
  config = {
      {"model_type", "gpt2"}, {"vocab_size", 11}, {"n_embd", 12}, {"n_layer", 1}, {"n_head", 3}};
  const auto gpt2 = write();
  ASSERT_EQ(tensors[0].first, "transformer.wte.weight");
  tensors[0].first = "lm_head.weight";
  save_tensors(folder / "model.safetensors", tensors);
  expect_equals(*gpt2);
  config = {
      {"model_type", "mamba"}, {"vocab_size", 11}, {"hidden_size", 8}, {"num_hidden_layers", 1}};
  const auto mamba = write();
  ASSERT_EQ(tensors[0].first, "backbone.embeddings.weight");
  for (const char* name : {"lm_head.weight", "backbone.embedding.weight"}) {
    tensors[0].first = name;
    save_tensors(folder / "model.safetensors", tensors);
    expect_equals(*mamba);
  }
}

TEST_F(HuggingFaceFolder, NamesOfWrappersBeforeAllTensorsAreLeftOut) {
  const auto model = write();
  for (const char* prefix : {"_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."}) {
    NamedTensors wrapped;
    for (const auto& [name, tensor] : tensors) wrapped.emplace_back(prefix + name, tensor);
    save_tensors(folder / "model.safetensors", wrapped);
    SCOPED_TRACE(prefix);
    expect_equals(*model);
  }
}

TEST_F(HuggingFaceFolder, IntegersInTheWeightsAreRefused) {
  write();
  tensors[1].second = tensors[1].second.to(at::kLong);
  save_tensors(folder / "model.safetensors", tensors);
  expect_refused(fmt::format("tensor '{}' holds Long", tensors[1].first));
}

TEST_F(HuggingFaceFolder, RankThatFlaWouldComputeIsAskedFor) {
  config = {{"model_type", "rwkv7"},
            {"vocab_size", 11},
            {"hidden_size", 64},
            {"num_hidden_layers", 1},
            {"decay_low_rank_dim", nullptr}};
  write_config();
  expect_refused(
      "'decay_low_rank_dim' is missing or null. "
      "Write the number of rows of 'attn.w_lora.lora.0.weight' there");
}

// Without a layer of attention, transformers fails as soon as it makes a cache.
TEST_F(HuggingFaceFolder, ExportedQwen3NextUsesNoCache) {
  const auto model = make_model(
      "[model]\nvocab_size = 8\nd_model = 8\nnorm = \"zero_centered_rmsnorm\"\n"
      "pattern = [\"gated_delta_net\"]\nchannel_mixer = \"swiglu\"\n"
      "[model.gated_delta_net]\nnum_heads = 2\n");
  EXPECT_EQ(hugging_face_config(model->spec, "qwen3_next")["use_cache"], false);
}

TEST_F(HuggingFaceFolder, ErrorsAboutOurValuesNameTheSettingTheyCameFrom) {
  config["hidden_size"] = -12;
  write_config();
  expect_refused("config.json: 'hidden_size': model.d_model must be from 1 to 1048576");
}

TEST_F(HuggingFaceFolder, ModelsWithoutALayoutSayWhy) {
  const auto model =
      make_model("[model]\nvocab_size = 8\nd_model = 8\n[model.attention]\nposition = \"alibi\"\n");
  try {
    hugging_face_config(model->spec);
    FAIL() << "ALiBi has no place in these layouts";
  } catch (const BadInput& error) {
    const std::string what = error.what();
    for (const char* words :
         {"gpt2: model.channel_mixer", "llama: model.attention.position = \"alibi\"",
          "mamba: model.pattern"})
      EXPECT_NE(what.find(words), std::string::npos) << what;
  }
}

TEST_F(HuggingFaceFolder, DeltaNetWithoutConvolutionHasNoLayout) {
  const auto model = make_model(
      "[model]\nvocab_size = 8\nd_model = 8\nnorm = \"zero_centered_rmsnorm\"\n"
      "pattern = [\"gated_delta_net\"]\nchannel_mixer = \"swiglu\"\n"
      "[model.gated_delta_net]\nnum_heads = 2\nconv_width = 0\n");
  try {
    hugging_face_config(model->spec);
    FAIL() << "every layout has a convolution";
  } catch (const BadInput& error) {
    EXPECT_NE(std::string(error.what()).find("qwen3_next: model.gated_delta_net.conv_width"),
              std::string::npos)
        << error.what();
  }
}

// transformers 4 writes Infinity as Python does, and transformers 5 as an object.
TEST_F(HuggingFaceFolder, BareInfinityIsRead) {
  const fs::path golden = golden_folder() / "hf_mamba2";
  std::string text = read_file(golden / "config.json");
  const size_t begin = text.rfind('{', text.find("__float__"));
  const size_t end = text.find('}', begin) + 1;
  text.replace(begin, end - begin, "Infinity");
  text.insert(1, R"("note": "\\\"Infinity\" and NaN",)");
  write_file(folder / "config.json", text);
  EXPECT_EQ(hugging_face_spec(folder).toml(), hugging_face_spec(golden).toml());
  text.replace(text.rfind("Infinity"), 8, "-Infinity");
  write_file(folder / "config.json", text);
  expect_refused("time_step_limit");
}

}  // namespace
}  // namespace assay::exchange
