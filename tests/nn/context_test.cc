// The law of mixers across processes: wherever a sequence is cut, and however many ranks compute
// its slices, output and gradients are those of one process.
#include "nn/context.h"

#include <torch/torch.h>

#include "mixer_examples.h"
#include "rank_threads.h"
#include "train/rank_neighbours.h"

namespace assay::nn {
namespace {

constexpr int64_t kBatch = 2;
constexpr int64_t kModel = 48;
constexpr int64_t kTime = 64;
constexpr int64_t kSlices = 4;

// Output of the mixer, and gradients of Σ c ⊙ y and the mean of the slices' auxiliary losses.
struct Results {
  at::Tensor y;
  at::Tensor dx;
  std::vector<std::vector<at::Tensor>> gradients;  // by slice and parameter
};

// One rank's slices, into `results`.
void run_slices(Mixer& mixer, ContextSlices slices, Neighbours* neighbours, const at::Tensor& x,
                const at::Tensor& c, bool recompute, Results& results) {
  const int64_t time = x.size(1) / slices.count;
  const auto here = [&](const at::Tensor& all) {
    std::vector<at::Tensor> parts;
    for (int64_t s = slices.begin; s < slices.end; ++s)
      parts.push_back(all.narrow(1, s * time, time));
    return parts;
  };
  const auto put = [&](const at::Tensor& all, const std::vector<at::Tensor>& parts) {
    for (size_t i = 0; i < parts.size(); ++i) here(all)[i].copy_(parts[i]);
  };
  SlicedPass pass(slices, neighbours, recompute);
  for (size_t i = 0; i < pass.handed.size() && mixer.has_auxiliary_loss(); ++i) {
    pass.handed[i][Context::kAuxiliaryLoss] = at::zeros({}, at::kDouble);
    pass.handed_gradients[i][Context::kAuxiliaryLoss] =
        at::full({}, 1 / double(slices.count), at::kDouble);
  }
  SlicedLayer layer{[&](const at::Tensor& h, State& state) { return mixer.forward(h, state); }};
  if (auto* attention = dynamic_cast<HeadwiseMixer*>(&mixer);
      attends_at_once(attention, slices.count, time)) {
    layer.attention = attention;
    layer.head_inputs = [=](const at::Tensor& h, State& state) {
      return attention->head_inputs(h, state.advance(h.size(1)), state);
    };
    layer.after_attention = [=](const at::Tensor&, const at::Tensor& attended,
                                const at::Tensor& gate,
                                State&) { return attention->output(attended, gate); };
  }
  put(results.y, pass.forward(layer, here(x)));
  put(results.dx, pass.backward(here(c), [&](size_t i) {
    std::vector<at::Tensor>& sums = results.gradients[size_t(slices.begin) + i];
    const auto parameters = mixer.parameters();
    for (const at::Tensor& parameter : parameters)
      if (sums.size() < parameters.size()) sums.push_back(at::zeros_like(parameter));
    for (size_t p = 0; p < parameters.size(); ++p) {
      at::Tensor& gradient = at::Tensor(parameters[p]).mutable_grad();
      if (gradient.defined()) sums[p].add_(gradient);
      gradient.reset();
    }
  }));
  if (neighbours) neighbours->finish();
}

struct ContextLaw : testing::TestWithParam<MixerExample> {
  ContextLaw() {
    for (int64_t rank = 0; rank < kSlices; ++rank) copies.push_back(GetParam().make(kModel));
  }
  static std::map<int64_t, std::unique_ptr<RankThreads>>& ranks_by_number() {
    static std::map<int64_t, std::unique_ptr<RankThreads>> all;
    return all;
  }
  static RankThreads& ranks(int64_t number) {
    auto& found = ranks_by_number()[number];
    if (!found) found = std::make_unique<RankThreads>(number);
    return *found;
  }
  static void TearDownTestSuite() { ranks_by_number().clear(); }

  Results empty() const {
    return {at::empty_like(x), at::empty_like(x), std::vector<std::vector<at::Tensor>>(kSlices)};
  }
  Results of_process(bool recompute) const {
    Results results = empty();
    run_slices(*copies[0], {kSlices, 0, kSlices}, nullptr, x, c, recompute, results);
    return results;
  }
  Results of_ranks(int64_t number) const {
    Results results = empty();
    ranks(number).run([&](train::Ranks& own) {
      const int64_t each = kSlices / number;
      const int64_t begin = own.rank() * each;
      train::RankNeighbours neighbours(own, at::kCPU);
      run_slices(*copies[size_t(own.rank())], {kSlices, begin, begin + each}, &neighbours, x, c,
                 false, results);
    });
    return results;
  }
  void expect_same_bits(const Results& got, const Results& expected, const std::string& what) {
    EXPECT_TRUE(at::equal(got.y, expected.y)) << what;
    EXPECT_TRUE(at::equal(got.dx, expected.dx)) << what;
    for (size_t s = 0; s < kSlices; ++s)
      for (size_t i = 0; i < expected.gradients[s].size(); ++i)
        EXPECT_TRUE(at::equal(got.gradients[s][i], expected.gradients[s][i]))
            << what << ", slice " << s << ", parameter " << i;
  }
  std::vector<std::shared_ptr<Mixer>> copies;  // of one mixer, for as many ranks
  const at::Tensor x = at::randn({kBatch, kTime, kModel}, generator("x"), at::kDouble);
  const at::Tensor c = at::randn({kBatch, kTime, kModel}, generator("cotangent"), at::kDouble);
};

TEST_P(ContextLaw, RanksGiveTheResultsOfOneProcess) {
  const auto mixer = copies[0];
  const auto parameters = mixer->parameters();
  const at::Tensor input = x.clone().requires_grad_();
  std::vector<at::Tensor> inputs = {input};
  inputs.insert(inputs.end(), parameters.begin(), parameters.end());
  State state;
  state.context.last = true;
  state.context.handed[Context::kAuxiliaryLoss] = at::zeros({}, at::kDouble);
  const at::Tensor whole = mixer->forward(input, state);
  const auto expected = torch::autograd::grad(
      {(c * whole).sum() + state.context.handed[Context::kAuxiliaryLoss]}, inputs);

  const Results process = of_process(false);
  EXPECT_LE(relative_error(process.y, whole), 1e-12) << GetParam().table;
  EXPECT_LE(relative_error(process.dx, expected[0]), 1e-12) << GetParam().table;
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor sum = at::zeros_like(parameters[i]);
    for (const auto& of_slice : process.gradients) sum = sum + of_slice[i];
    EXPECT_LE(relative_error(sum, expected[i + 1]), 1e-12)
        << mixer->named_parameters().keys()[i] << "; " << GetParam().table;
  }
  for (const int64_t number : {2, 4})
    expect_same_bits(of_ranks(number), process, fmt::format("{} ranks", number));
  expect_same_bits(of_process(true), process, "recomputed");
}

INSTANTIATE_TEST_SUITE_P(Registry, ContextLaw, testing::ValuesIn(mixer_examples()),
                         [](const auto& info) { return info.param.name; });

// The others hand their keys and values from slice to slice.
TEST(HeadwiseMixer, HeadsOfAttentionWithoutAWindowAreDivided) {
  const auto divides = [](const std::string& name, const std::string& table) {
    const auto mixer = mixers().at(name).make(ConfigNode::parse(table), Place(kModel));
    const auto* attention = dynamic_cast<const HeadwiseMixer*>(mixer.get());
    return attention && attention->divides_heads(4);
  };
  EXPECT_TRUE(divides("attention", ""));
  EXPECT_TRUE(divides("attention", "num_heads = 8\nnum_kv_heads = 4\nposition = 'alibi'"));
  EXPECT_TRUE(divides("top1_chunk", "selection = 'approx'"));
  EXPECT_TRUE(divides("top1_element", ""));
  EXPECT_FALSE(divides("attention", "num_heads = 8\nnum_kv_heads = 2"));
  EXPECT_FALSE(divides("attention", "window = 16"));
  EXPECT_TRUE(divides("attention", "sinks = true"));
  EXPECT_TRUE(divides("forgetting_attention", "num_heads = 8\nnum_kv_heads = 4"));
  EXPECT_TRUE(divides("nsa", ""));
  EXPECT_FALSE(divides("nsa", "num_heads = 6\nnum_kv_heads = 2"));
  EXPECT_FALSE(divides("block_selection", "chunk_size = 16"));
  EXPECT_FALSE(divides("top1_chunk", "num_heads = 6"));
  EXPECT_FALSE(divides("mamba2", "head_dim = 8"));
}

TEST(HeadwiseMixer, SlicesAsLongAsTheReachOfAWindowAttendAtOnce) {
  const auto at_once = [](const std::string& table) {
    const auto mixer = mixers().at("attention").make(ConfigNode::parse(table), Place(kModel));
    return attends_at_once(dynamic_cast<const HeadwiseMixer*>(mixer.get()), 4, 16);
  };
  EXPECT_TRUE(at_once("window = 1"));
  EXPECT_TRUE(at_once("window = 17"));
  EXPECT_FALSE(at_once("window = 18"));
  EXPECT_TRUE(at_once("window = 17\nsinks = true"));
  EXPECT_FALSE(at_once("window = 18\nsinks = true"));
}

// Whole models: embeddings with positions, values that layers hand on, a tied head, the loss.
void expect_loss_and_gradients_of_whole_sequences(const std::string& config) {
  const auto model = random_model(config);
  model->compute_dtype = at::kDouble;
  const at::Tensor tokens = random_tokens(3, 25, 31, "tokens");
  const auto parameters = model->parameters();
  const at::Tensor whole = model->loss(tokens);
  const auto expected = torch::autograd::grad({whole}, parameters);
  for (const bool recompute : {false, true})
    for (const int64_t count : {1, 2, 3, 12}) {
      model->recompute_activations = recompute;
      const auto losses =
          sliced_loss(*model, tokens, {count, 0, count}, nullptr, double(count), [](size_t) {});
      EXPECT_LE(relative_error(at::stack(losses).sum(0)[0], whole), 1e-12) << count << " slices";
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_LE(relative_error(parameters[i].grad(), expected[i]), 1e-11)
            << count << " slices, " << model->named_parameters().keys()[i];
        at::Tensor(parameters[i]).mutable_grad().reset();
      }
    }
}

TEST(SlicedLoss, ModelHasTheLossAndGradientsOfWholeSequences) {
  expect_loss_and_gradients_of_whole_sequences(R"(
    [model]
    vocab_size = 31
    d_model = 32
    num_layers = 4
    pattern = ["attention", "rwkv7", "mamba2", "rwkv7"]
    channel_mixer = "rwkv7_channel_mix"
    positions = "learned"
    max_positions = 24
    embedding_norm = true
    [model.mamba2]
    state_size = 4
    head_dim = 8
    [model.rwkv7]
    num_heads = 2
  )");
}

TEST(SlicedLoss, DividedHeadsHaveTheLossAndGradientsOfWholeSequences) {
  expect_loss_and_gradients_of_whole_sequences(R"(
    [model]
    vocab_size = 31
    d_model = 48
    num_layers = 5
    pattern = ["attention", "top1_chunk", "mamba2", "nsa", "forgetting_attention"]
    post_norm = ["attention"]
    residual_scale = 0.7
    [model.attention]
    num_heads = 12
    gate = "head"
    qk_rmsnorm = "head"
    sinks = true
    [model.top1_chunk]
    num_heads = 12
    num_kv_heads = 6
    chunk_size = 5
    [model.mamba2]
    state_size = 4
    head_dim = 8
    [model.nsa]
    num_heads = 12
    compress_length = 4
    compress_stride = 2
    block_size = 4
    num_blocks = 3
    window = 3
    [model.forgetting_attention]
    num_heads = 12
    num_kv_heads = 4
    output_gate = true
  )");
}

}  // namespace
}  // namespace assay::nn
