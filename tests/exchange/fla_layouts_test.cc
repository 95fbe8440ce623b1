// Layouts of flash-linear-attention: the names and shapes of a model's tensors there, and what
// those compute by its layers' formulas, written out a second time here, token by token.
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "exchange/hugging_face.h"
#include "nn/testing.h"

namespace assay::exchange {

using namespace nn;

namespace {

using Tensors = std::map<std::string, at::Tensor>;
using Attention = std::function<at::Tensor(const at::Tensor& x,
                                           const std::function<at::Tensor(const std::string&)>& p)>;

constexpr double kEps = 1e-6;

at::Tensor rms(const at::Tensor& x, const at::Tensor& weight) {
  return x / (x.square().mean(-1, true) + kEps).sqrt() * weight;
}
at::Tensor unit(const at::Tensor& x) { return x / (x.square().sum(-1, true) + 1e-6).sqrt(); }
at::Tensor heads(const at::Tensor& x, int64_t count) { return x.unflatten(-1, {count, -1}); }
at::Tensor conv(const at::Tensor& x, const at::Tensor& weight) {  // [B, T, D], [D, 1, K]
  const at::Tensor padded = at::constant_pad_nd(x.transpose(1, 2), {weight.size(2) - 1, 0});
  return at::silu(at::conv1d(padded, weight, {}, at::IntArrayRef{1}, at::IntArrayRef{0},
                             at::IntArrayRef{1}, x.size(2))
                      .transpose(1, 2));
}

// Σ over the past of S read by q / √K, where S_t = step(S, t) on S [B, H, K, V].
at::Tensor read_out(const at::Tensor& q, const at::Tensor& v,
                    const std::function<at::Tensor(const at::Tensor&, int64_t)>& step) {
  at::Tensor S = at::zeros({q.size(0), v.size(2), q.size(3), v.size(3)}, q.options());
  std::vector<at::Tensor> out;
  for (int64_t t = 0; t < q.size(1); ++t) {
    S = step(S, t);
    out.push_back(at::einsum("bhkv,bhk->bhv", {S, q.select(1, t)}) / std::sqrt(double(q.size(3))));
  }
  return at::stack(out, 1);
}
at::Tensor product(const at::Tensor& k, const at::Tensor& v) {
  return k.unsqueeze(-1) * v.unsqueeze(-2);
}
at::Tensor corrected(const at::Tensor& S, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& beta) {
  return S + product(k, (v - at::einsum("bhkv,bhk->bhv", {S, k})) * beta.unsqueeze(-1));
}

at::Tensor logits_of(const Tensors& theirs, const at::Tensor& tokens, int64_t layers,
                     const Attention& attention) {
  const auto all = [&](const std::string& name) { return theirs.at(name); };
  at::Tensor x = at::embedding(all("model.embeddings.weight"), tokens);
  for (int64_t i = 0; i < layers; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    const auto p = [&](const std::string& name) { return theirs.at(layer + "attn." + name); };
    x = x + attention(rms(x, all(layer + "attn_norm.weight")), p);
    const at::Tensor h = rms(x, all(layer + "mlp_norm.weight"));
    const auto mlp = [&](const std::string& name) {
      return all(layer + "mlp." + name + "_proj.weight").t();
    };
    x = x +
        at::matmul(at::silu(at::matmul(h, mlp("gate"))) * at::matmul(h, mlp("up")), mlp("down"));
  }
  return at::matmul(rms(x, all("model.norm.weight")), all("lm_head.weight").t());
}

at::Tensor gla(const at::Tensor& x, const std::function<at::Tensor(const std::string&)>& p) {
  const auto linear = [&](const std::string& name) { return at::linear(x, p(name + ".weight")); };
  const at::Tensor q = heads(linear("q_proj"), 2);
  const at::Tensor k = heads(linear("k_proj"), 2);
  const at::Tensor v = heads(linear("v_proj"), 2);
  const at::Tensor gate =
      at::linear(linear("gk_proj.0"), p("gk_proj.1.weight"), p("gk_proj.1.bias"));
  const at::Tensor decay = heads(gate.sigmoid().pow(1.0 / 16), 2);
  const at::Tensor y = read_out(q, v, [&](const at::Tensor& S, int64_t t) {
    return S * decay.select(1, t).unsqueeze(-1) + product(k.select(1, t), v.select(1, t));
  });
  return at::linear(
      (rms(y, p("g_norm_swish_gate.weight")) * at::silu(heads(linear("g_proj"), 2))).flatten(2),
      p("o_proj.weight"));
}

at::Tensor delta_net(const at::Tensor& x, const std::function<at::Tensor(const std::string&)>& p) {
  const auto part = [&](const std::string& name) {
    return heads(conv(at::linear(x, p(name + "_proj.weight")), p(name + "_conv1d.weight")), 2);
  };
  const at::Tensor q = unit(part("q"));
  const at::Tensor k = unit(part("k"));
  const at::Tensor v = part("v");
  const at::Tensor beta = at::linear(x, p("b_proj.weight")).sigmoid();
  const at::Tensor y = read_out(q, v, [&](const at::Tensor& S, int64_t t) {
    return corrected(S, k.select(1, t), v.select(1, t), beta.select(1, t));
  });
  return at::linear(rms(y, p("o_norm.weight")).flatten(2), p("o_proj.weight"));
}

at::Tensor gated_deltanet(const at::Tensor& x,
                          const std::function<at::Tensor(const std::string&)>& p) {
  const auto part = [&](const std::string& name, int64_t count) {
    return heads(conv(at::linear(x, p(name + "_proj.weight")), p(name + "_conv1d.weight")), count);
  };
  const at::Tensor q = unit(part("q", 2)).repeat_interleave(2, 2);
  const at::Tensor k = unit(part("k", 2)).repeat_interleave(2, 2);
  const at::Tensor v = part("v", 4);
  const at::Tensor beta = at::linear(x, p("b_proj.weight")).sigmoid();
  const at::Tensor decay =
      at::exp(-p("A_log").exp() * at::softplus(at::linear(x, p("a_proj.weight")) + p("dt_bias")));
  const at::Tensor y = read_out(q, v, [&](const at::Tensor& S, int64_t t) {
    return corrected(S * decay.select(1, t).unsqueeze(-1).unsqueeze(-1), k.select(1, t),
                     v.select(1, t), beta.select(1, t));
  });
  const at::Tensor gate = at::silu(heads(at::linear(x, p("g_proj.weight")), 4));
  return at::linear((rms(y, p("o_norm.weight")) * gate).flatten(2), p("o_proj.weight"));
}

at::Tensor rwkv7_logits(const Tensors& theirs, const at::Tensor& tokens) {
  const auto norm = [&](const at::Tensor& x, const std::string& name) {
    return at::layer_norm(x, {x.size(-1)}, theirs.at(name + ".weight"), theirs.at(name + ".bias"),
                          1e-5);
  };
  const auto before = [](const at::Tensor& x) {
    return at::constant_pad_nd(x.slice(1, 0, -1), {0, 0, 1, 0});
  };
  at::Tensor x =
      norm(at::embedding(theirs.at("model.embeddings.weight"), tokens), "model.layers.0.pre_norm");
  at::Tensor v_first;
  for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
    const at::Tensor h = norm(x, layer + "attn_norm");
    const auto p = [&](const std::string& name) { return theirs.at(layer + "attn." + name); };
    const auto mixed = [&](const std::string& letter) {
      return h + (before(h) - h) * p("x_" + letter);
    };
    const auto linear = [&](const std::string& letter) {
      return at::linear(mixed(letter), p(letter + "_proj.weight"));
    };
    const auto inner = [&](const std::string& from, const std::string& letter) {
      return at::linear(mixed(from), p(letter + "_lora.lora.0.weight"));
    };
    const auto outer = [&](const at::Tensor& y, const std::string& letter) {
      return at::linear(y, p(letter + "_lora.lora.2.weight"), p(letter + "_lora.lora.2.bias"));
    };
    const at::Tensor r = heads(linear("r"), 3);
    const at::Tensor w =
        heads(at::exp(-std::exp(-0.5) * outer(inner("w", "w").tanh(), "w").sigmoid()), 3);
    const at::Tensor a = outer(inner("a", "a"), "a").sigmoid();
    const at::Tensor g = at::linear(inner("g", "g").sigmoid(), p("g_lora.lora.2.weight"));
    at::Tensor v = linear("v");
    at::Tensor k = linear("k");
    if (v_first.defined()) v = v + (v_first - v) * outer(inner("v", "v"), "v").sigmoid();
    else v_first = v;
    at::Tensor kk = heads(k * p("k_k"), 3);
    kk = kk / kk.norm(2, -1, true);
    k = heads(k * (1 + (a - 1) * p("k_a")), 3);
    v = heads(v, 3);
    at::Tensor S = at::zeros({x.size(0), 3, 8, 8}, x.options());  // [B, H, value, key]
    std::vector<at::Tensor> out;
    for (int64_t t = 0; t < x.size(1); ++t) {
      const at::Tensor removed = at::einsum("bhvk,bhk->bhv", {S, kk.select(1, t)});
      S = S * w.select(1, t).unsqueeze(2) - product(removed, (kk * heads(a, 3)).select(1, t)) +
          product(v.select(1, t), k.select(1, t));
      out.push_back(at::einsum("bhvk,bhk->bhv", {S, r.select(1, t)}));
    }
    const at::Tensor y = at::stack(out, 1);
    const at::Tensor centred = y - y.mean(-1, true);
    const at::Tensor normed =
        (centred / (centred.square().mean(-1, true) + 8e-5).sqrt()).flatten(2) *
            p("g_norm.weight") +
        p("g_norm.bias");
    const at::Tensor bonus = ((r * k * p("r_k")).sum(-1, true) * v).flatten(2);
    x = x + at::linear((normed + bonus) * g, p("o_proj.weight"));
    const at::Tensor f = norm(x, layer + "ffn_norm");
    const at::Tensor key = f + (before(f) - f) * theirs.at(layer + "ffn.x_k");
    x = x + at::linear(at::linear(key, theirs.at(layer + "ffn.key.weight")).relu().square(),
                       theirs.at(layer + "ffn.value.weight"));
  }
  return at::linear(norm(x, "model.norm"), theirs.at("lm_head.weight"));
}

struct Layout {
  std::string config;
  // None: rwkv7, which has its own model around it
  Attention attention;
  std::map<std::string, std::vector<int64_t>> shapes;  // of layer 1
};

struct FlaLayout : testing::TestWithParam<std::pair<const char*, Layout>> {
  FlaLayout() : folder(fs::path(testing::TempDir()) / ("fla_" + std::string(GetParam().first))) {
    fs::remove_all(folder);
    make_folder(folder);
    write_file(folder / "config.json", GetParam().second.config);
    model = std::make_shared<LanguageModel>(hugging_face_spec(folder));
    const at::NoGradGuard no_grad;
    at::Generator noise = generator(GetParam().first);
    for (auto& parameter : model->parameters())
      parameter.add_(at::randn(parameter.sizes(), noise), 0.3);
    for (const auto& [name, tensor] : to_hugging_face(model->spec, named_parameters_of(*model)))
      theirs[name] = tensor;
  }
  fs::path folder;
  std::shared_ptr<LanguageModel> model;
  Tensors theirs;
};

TEST_P(FlaLayout, HasItsNamesAndShapes) {
  for (const auto& [name, shape] : GetParam().second.shapes) {
    ASSERT_TRUE(theirs.contains("model.layers.1." + name)) << name;
    EXPECT_EQ(theirs.at("model.layers.1." + name).sizes(), at::IntArrayRef(shape)) << name;
  }
  size_t in_layer = 0;
  for (const auto& [name, tensor] : theirs) in_layer += name.starts_with("model.layers.1.");
  EXPECT_EQ(in_layer, GetParam().second.shapes.size());
}

TEST_P(FlaLayout, ComesBackAsItWas) {
  write_hugging_face(folder, *model, {});
  const auto back = read_hugging_face(folder);
  EXPECT_EQ(back->spec.toml(), model->spec.toml());
  for (const auto& item : model->named_parameters())
    EXPECT_TRUE(at::equal(back->named_parameters()[item.key()], item.value())) << item.key();
}

TEST_P(FlaLayout, ComputesItsLayersFormulas) {
  const at::NoGradGuard no_grad;
  model->to(at::kDouble);
  for (auto& [name, tensor] : theirs) tensor = tensor.to(at::kDouble);
  const at::Tensor tokens = random_tokens(2, 37, model->spec.config.vocab_size, "tokens");
  const Attention& attention = GetParam().second.attention;
  const at::Tensor expected =
      attention ? logits_of(theirs, tokens, 2, attention) : rwkv7_logits(theirs, tokens);
  ModelState state;
  EXPECT_LE(relative_error(model->logits(tokens, state), expected), 1e-12);
}

const std::string kCommon =
    R"("vocab_size": 30, "hidden_size": 24, "num_hidden_layers": 2, "norm_eps": 1e-6,
       "tie_word_embeddings": false, )";
const std::map<std::string, std::vector<int64_t>> kMlp = {
    {"attn_norm.weight", {24}},         {"mlp_norm.weight", {24}},
    {"mlp.gate_proj.weight", {40, 24}}, {"mlp.up_proj.weight", {40, 24}},
    {"mlp.down_proj.weight", {24, 40}}, {"attn.o_proj.weight", {24, 24}}};

std::map<std::string, std::vector<int64_t>> with_mlp(
    std::map<std::string, std::vector<int64_t>> shapes) {
  for (const auto& entry : kMlp) shapes.insert(entry);
  return shapes;
}

std::vector<std::pair<const char*, Layout>> layouts() {
  return {
      {"gla",
       {R"({"model_type": "gla", )" + kCommon +
            R"("num_heads": 2, "expand_k": 0.5, "expand_v": 1, "intermediate_size": 40})",
        gla,
        with_mlp({{"attn.q_proj.weight", {12, 24}},
                  {"attn.k_proj.weight", {12, 24}},
                  {"attn.v_proj.weight", {24, 24}},
                  {"attn.g_proj.weight", {24, 24}},
                  {"attn.gk_proj.0.weight", {16, 24}},
                  {"attn.gk_proj.1.weight", {12, 16}},
                  {"attn.gk_proj.1.bias", {12}},
                  {"attn.g_norm_swish_gate.weight", {12}}})}},
      {"delta_net",
       {R"({"model_type": "delta_net", )" + kCommon + R"("num_heads": 2, "intermediate_size": 40})",
        delta_net,
        with_mlp({{"attn.q_proj.weight", {24, 24}},
                  {"attn.k_proj.weight", {24, 24}},
                  {"attn.v_proj.weight", {24, 24}},
                  {"attn.q_conv1d.weight", {24, 1, 4}},
                  {"attn.k_conv1d.weight", {24, 1, 4}},
                  {"attn.v_conv1d.weight", {24, 1, 4}},
                  {"attn.b_proj.weight", {2, 24}},
                  {"attn.o_norm.weight", {12}}})}},
      {"gated_deltanet",
       {R"({"model_type": "gated_deltanet", )" + kCommon +
            R"("num_heads": 2, "num_v_heads": 4, "head_dim": 3, "expand_v": 2.0, "conv_size": 3,
               "intermediate_size": 40})",
        gated_deltanet,
        with_mlp({{"attn.q_proj.weight", {6, 24}},
                  {"attn.k_proj.weight", {6, 24}},
                  {"attn.v_proj.weight", {24, 24}},
                  {"attn.g_proj.weight", {24, 24}},
                  {"attn.q_conv1d.weight", {6, 1, 3}},
                  {"attn.k_conv1d.weight", {6, 1, 3}},
                  {"attn.v_conv1d.weight", {24, 1, 3}},
                  {"attn.a_proj.weight", {4, 24}},
                  {"attn.b_proj.weight", {4, 24}},
                  {"attn.A_log", {4}},
                  {"attn.dt_bias", {4}},
                  {"attn.o_norm.weight", {6}}})}},
      {"rwkv7",
       {R"({"model_type": "rwkv7", "vocab_size": 30, "hidden_size": 24, "num_hidden_layers": 2,
            "head_dim": 8, "decay_low_rank_dim": 5, "gate_low_rank_dim": 7, "a_low_rank_dim": 3,
            "v_low_rank_dim": 2, "hidden_act": "sqrelu", "norm_eps": 1e-5})",
        {},
        {{"attn_norm.weight", {24}},
         {"attn_norm.bias", {24}},
         {"ffn_norm.weight", {24}},
         {"ffn_norm.bias", {24}},
         {"attn.x_r", {1, 1, 24}},
         {"attn.x_w", {1, 1, 24}},
         {"attn.x_k", {1, 1, 24}},
         {"attn.x_v", {1, 1, 24}},
         {"attn.x_a", {1, 1, 24}},
         {"attn.x_g", {1, 1, 24}},
         {"attn.k_k", {24}},
         {"attn.k_a", {24}},
         {"attn.r_k", {3, 8}},
         {"attn.r_proj.weight", {24, 24}},
         {"attn.k_proj.weight", {24, 24}},
         {"attn.v_proj.weight", {24, 24}},
         {"attn.o_proj.weight", {24, 24}},
         {"attn.w_lora.lora.0.weight", {5, 24}},
         {"attn.w_lora.lora.2.weight", {24, 5}},
         {"attn.w_lora.lora.2.bias", {24}},
         {"attn.a_lora.lora.0.weight", {3, 24}},
         {"attn.a_lora.lora.2.weight", {24, 3}},
         {"attn.a_lora.lora.2.bias", {24}},
         {"attn.v_lora.lora.0.weight", {2, 24}},
         {"attn.v_lora.lora.2.weight", {24, 2}},
         {"attn.v_lora.lora.2.bias", {24}},
         {"attn.g_lora.lora.0.weight", {7, 24}},
         {"attn.g_lora.lora.2.weight", {24, 7}},
         {"attn.g_norm.weight", {24}},
         {"attn.g_norm.bias", {24}},
         {"ffn.x_k", {24}},
         {"ffn.key.weight", {96, 24}},
         {"ffn.value.weight", {24, 96}}}}}};
}

INSTANTIATE_TEST_SUITE_P(Families, FlaLayout, testing::ValuesIn(layouts()),
                         [](const auto& info) { return info.param.first; });

}  // namespace
}  // namespace assay::exchange
