// Attention against its definition where no golden data covers it: the gate of the output, and
// rotary positions on a part of a head.
#include <torch/torch.h>

#include <cmath>

#include "testing.h"

namespace assay::nn {
namespace {

constexpr int64_t kModel = 24;
constexpr int64_t kHeads = 4;
constexpr int64_t kDim = 6;
constexpr int64_t kTime = 13;

// Channels i and i + pairs of x [T, D] by the angle position · base^(−i / pairs); the channels
// after them as they are.
at::Tensor turned(const at::Tensor& x, int64_t pairs, double base) {
  at::Tensor out = x.clone();
  for (int64_t t = 0; t < x.size(0); ++t)
    for (int64_t i = 0; i < pairs; ++i) {
      const double angle = double(t) * std::pow(base, -double(i) / double(pairs));
      const double a = x[t][i].item<double>();
      const double b = x[t][i + pairs].item<double>();
      out[t][i] = a * std::cos(angle) - b * std::sin(angle);
      out[t][i + pairs] = b * std::cos(angle) + a * std::sin(angle);
    }
  return out;
}

struct Variant {
  const char* gate;
  int64_t gates;  // rows of the gate's projection
  double fraction;
  int64_t pairs;
};

TEST(AttentionDefinition, GateAndPartialRotationAreThoseOfTheFormula) {
  for (const Variant& variant :
       {Variant{"none", 0, 0.7, 2}, {"element", kHeads * kDim, 1, 3}, {"head", kHeads, 0.4, 1}}) {
    SCOPED_TRACE(variant.gate);
    const auto mixer =
        mixers()
            .at("attention")
            .make(ConfigNode::parse(fmt::format("num_heads = {}\nrope_base = 100.0\ngate = \"{}\"\n"
                                                "rotary_fraction = {}",
                                                kHeads, variant.gate, variant.fraction)),
                  kModel);
    const at::NoGradGuard no_grad;
    mixer->to(at::kDouble);
    at::Generator noise = generator(variant.gate);
    for (at::Tensor& parameter : mixer->parameters()) parameter.normal_(0, 0.4, noise);
    const at::Tensor x = at::randn({1, kTime, kModel}, noise, at::kDouble);
    const auto parameters = mixer->named_parameters();
    const at::Tensor projected = at::matmul(x[0], parameters["qkv.weight"].t());
    ASSERT_EQ(projected.size(1), 3 * kHeads * kDim + variant.gates);
    const auto head = [&](int64_t part, int64_t h) {
      return projected.narrow(1, (part * kHeads + h) * kDim, kDim);
    };
    std::vector<at::Tensor> heads;
    for (int64_t h = 0; h < kHeads; ++h) {
      const at::Tensor q = turned(head(0, h), variant.pairs, 100);
      const at::Tensor k = turned(head(1, h), variant.pairs, 100);
      const at::Tensor later = at::ones({kTime, kTime}, at::kBool).triu(1);
      const at::Tensor scores = at::matmul(q, k.t()) / std::sqrt(double(kDim));
      at::Tensor y = at::matmul(scores.masked_fill(later, -INFINITY).softmax(-1), head(2, h));
      const int64_t first = 3 * kHeads * kDim;
      if (variant.gates == kHeads) y = y * projected.narrow(1, first + h, 1).sigmoid();
      if (variant.gates > kHeads) y = y * projected.narrow(1, first + h * kDim, kDim).sigmoid();
      heads.push_back(y);
    }
    const at::Tensor expected = at::matmul(at::cat(heads, 1), parameters["out_proj.weight"].t());
    State state;
    EXPECT_LE(relative_error(mixer->forward(x, state)[0], expected), 1e-12);
  }
}

}  // namespace
}  // namespace assay::nn
