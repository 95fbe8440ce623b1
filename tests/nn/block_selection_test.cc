// Learned selection of chunks against its definition, one query and one head at a time: the choice,
// the output and the auxiliary loss, which MixerForms cannot know; and the choice of MiniMax-M3.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "nn/tensors.h"
#include "testing.h"

namespace assay::nn {
namespace {

constexpr int64_t kTime = 45;
constexpr int64_t kModel = 24;

struct Shape {
  int64_t heads;
  int64_t kv_heads;
  int64_t chunk;
  int64_t top_k;
  int64_t index_heads;
  int64_t index_dim;
  std::string pooling;
  std::string toml() const {
    return fmt::format(
        "num_heads = {}\nnum_kv_heads = {}\nchunk_size = {}\ntop_k = {}\nindex_heads = {}\n"
        "index_dim = {}\npooling = \"{}\"\nloss_weight = 0.7\n",
        heads, kv_heads, chunk, top_k, index_heads, index_dim, pooling);
  }
};

const Shape kShapes[] = {{4, 2, 8, 2, 2, 6, "max"},
                         {4, 4, 7, 1, 1, 4, "max"},
                         {6, 3, 8, 2, 3, 8, "mean"},
                         {2, 1, 5, 3, 2, 4, "mean"}};

std::shared_ptr<Mixer> make(const Shape& shape) {
  const auto mixer = mixers().at("block_selection").make(ConfigNode::parse(shape.toml()), kModel);
  const at::NoGradGuard no_grad;
  mixer->to(at::kDouble);
  mixer->initialise(1);
  at::Generator noise = generator(shape.toml());
  for (at::Tensor& parameter : mixer->parameters())
    parameter.add_(at::randn(parameter.sizes(), noise, parameter.options()),
                   parameter.dim() == 2 ? 0.4 : 0.3);
  return mixer;
}

struct Outcome {
  at::Tensor out;  // [T, d_model]
  double loss = 0;
};

struct Definition {
  const Shape& s;
  std::map<std::string, at::Tensor> w;  // parameters by name

  static at::Tensor turned(const at::Tensor& x, int64_t position) {
    at::Tensor out = x.clone();
    const int64_t half = x.size(0) / 2;
    for (int64_t i = 0; i < half; ++i) {
      const double angle = double(position) * std::pow(10000.0, -double(i) / double(half));
      out[i] = x[i] * std::cos(angle) - x[i + half] * std::sin(angle);
      out[i + half] = x[i + half] * std::cos(angle) + x[i] * std::sin(angle);
    }
    return out;
  }
  static at::Tensor unit(const at::Tensor& x) { return x / at::sqrt(x.square().sum() + 1e-6); }
  at::Tensor rms(const at::Tensor& x, const std::string& norm) const {
    return x / at::sqrt(x.square().mean() + 1e-6) * (1 + w.at("indexer." + norm + ".weight"));
  }
  at::Tensor heads(const at::Tensor& x, const std::string& name, int64_t size) const {
    return at::matmul(x, w.at(name + ".weight").t()).reshape({x.size(0), -1, size});
  }

  Outcome operator()(const at::Tensor& x) const {
    const int64_t D = kModel / s.heads;
    const int64_t group = s.heads / s.kv_heads;
    const int64_t sharers = s.heads / s.index_heads;
    const at::Tensor all = heads(x, "qkv", D);
    const at::Tensor index = heads(x, "indexer.proj", s.index_dim);
    const auto key = [&](int64_t head, int64_t j) {
      return turned(unit(all[j][s.heads + head / group]), j);
    };
    Outcome result{at::zeros({kTime, s.heads, D}, x.options())};
    std::vector<at::Tensor> index_keys;
    for (int64_t j = 0; j < kTime; ++j)
      index_keys.push_back(turned(rms(index[j][s.index_heads], "key_norm"), j));
    for (int64_t t = 0; t < kTime; ++t)
      for (int64_t g = 0; g < s.index_heads; ++g) {
        const int64_t own = t / s.chunk;
        const at::Tensor a = turned(rms(index[t][g], "query_norm"), t);
        std::vector<double> of_position;
        for (int64_t j = 0; j <= t; ++j)
          of_position.push_back(at::dot(a, index_keys[size_t(j)]).item<double>());
        std::vector<double> of_chunk;
        for (int64_t c = 0; c < own; ++c) {
          const auto begin = of_position.begin() + c * s.chunk;
          of_chunk.push_back(s.pooling == "max"
                                 ? *std::max_element(begin, begin + s.chunk)
                                 : std::accumulate(begin, begin + s.chunk, 0.0) / double(s.chunk));
        }
        std::vector<int64_t> order(static_cast<size_t>(own));
        std::iota(order.begin(), order.end(), 0);
        std::ranges::stable_sort(
            order, [&](int64_t c, int64_t d) { return of_chunk[size_t(c)] > of_chunk[size_t(d)]; });
        order.resize(size_t(std::min(own, s.top_k)));
        order.push_back(own);

        std::vector<double> mass(size_t(t + 1), 0.0);
        for (int64_t h = g * sharers; h < (g + 1) * sharers; ++h) {
          const at::Tensor q = turned(unit(all[t][h]), t) * w.at("scale")[h];
          std::vector<double> weight;
          double total = 0;
          for (int64_t j = 0; j <= t; ++j) {
            weight.push_back(std::exp(at::dot(q, key(h, j)).item<double>()));
            total += weight.back();
          }
          for (int64_t j = 0; j <= t; ++j)
            mass[size_t(j)] += weight[size_t(j)] / total / double(sharers);
          double read = 0;
          at::Tensor value = at::zeros({D}, x.options());
          for (const int64_t c : order)
            for (int64_t j = c * s.chunk; j < std::min((c + 1) * s.chunk, t + 1); ++j) {
              read += weight[size_t(j)];
              value += weight[size_t(j)] * all[j][s.heads + s.kv_heads + h / group];
            }
          result.out[t][h].copy_(value / read);
        }
        result.loss += divergence(mass, of_position, of_chunk);
      }
    result.out = at::matmul(result.out.flatten(1), w.at("out_proj.weight").t());
    result.loss *= 0.7 / double(kTime * s.index_heads);
    return result;
  }

  double divergence(const std::vector<double>& mass, const std::vector<double>& of_position,
                    const std::vector<double>& of_chunk) const {
    std::vector<double> target = mass;
    std::vector<double> score = of_position;
    if (s.pooling == "mean") {
      target.assign(of_chunk.size(), 0.0);
      for (size_t c = 0; c < target.size(); ++c)
        for (size_t j = 0; j < size_t(s.chunk); ++j) target[c] += mass[c * size_t(s.chunk) + j];
      score = of_chunk;
    }
    const double all = std::accumulate(target.begin(), target.end(), 0.0);
    double normaliser = 0;
    for (double& value : score) {
      value /= std::sqrt(double(s.index_dim));
      normaliser += std::exp(value);
    }
    double sum = 0;
    for (size_t i = 0; i < target.size(); ++i)
      sum += target[i] / all * (std::log(target[i] / all) - score[i] + std::log(normaliser));
    return sum;
  }
};

struct Results {
  at::Tensor y;
  at::Tensor loss;
};
Results run(Mixer& mixer, const at::Tensor& x) {
  State state;
  state.context.handed[Context::kAuxiliaryLoss] = at::zeros({}, at::kDouble);
  const at::Tensor y = mixer.forward(x, state);
  return {y, state.context.handed[Context::kAuxiliaryLoss]};
}

TEST(BlockSelection, EqualsItsDefinition) {
  const at::NoGradGuard no_grad;
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(shape.toml());
    const auto mixer = make(shape);
    Definition definition{shape, {}};
    for (const auto& item : mixer->named_parameters()) definition.w[item.key()] = item.value();
    const at::Tensor x = at::randn({2, kTime, kModel}, generator("x"), at::kDouble);
    const Results found = run(*mixer, x);
    const Outcome first = definition(x[0]);
    const Outcome second = definition(x[1]);
    for (const auto& [y, expected] : {std::pair(found.y[0], first.out), {found.y[1], second.out}}) {
      const at::Tensor error = (y - expected).abs().amax(1) / expected.abs().amax(1);
      EXPECT_LE(error.max().item<double>(), 1e-11)
          << "worst position " << error.argmax().item<int64_t>();
    }
    EXPECT_NEAR(found.loss.item<double>(), (first.loss + second.loss) / 2, 1e-11);
  }
}

// Along random directions. The choice has no part in the loss.
TEST(BlockSelection, GradientOfTheLossEqualsDifferencesAndReachesTheIndexerOnly) {
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(shape.toml());
    const auto mixer = make(shape);
    const at::Tensor x = at::randn({2, kTime, kModel}, generator("x"), at::kDouble);
    const at::Tensor input = x.clone().requires_grad_();
    run(*mixer, input).loss.backward();
    EXPECT_FALSE(input.grad().defined());
    const at::NoGradGuard no_grad;
    for (const auto& item : mixer->named_parameters()) {
      at::Tensor parameter = item.value();
      if (!item.key().starts_with("indexer.")) {
        EXPECT_FALSE(parameter.grad().defined()) << item.key();
        continue;
      }
      const at::Tensor start = parameter.clone();
      const at::Tensor along = at::randn(start.sizes(), generator(item.key()), start.options());
      const auto moved = [&](double by) {
        parameter.copy_(start + by * along);
        return run(*mixer, x).loss.item<double>();
      };
      constexpr double kStep = 1e-5;
      const double difference = (moved(kStep) - moved(-kStep)) / (2 * kStep);
      parameter.copy_(start);
      const double expected = (parameter.grad() * along).sum().item<double>();
      EXPECT_NEAR(difference / expected, 1, 1e-6) << item.key();
    }
  }
}

TEST(BlockSelection, TrainingItsLossFindsTheChunksOfFullAttention) {
  const Shape shape{4, 4, 8, 1, 4, 6, "mean"};
  const auto mixer = make(shape);
  const at::Tensor x = at::randn({2, kTime, kModel}, generator("x"), at::kDouble);
  torch::optim::Adam optimizer(mixer->parameters(), torch::optim::AdamOptions(1e-2));
  const double before = run(*mixer, x).loss.item<double>();
  for (int i = 0; i < 200; ++i) {
    optimizer.zero_grad();
    run(*mixer, x).loss.backward();
    optimizer.step();
  }
  EXPECT_LT(run(*mixer, x).loss.item<double>(), 0.6 * before);
}

// The chunks with weight are the own one and those that the indexer chose.
TEST(BlockSelection, ChoosesTheBlocksOfMiniMaxM3) {
  const fs::path file = golden_folder() / "indexer_minimax_m3_T65_C8_k4.safetensors";
  std::map<std::string, at::Tensor> golden;
  for (auto& [name, tensor] : load_tensors(file)) golden[name] = tensor;
  const auto mixer = mixers()
                         .at("block_selection")
                         .make(ConfigNode::parse("num_heads = 2\nchunk_size = 8\ntop_k = 3\n"
                                                 "pooling = \"max\"\nindex_dim = 8\n"),
                               golden.at("in.x").size(2));
  mixer->initialise(1);
  const at::NoGradGuard no_grad;
  const auto parameters = mixer->named_parameters();
  const auto set = [&](const std::string& name, const at::Tensor& value) {
    at::Tensor parameter = parameters[name];
    parameter.copy_(value);
  };
  set("indexer.proj.weight",
      at::cat({golden.at("param.q_proj.weight"), golden.at("param.k_proj.weight")}));
  set("indexer.query_norm.weight", golden.at("param.q_norm.weight"));
  set("indexer.key_norm.weight", golden.at("param.k_norm.weight"));
  mixer->to(at::kDouble);
  const at::Tensor weights = mixer->attention_weights(golden.at("in.x").to(at::kDouble));
  const at::Tensor blocks = golden.at("out.blocks");  // [B, H, T, 4]
  const at::Tensor padded = at::constant_pad_nd(weights, {0, 72 - weights.size(-1)});
  const at::Tensor found = padded.unflatten(-1, {9, 8}).sum(-1) > 0;
  const at::Tensor expected =
      (blocks.unsqueeze(-1) == at::arange(9, blocks.options())).any(-2);  // [B, H, T, 9]
  EXPECT_TRUE(at::equal(found, expected));
  EXPECT_EQ(found.sum(-1).max().item<int64_t>(), 4);
}

}  // namespace
}  // namespace assay::nn
