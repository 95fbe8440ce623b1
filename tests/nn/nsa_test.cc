// Native Sparse Attention against its definition, one query and one head at a time: the choice of
// blocks and the gated sum, which MixerForms cannot know; and its gradient against differences.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "testing.h"

namespace assay::nn {
namespace {

constexpr int64_t kTime = 53;
constexpr int64_t kModel = 24;

struct Shape {
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t length;
  int64_t stride;
  int64_t block;
  int64_t blocks;
  int64_t window;
  std::string toml() const {
    return fmt::format(
        "num_heads = {}\nnum_kv_heads = {}\nhead_dim = {}\ncompress_length = {}\n"
        "compress_stride = {}\nblock_size = {}\nnum_blocks = {}\nwindow = {}\n",
        heads, kv_heads, head_dim, length, stride, block, blocks, window);
  }
};

std::shared_ptr<Mixer> make(const Shape& shape) {
  const auto mixer = mixers().at("nsa").make(ConfigNode::parse(shape.toml()), kModel);
  const at::NoGradGuard no_grad;
  mixer->to(at::kDouble);
  at::Generator noise = generator(shape.toml());
  for (at::Tensor& parameter : mixer->parameters())
    parameter.copy_(at::randn(parameter.sizes(), noise, parameter.options()) *
                    (parameter.dim() == 2 ? 2 / std::sqrt(double(parameter.size(1))) : 1.0));
  return mixer;
}

using Vectors = std::vector<at::Tensor>;  // [D] each

struct Definition {
  const Shape& s;
  std::map<std::string, at::Tensor> w;  // parameters by name

  // [T, heads, D] of one sequence x [T, d_model]
  at::Tensor projected(const at::Tensor& x, const std::string& name) const {
    return at::matmul(x, w.at(name + ".weight").t()).reshape({x.size(0), -1, s.head_dim});
  }
  at::Tensor phi(const std::string& name, const Vectors& block) const {
    const at::Tensor hidden =
        at::mv(w.at(name + ".hidden.weight"), at::cat(block)) + w.at(name + ".hidden.bias");
    const at::Tensor gelu = hidden * 0.5 * (1 + at::erf(hidden / std::sqrt(2.0)));
    return at::mv(w.at(name + ".out.weight"), gelu);
  }
  at::Tensor turned(const at::Tensor& x, int64_t position) const {
    at::Tensor out = x.clone();
    const int64_t half = s.head_dim / 2;
    for (int64_t i = 0; i < half; ++i) {
      const double angle =
          double(position) * std::pow(10000.0, -2.0 * double(i) / double(2 * half));
      out[i] = x[i] * std::cos(angle) - x[i + half] * std::sin(angle);
      out[i + half] = x[i + half] * std::cos(angle) + x[i] * std::sin(angle);
    }
    return out;
  }
  at::Tensor weights(const at::Tensor& q, const Vectors& keys) const {
    return at::softmax(at::mv(at::stack(keys), q) / std::sqrt(double(s.head_dim)), 0);
  }
  at::Tensor attention(const at::Tensor& q, const Vectors& keys, const Vectors& values) const {
    return at::mv(at::stack(values).t(), weights(q, keys));
  }

  // Blocks read by a query at t whose weights of compressed blocks, summed over heads, are given.
  std::vector<int64_t> chosen(int64_t t, const std::vector<double>& weight) const {
    const int64_t own = t / s.block;
    std::vector<double> importance(size_t(own), 0.0);
    for (int64_t j = 0; j < own; ++j)
      for (int64_t i = 0; i < int64_t(weight.size()); ++i)
        for (int64_t p = j * s.block; p < (j + 1) * s.block; p += s.stride)
          if (i * s.stride <= p && p < i * s.stride + s.length)
            importance[size_t(j)] += weight[size_t(i)];
    std::vector<int64_t> order(static_cast<size_t>(own));
    std::iota(order.begin(), order.end(), 0);
    const auto fixed = [&](int64_t j) { return j == 0 || j == own - 1; };
    std::ranges::stable_sort(order, [&](int64_t a, int64_t b) {
      if (fixed(a) != fixed(b)) return fixed(a);
      return importance[size_t(a)] > importance[size_t(b)];
    });
    order.resize(std::min(order.size(), size_t(s.blocks - 1)));
    order.push_back(own);
    return order;
  }

  at::Tensor operator()(const at::Tensor& x) const {
    const int64_t time = x.size(0);
    const int64_t group = s.heads / s.kv_heads;
    const at::Tensor all = projected(x, "qkv");
    const at::Tensor raw = projected(x, "block_proj");
    const at::Tensor gates =
        at::sigmoid(at::matmul(x, w.at("gate_proj.weight").t())).reshape({time, s.heads, 3});
    at::Tensor out = at::zeros({time, s.heads, s.head_dim}, x.options());
    for (int64_t g = 0; g < s.kv_heads; ++g) {
      const auto head = [&](int64_t part, int64_t t) {  // selected k, window k, and their values
        return all[t][s.heads + part * s.kv_heads + g];
      };
      Vectors all_block_k;
      Vectors all_block_v;
      for (int64_t first = 0; first + s.length <= time; first += s.stride) {
        Vectors k;
        Vectors v;
        for (int64_t j = first; j < first + s.length; ++j) {
          k.push_back(raw[j][g]);
          v.push_back(raw[j][s.kv_heads + g]);
        }
        all_block_k.push_back(phi("compress_k", k));
        all_block_v.push_back(phi("compress_v", v));
      }
      for (int64_t t = 0; t < time; ++t) {
        Vectors block_k;
        Vectors block_v;
        for (int64_t i = 0; i * s.stride + s.length <= t + 1; ++i) {
          block_k.push_back(all_block_k[size_t(i)]);
          block_v.push_back(all_block_v[size_t(i)]);
        }
        std::vector<double> weight(block_k.size(), 0.0);
        for (int64_t h = g * group; h < (g + 1) * group && !block_k.empty(); ++h) {
          const at::Tensor of_head = weights(all[t][h], block_k);
          for (size_t i = 0; i < weight.size(); ++i)
            weight[i] += of_head[int64_t(i)].item<double>();
        }
        Vectors chosen_k;
        Vectors chosen_v;
        Vectors window_k;
        Vectors window_v;
        for (const int64_t block : chosen(t, weight))
          for (int64_t j = block * s.block; j < std::min((block + 1) * s.block, t + 1); ++j) {
            chosen_k.push_back(turned(head(0, j), j));
            chosen_v.push_back(head(2, j));
          }
        for (int64_t j = std::max<int64_t>(0, t - s.window + 1); j <= t; ++j) {
          window_k.push_back(turned(head(1, j), j));
          window_v.push_back(head(3, j));
        }
        for (int64_t h = g * group; h < (g + 1) * group; ++h) {
          const at::Tensor q = turned(all[t][h], t);
          const at::Tensor gate = gates[t][h];
          out[t][h] += gate[1] * attention(q, chosen_k, chosen_v);
          out[t][h] += gate[2] * attention(q, window_k, window_v);
          if (!block_k.empty()) out[t][h] += gate[0] * attention(all[t][h], block_k, block_v);
        }
      }
    }
    return at::matmul(out.flatten(1), w.at("out_proj.weight").t());
  }
};

const Shape kShapes[] = {{.heads = 4,
                          .kv_heads = 2,
                          .head_dim = 6,
                          .length = 4,
                          .stride = 2,
                          .block = 4,
                          .blocks = 5,
                          .window = 6},
                         {.heads = 3,
                          .kv_heads = 1,
                          .head_dim = 4,
                          .length = 6,
                          .stride = 2,
                          .block = 8,
                          .blocks = 4,
                          .window = 1},
                         {.heads = 2,
                          .kv_heads = 2,
                          .head_dim = 8,
                          .length = 5,
                          .stride = 5,
                          .block = 10,
                          .blocks = 3,
                          .window = 70}};

TEST(NativeSparseAttention, EqualsItsDefinition) {
  const at::NoGradGuard no_grad;
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(shape.toml());
    const auto mixer = make(shape);
    Definition definition{shape, {}};
    for (const auto& item : mixer->named_parameters()) definition.w[item.key()] = item.value();
    const at::Tensor x = at::randn({2, kTime, kModel}, generator("x"), at::kDouble);
    State state;
    const at::Tensor y = mixer->forward(x, state);
    const at::Tensor expected = definition(x[1]);
    const at::Tensor error = (y[1] - expected).abs().amax(1) / expected.abs().amax(1);
    EXPECT_LE(error.max().item<double>(), 1e-12)
        << "worst position " << error.argmax().item<int64_t>();
  }
}

// Slopes of Σ c ⊙ y along random directions. The choice is constant around almost every point.
TEST(NativeSparseAttention, GradientEqualsDifferences) {
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(shape.toml());
    const auto mixer = make(shape);
    at::Tensor x = at::randn({2, kTime, kModel}, generator("x"), at::kDouble).requires_grad_();
    const at::Tensor c = at::randn(x.sizes(), generator("cotangent"), x.options());
    const auto value = [&] {
      State state;
      return (c * mixer->forward(x, state)).sum();
    };
    std::vector<std::pair<std::string, at::Tensor>> inputs = {{"x", x}};
    for (const auto& item : mixer->named_parameters())
      inputs.emplace_back(item.key(), item.value());
    value().backward();
    const at::NoGradGuard no_grad;
    for (auto& [name, input] : inputs) {
      const at::Tensor start = input.clone();
      const at::Tensor along = at::randn(input.sizes(), generator(name), input.options());
      const auto moved = [&](double by) {
        input.copy_(start + by * along);
        return value().item<double>();
      };
      constexpr double kStep = 1e-6;
      const double difference = (moved(kStep) - moved(-kStep)) / (2 * kStep);
      input.copy_(start);
      const double expected = (input.grad() * along).sum().item<double>();
      EXPECT_NEAR(difference / expected, 1, 1e-6) << name;
    }
  }
}

}  // namespace
}  // namespace assay::nn
