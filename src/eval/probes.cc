#include "eval/probes.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cmath>

#include "base/random.h"
#include "data/sampler.h"
#include "eval/held_out.h"

namespace assay::eval {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// Positions of the queries, [n], in the second half of `time`.
at::Tensor queries_of(int64_t time, const ProbeOptions& options, const at::TensorOptions& device) {
  const int64_t first = time / 2;
  const int64_t count = std::min(options.queries, time - first);
  return at::linspace(double(first), double(time - 1), count, at::kDouble)
      .round()
      .to(device.dtype(at::kLong));
}

// Where the content of each position comes from when pairs before a query change places: [n, T].
at::Tensor swapped_pairs(const at::Tensor& queries, int64_t time) {
  const at::Tensor position = at::arange(time, queries.options());
  const at::Tensor pair_end = position.bitwise_or(1);
  return at::where(pair_end < queries.unsqueeze(1), position.bitwise_xor(1),
                   position.expand({queries.size(0), -1}));
}

// Contents of a sequence [1, T, …], a copy a query, with those of `from` at each position.
at::Tensor rearranged(const at::Tensor& sequence, const at::Tensor& from) {
  std::vector<int64_t> index(size_t(sequence.dim()), 1);
  std::vector<int64_t> copies(size_t(sequence.dim()), -1);
  index[0] = copies[0] = from.size(0);
  index[1] = from.size(1);
  return sequence.detach().expand(copies).take_along_dim(from.view(index), 1);
}

// I of row i for the query queries[i], of contents that come from `from` [n, T]; 0 for j ≥ t.
// → [n, T].
at::Tensor influence(nn::Mixer& mixer, const at::Tensor& x, const nn::Handed& handed,
                     const at::Tensor& from, const at::Tensor& queries,
                     const ProbeOptions& options) {
  const at::AutoGradMode with_gradients(true);
  const at::Tensor input = rearranged(x, from).requires_grad_();
  nn::State state;
  for (const auto& [name, tensor] : handed) state.context.handed[name] = rearranged(tensor, from);
  const at::Tensor y = mixer.forward(input, state);
  at::Generator generator =
      at::make_generator<at::CPUGeneratorImpl>(Random(options.seed, "probe").next());
  at::Tensor squares = at::zeros(from.sizes(), x.options().dtype(at::kDouble));
  for (int64_t r = 0; r < options.cotangents; ++r) {
    const at::Tensor c =
        at::randn({from.size(0), x.size(2)}, generator, at::kDouble).to(x.options());
    // y_t
    const at::Tensor rows =
        y.gather(1, queries.view({-1, 1, 1}).expand({-1, 1, y.size(2)})).squeeze(1);
    const auto gradient = torch::autograd::grad({rows}, {input}, {c},
                                                /*retain_graph=*/r + 1 < options.cotangents, false,
                                                /*allow_unused=*/true);
    if (gradient[0].defined()) squares += gradient[0].to(at::kDouble).square().sum(-1);
  }
  const at::Tensor earlier = at::arange(x.size(1), queries.options()) < queries.unsqueeze(1);
  return (squares / double(options.cotangents)).sqrt() * earlier;
}

at::Tensor weights_of(const at::Tensor& influence) {
  return influence / influence.sum(-1, true).clamp_min(std::numeric_limits<double>::min());
}
at::Tensor entropy(const at::Tensor& weights) { return -at::xlogy(weights, weights).sum(-1); }

struct Sums {
  double visible = 0;
  double uniform = 0;
  double moved = 0;
  double movable = 0;
  int64_t queries = 0;
};

void add(Sums& sums, nn::Mixer& mixer, const at::Tensor& x, const nn::Handed& handed,
         const ProbeOptions& options) {
  const int64_t time = x.size(1);
  const at::Tensor t = queries_of(time, options, x.options());
  const at::Tensor from = swapped_pairs(t, time);
  const at::Tensor before =
      influence(mixer, x, handed, at::arange(time, t.options()).expand_as(from), t, options);
  const at::Tensor after = influence(mixer, x, handed, from, t, options);
  const at::Tensor w = weights_of(before);
  const at::Tensor count = t.to(at::kDouble);
  const auto number = [](const at::Tensor& x) { return x.sum().item<double>(); };
  sums.visible += number((before > options.threshold * before.amax(-1, true)).sum(-1) / count);
  sums.uniform += number(entropy(w) / count.log());
  sums.moved += number((weights_of(after) - w).abs());
  sums.movable += number((w.gather(-1, from) - w).abs());
  sums.queries += t.size(0);
}

// Mean of the finite values; NaN if there is none.
double mean_of(const std::vector<double>& values) {
  double sum = 0;
  int64_t count = 0;
  for (const double value : values) {
    if (!std::isfinite(value)) continue;
    sum += value;
    ++count;
  }
  return count ? sum / double(count) : kNone;
}

// Over layers, and over the heads of all layers.
run::MeanProbe mean_of(const std::vector<run::LayerProbe>& layers) {
  const auto over_layers = [&](double run::LayerProbe::* value) {
    std::vector<double> values;
    for (const run::LayerProbe& layer : layers) values.push_back(layer.*value);
    return mean_of(values);
  };
  std::vector<double> heads;
  for (const run::LayerProbe& layer : layers)
    heads.insert(heads.end(), layer.attention_entropy.begin(), layer.attention_entropy.end());
  return {.visibility = over_layers(&run::LayerProbe::visibility),
          .uniformity = over_layers(&run::LayerProbe::uniformity),
          .real_relation = over_layers(&run::LayerProbe::real_relation),
          .attention_entropy = mean_of(heads)};
}

// Mean over sequences, one at a time: weights are [H, T, T].
std::vector<double> entropy_by_head(nn::Mixer& mixer, const at::Tensor& x,
                                    const ProbeOptions& options) {
  const at::NoGradGuard no_grad;
  std::vector<double> mean;
  for (const at::Tensor& sequence : x.split(1)) {
    const at::Tensor weights = mixer.attention_weights(sequence);
    if (!weights.defined()) break;
    const auto heads = attention_entropy(weights, options);
    mean.resize(heads.size());
    for (size_t h = 0; h < heads.size(); ++h) mean[h] += heads[h] / double(x.size(0));
  }
  return mean;
}

// Inputs of the mixer of each layer.
std::vector<at::Tensor> mixer_inputs(nn::LanguageModel& model, const at::Tensor& tokens) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> inputs;
  model.watch = [&](int64_t layer, const at::Tensor& x) {
    if (size_t(layer + 1) == model.layers.size()) return;
    const nn::Layer& next = *model.layers[size_t(layer + 1)];
    inputs.push_back(next.post_norm ? x : next.mixer_norm->forward(x));
  };
  nn::ModelState state;
  model.hidden(tokens, state);
  model.watch = nullptr;
  return inputs;
}

// Runs the mixer to update `handed`, the tensors that it passes to later layers.
void hand_on(nn::Mixer& mixer, const at::Tensor& x, nn::Handed& handed) {
  const at::NoGradGuard no_grad;
  nn::State state;
  state.context.handed.swap(handed);
  mixer.forward(x, state);
  handed.swap(state.context.handed);
}

}  // namespace

Influence probe(nn::Mixer& mixer, const at::Tensor& x, const ProbeOptions& options,
                const nn::Handed& handed) {
  if (x.size(1) < kProbeLeast)
    fail("a probe needs at least {} positions, got {}", kProbeLeast, x.size(1));
  Sums sums;
  for (int64_t b = 0; b < x.size(0); ++b) {
    nn::Handed own;
    for (const auto& [name, tensor] : handed) own[name] = tensor.narrow(0, b, 1);
    add(sums, mixer, x.narrow(0, b, 1), own, options);
  }
  const double n = double(sums.queries);
  return {sums.visible / n, sums.uniform / n,
          sums.movable > 1e-6 * n ? sums.moved / sums.movable : kNone};
}

std::vector<double> attention_entropy(const at::Tensor& weights, const ProbeOptions& options) {
  const at::Tensor t = queries_of(weights.size(-1), options, weights.options());
  const at::Tensor rows = entropy(weights.index_select(2, t).to(at::kDouble));  // [B, H, n]
  const at::Tensor mean = (rows / (t.to(at::kDouble) + 1).log()).mean(at::IntArrayRef{0, 2}).cpu();
  return {mean.data_ptr<double>(), mean.data_ptr<double>() + mean.numel()};
}

std::vector<std::vector<double>> attention_entropy(nn::LanguageModel& model,
                                                   const at::Tensor& tokens,
                                                   const ProbeOptions& options) {
  const at::ScalarType compute_dtype = std::exchange(model.compute_dtype, at::kFloat);
  const auto inputs = mixer_inputs(model, tokens.to(model.embedding.device()));
  model.compute_dtype = compute_dtype;
  std::vector<std::vector<double>> out;
  bool any = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    out.push_back(entropy_by_head(*model.layers[i]->mixer, inputs[i], options));
    any = any || !out.back().empty();
  }
  return any ? out : std::vector<std::vector<double>>();
}

run::Probes probe(nn::LanguageModel& model, const at::Tensor& tokens, const ProbeOptions& options) {
  const at::ScalarType compute_dtype = std::exchange(model.compute_dtype, at::kFloat);
  const auto inputs = mixer_inputs(model, tokens.to(model.embedding.device()));
  const auto& pattern = model.spec.config.pattern;
  std::vector<run::LayerProbe> layers;
  nn::Handed handed;
  for (size_t i = 0; i < inputs.size(); ++i) {
    nn::Mixer& mixer = *model.layers[i]->mixer;
    const Influence found = probe(mixer, inputs[i], options, handed);
    layers.push_back({.layer = int64_t(i),
                      .mixer = pattern[i % pattern.size()],
                      .visibility = found.visibility,
                      .uniformity = found.uniformity,
                      .real_relation = found.real_relation,
                      .attention_entropy = entropy_by_head(mixer, inputs[i], options)});
    hand_on(mixer, inputs[i], handed);
  }
  model.compute_dtype = compute_dtype;
  return {.sequence_length = tokens.size(1),
          .sequences = tokens.size(0),
          .queries = options.queries,
          .cotangents = options.cotangents,
          .threshold = options.threshold,
          .layers = layers,
          .mean = mean_of(layers)};
}

at::Tensor probe_tokens(const data::TokenStore& store, const std::string& set, int64_t length,
                        int64_t sequences) {
  const auto [domain, split] = domain_and_split(set);
  const data::Documents& documents = store.documents(domain, split);
  auto segments = data::held_out_segments(documents, 0, length);
  std::erase_if(segments, [](const data::Segment& segment) { return segment.begin > 0; });
  std::ranges::stable_sort(segments, std::greater{}, &data::Segment::length);
  if (segments.empty()) fail("{}: holds no text to probe with", set);
  const int64_t longest = segments.front().length;
  std::erase_if(segments,
                [&](const data::Segment& segment) { return 2 * segment.length < longest; });
  segments.resize(std::min(segments.size(), size_t(sequences)));
  std::vector<at::Tensor> rows;
  for (const data::Segment& segment : segments) {
    at::Tensor row = at::empty({segment.length + 1}, at::kLong);
    read_segment(documents, store.separator(), segment, row.data_ptr<int64_t>());
    rows.push_back(row.narrow(0, 0, segments.back().length));
  }
  return at::stack(rows);
}

}  // namespace assay::eval
