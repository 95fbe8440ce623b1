// Mixers against the official or reference code of their architectures: outputs, gradients of input
// and parameters, states.
#include <torch/torch.h>

#include "nn/tensors.h"
#include "testing.h"

namespace assay::nn {
namespace {

struct Block {
  std::string file;
  std::string mixer;
  std::string table;
  std::map<std::string, std::vector<std::string>> names;  // our parameter: theirs, stacked by rows
  std::map<std::string, std::string> states;              // ours: theirs
};

struct MixerGolden : testing::TestWithParam<Block> {
  void SetUp() override {
    const fs::path file = golden_folder() / (GetParam().file + ".safetensors");
    if (!fs::exists(file))
      GTEST_SKIP() << GetParam().file << " is in the complete golden data only";
    for (auto& [name, tensor] : load_tensors(file)) golden[name] = tensor;
    for (auto& [name, tensor] : golden)
      if (name.starts_with("in.")) input = name.substr(3);
  }
  // Theirs in our layout: [rows, 1, taps] is [rows, taps] here.
  at::Tensor stacked(const std::string& prefix, const std::vector<std::string>& names) const {
    std::vector<at::Tensor> parts;
    for (const std::string& name : names) {
      const at::Tensor x = golden.at(prefix + name);
      parts.push_back(x.dim() == 3 ? x.squeeze(1) : x);
    }
    return at::cat(parts);
  }
  std::shared_ptr<Mixer> make(at::ScalarType dtype, int64_t d_model) const {
    const auto mixer =
        mixers().at(GetParam().mixer).make(ConfigNode::parse(GetParam().table), d_model);
    NamedTensors parameters;
    for (const auto& [ours, theirs] : GetParam().names)
      parameters.emplace_back(ours, stacked("param.", theirs));
    copy_tensors(parameters, named_parameters_of(*mixer), GetParam().file);
    mixer->to(dtype);
    return mixer;
  }
  std::map<std::string, at::Tensor> golden;
  std::string input;
};

TEST_P(MixerGolden, OutputsStatesAndGradients) {
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    SCOPED_TRACE(c10::toString(dtype));
    const double tolerance = dtype == at::kDouble ? 1e-12 : 1e-5;
    // Sums over all tokens: float32 differs by processor (1.04e-5 for a bias with AVX-512)
    const double of_parameters = dtype == at::kDouble ? 1e-12 : 3e-5;
    const at::Tensor x = golden.at("in." + input).to(dtype).requires_grad_();
    const auto mixer = make(dtype, x.size(2));
    State state;
    const at::Tensor y = mixer->forward(x, state);
    EXPECT_LE(relative_error(y, golden.at("out.y")), tolerance);
    for (const auto& [ours, theirs] : GetParam().states) {
      const at::Tensor expected = golden.at(theirs);
      const at::Tensor found = state.tensors().at(ours);
      EXPECT_LE(relative_error(found,
                               expected.narrow(2, expected.size(2) - found.size(2), found.size(2))),
                tolerance)
          << ours;
    }
    (golden.at("cot.y").to(dtype) * y).sum().backward();
    EXPECT_LE(relative_error(x.grad(), golden.at("grad." + input)), tolerance);
    for (const auto& [ours, theirs] : GetParam().names) {
      if (!golden.contains("grad.param." + theirs.front())) continue;
      EXPECT_LE(
          relative_error(mixer->named_parameters()[ours].grad(), stacked("grad.param.", theirs)),
          of_parameters)
          << ours;
    }
  }
}

const std::map<std::string, std::vector<std::string>> kBaseConv = {
    {"conv.weight", {"conv.conv.weight"}},
    {"in_proj.weight", {"in_proj.weight"}},
    {"in_proj.bias", {"in_proj.bias"}},
    {"out_proj.weight", {"out_proj.weight"}},
    {"out_proj.bias", {"out_proj.bias"}}};

using Names = std::map<std::string, std::vector<std::string>>;
Names with(Names names, const Names& others) {
  names.insert(others.begin(), others.end());
  return names;
}

// Layers of flash-linear-attention with delta rules.
Names delta_layer(std::vector<std::string> in_proj, const Names& others) {
  return with({{"in_proj.weight", std::move(in_proj)},
               {"conv.weight", {"q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"}},
               {"norm.weight", {"o_norm.weight"}},
               {"out_proj.weight", {"o_proj.weight"}},
               {"A_log", {"A_log"}},
               {"dt_bias", {"dt_bias"}}},
              others);
}
const Names kLowRankGates = {{"decay_proj.weight", {"f_proj.1.weight"}},
                             {"gate_proj.weight", {"g_proj.1.weight"}},
                             {"gate_proj.bias", {"g_proj.1.bias"}}};
const Names kKda = delta_layer({"q_proj.weight", "k_proj.weight", "v_proj.weight",
                                "f_proj.0.weight", "g_proj.0.weight", "b_proj.weight"},
                               kLowRankGates);
const Names kGdn2 = delta_layer({"q_proj.weight", "k_proj.weight", "v_proj.weight", "b_proj.weight",
                                 "w_proj.weight", "f_proj.0.weight", "g_proj.0.weight"},
                                kLowRankGates);
const Names kComba = delta_layer({"q_proj.weight", "k_proj.weight", "v_proj.weight",
                                  "g_proj.weight", "b_proj.weight", "a_proj.weight"},
                                 {{"feedback", {"decay"}}, {"D", {"D"}}});
const Names kDeltaProduct = delta_layer({"q_proj.weight", "k_proj.weight", "v_proj.weight",
                                         "g_proj.weight", "b_proj.weight", "a_proj.weight"},
                                        {});
const Names kLfm2 = {{"conv.weight", {"conv.weight"}},
                     {"in_proj.weight", {"in_proj.weight"}},
                     {"out_proj.weight", {"out_proj.weight"}}};
const Names kMamba3 = {{"in_proj.weight", {"in_proj.weight"}},
                       {"out_proj.weight", {"out_proj.weight"}},
                       {"B_norm.weight", {"B_norm.weight"}},
                       {"C_norm.weight", {"C_norm.weight"}},
                       {"B_bias", {"B_bias"}},
                       {"C_bias", {"C_bias"}},
                       {"dt_bias", {"dt_bias"}},
                       {"D", {"D"}}};
const std::map<std::string, std::string> kMatrixRecurrence = {{"S", "out.state"}};

INSTANTIATE_TEST_SUITE_P(
    Blocks, MixerGolden,
    testing::Values(
        Block{"longhorn_block_T65",
              "longhorn",
              "",
              {{"in_proj.weight", {"in_proj.weight"}},
               {"conv.weight", {"conv1d.weight"}},
               {"conv.bias", {"conv1d.bias"}},
               {"x_proj.weight", {"x_proj.weight"}},
               {"dt_proj.weight", {"dt_head.weight"}},
               {"dt_bias", {"dt_head.bias"}},
               {"out_proj.weight", {"out_proj.weight"}},
               {"D", {"D"}}},
              {{"S", "out.ssm_state"}, {"conv", "out.conv_state"}}},
        Block{"base_conv_T65", "base_conv", "expand = 2\nconv_bias = false", kBaseConv, {}},
        Block{"base_conv_T64_expand4", "base_conv", "conv_bias = false", kBaseConv, {}},
        Block{"zoology_base_conv_T65",
              "base_conv",
              "form = \"zoology\"",
              {{"conv.weight", {"conv.conv.weight"}},
               {"conv.bias", {"conv.conv.bias"}},
               {"in_proj.weight", {"projection.weight"}},
               {"in_proj.bias", {"projection.bias"}}},
              {}},
        Block{"based_linear_attention_T65",
              "taylor_attention",
              "num_heads = 2\nfeature_dim = 8",
              {{"qkv.weight", {"proj_q.weight", "proj_k.weight", "proj_v.weight"}},
               {"out_proj.weight", {"out_proj.weight"}}},
              {}},
        Block{"kda_layer_T65", "kda", "num_heads = 2\nhead_dim = 12", kKda, kMatrixRecurrence},
        Block{"kda_layer_T65_bounded", "kda", "num_heads = 3\ngate_bound = -5", kKda,
              kMatrixRecurrence},
        Block{"gdn2_layer_T65", "gdn2", "num_heads = 2\nhead_dim = 12", kGdn2, kMatrixRecurrence},
        Block{"comba_layer_T65", "comba", "num_heads = 2\nhead_dim = 8", kComba, kMatrixRecurrence},
        Block{"gated_delta_product_layer_T65_n2", "gated_delta_product",
              "num_heads = 2\nhead_dim = 8\nvalue_head_dim = 12", kDeltaProduct, kMatrixRecurrence},
        Block{"gated_delta_product_layer_T65_n3", "gated_delta_product",
              "num_steps = 3\nnum_heads = 2\nnum_key_heads = 1\nhead_dim = 8\n"
              "value_head_dim = 8\nnegative_eigenvalues = false",
              kDeltaProduct, kMatrixRecurrence},
        Block{"lfm2_conv_layer_T65", "base_conv", "form = \"lfm2\"\nconv_bias = false", kLfm2, {}},
        Block{"mamba3_layer_T65", "mamba3", "state_size = 8\nhead_dim = 12", kMamba3, {}},
        Block{"mamba3_layer_T65_fla",
              "mamba3",
              "state_size = 8\nhead_dim = 12\ndecay = \"softplus\"",
              kMamba3,
              {}},
        Block{"mamba3_layer_T65_outnorm",
              "mamba3",
              "state_size = 8\nhead_dim = 12\nnum_groups = 2\nrotary_fraction = 1\nnorm = true",
              with(kMamba3, {{"norm.weight", {"norm.weight"}}}),
              {}},
        Block{"forgetting_attn_layer_T65",
              "forgetting_attention",
              "num_heads = 2",
              {{"in_proj.weight",
                {"q_proj.weight", "k_proj.weight", "v_proj.weight", "f_proj.weight"}},
               {"forget_bias", {"f_proj.bias"}},
               {"out_proj.weight", {"o_proj.weight"}}},
              {}},
        Block{"forgetting_attn_layer_T65_gated",
              "forgetting_attention",
              "num_heads = 4\nnum_kv_heads = 2\nqk_norm = true\noutput_gate = true",
              {{"in_proj.weight",
                {"q_proj.weight", "k_proj.weight", "v_proj.weight", "f_proj.weight",
                 "g_proj.weight"}},
               {"forget_bias", {"f_proj.bias"}},
               {"q_norm.weight", {"q_norm.weight"}},
               {"k_norm.weight", {"k_norm.weight"}},
               {"out_proj.weight", {"o_proj.weight"}}},
              {}}),
    [](const auto& info) { return info.param.file; });

}  // namespace
}  // namespace assay::nn
