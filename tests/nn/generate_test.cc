// Drawing tokens, and decoding from the state.
#include "nn/generate.h"

#include <torch/torch.h>

#include <cmath>
#include <numeric>

#include "base/random.h"
#include "data/folder.h"
#include "fuzz/mutation.h"
#include "nn/saved_state.h"
#include "nn/tensors.h"
#include "testing.h"

namespace assay::nn {
namespace {

const char* const kModel =
    "[model]\nvocab_size = 40\nd_model = 24\nnum_layers = 3\npattern = [\"attention\", \"mamba1\", "
    "\"attention\"]\n[model.attention]\nnum_heads = 3\nwindow = 6\n";

// The tokens that generate() draws from these logits, one for each number in [0, 1).
std::vector<int64_t> draw(const std::vector<float>& logits, const Sampling& sampling,
                          const std::vector<double>& uniforms) {
  std::vector<ops::Draw> draws;
  for (const double uniform : uniforms) draws.push_back(draw_of(sampling, uniform));
  const at::Tensor rows = at::tensor(logits).expand({int64_t(uniforms.size()), -1});
  const at::Tensor drawn = ops::sample(rows, draws);
  std::vector<int64_t> tokens;
  for (size_t i = 0; i < uniforms.size(); ++i)
    tokens.push_back(checked_token(drawn.data_ptr<int64_t>()[i]));
  return tokens;
}

int64_t draw(const std::vector<float>& logits, const Sampling& sampling, double uniform) {
  return draw(logits, sampling, std::vector{uniform}).front();
}

TEST(Sample, ZeroTemperatureTakesTheLikeliest) {
  const std::vector<float> logits = {0, 3, -1, 3, 2};
  EXPECT_EQ(draw(logits, {.temperature = 0}, 0.99), 1);
}

TEST(Sample, DrawsEachTokenWithItsProbability) {
  const std::vector<float> logits = {std::log(0.1f), std::log(0.4f), std::log(0.2f),
                                     std::log(0.3f)};
  const auto shares = [&](const Sampling& sampling) {
    std::vector<double> share(4, 0);
    constexpr int count = 20000;
    std::vector<double> uniforms;
    for (int i = 0; i < count; ++i) uniforms.push_back((i + 0.5) / count);
    for (const int64_t token : draw(logits, sampling, uniforms))
      share[size_t(token)] += 1.0 / count;
    return share;
  };
  const auto expect = [&](const Sampling& sampling, const std::vector<double>& wanted) {
    const auto found = shares(sampling);
    for (size_t i = 0; i < 4; ++i)
      EXPECT_NEAR(found[i], wanted[i], 2e-4)
          << "token " << i << ", T " << sampling.temperature << ", k " << sampling.top_k << ", p "
          << sampling.top_p;
  };
  expect({}, {0.1, 0.4, 0.2, 0.3});
  expect({.temperature = 0.5}, {0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3});
  expect({.top_k = 2}, {0, 4.0 / 7, 0, 3.0 / 7});
  expect({.top_k = 9}, {0.1, 0.4, 0.2, 0.3});
  expect({.top_p = 0.65}, {0, 4.0 / 7, 0, 3.0 / 7});
  expect({.top_p = 0.75}, {0, 4.0 / 9, 2.0 / 9, 3.0 / 9});
  expect({.top_p = 1e-9}, {0, 1, 0, 0});
  // The share is of the three that top_k left
  expect({.top_k = 3, .top_p = 0.75}, {0, 4.0 / 7, 0, 3.0 / 7});
}

TEST(Sample, RefusesWhatIsNotANumber) {
  EXPECT_THROW(draw(std::vector<float>{0, NAN}, {}, 0.5), Error);
  EXPECT_THROW(draw(std::vector<float>{-INFINITY, -INFINITY}, {}, 0.5), Error);
  EXPECT_EQ(draw(std::vector<float>{-INFINITY, 0}, {}, 0.0), 1);
  for (const Sampling& wrong :
       {Sampling{.temperature = -1}, Sampling{.temperature = NAN}, Sampling{.top_k = -1},
        Sampling{.top_p = 0}, Sampling{.top_p = 1.5}})
    EXPECT_THROW(check(wrong), BadInput);
}

// draw() by a full sort of the vocabulary.
int64_t draw_sorted(const std::vector<float>& logits, const Sampling& s, double uniform) {
  std::vector<int64_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const bool cut = s.top_k > 0 || s.top_p < 1;
  const auto likelier = [&](int64_t a, int64_t b) { return logits[size_t(a)] > logits[size_t(b)]; };
  if (cut) std::ranges::stable_sort(ids, likelier);
  if (s.top_k > 0) ids.resize(std::min(ids.size(), size_t(s.top_k)));
  const float largest = *std::ranges::max_element(logits);
  const auto reached = [&](double target) {
    double running = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      running += std::exp((double(logits[size_t(ids[i])]) - largest) / s.temperature);
      if (running > target) return i;
    }
    return ids.size() - 1;
  };
  const auto total = [&] {
    double sum = 0;
    for (const int64_t id : ids)
      sum += std::exp((double(logits[size_t(id)]) - largest) / s.temperature);
    return sum;
  };
  if (s.top_p < 1) ids.resize(reached(s.top_p * total()) + 1);
  return ids[reached(uniform * total())];
}

TEST(Sample, EqualsSamplingFromAFullSort) {
  for (const int64_t vocabulary : {1, 2, 63, 64, 65, 1000, 32000})
    for (const double spread : {0.0, 0.01, 1.0, 4.0, 30.0}) {
      Random random(uint64_t(vocabulary), "logits");
      std::vector<float> logits;
      for (int64_t i = 0; i < vocabulary; ++i) logits.push_back(float(spread * random.normal()));
      // Equal logits
      for (int64_t i = 3; i < vocabulary; i += 7) logits[size_t(i)] = logits[size_t(i - 3)];
      for (const Sampling& sampling :
           {Sampling{.temperature = 0.7}, Sampling{.top_k = 1}, Sampling{.top_k = 50},
            Sampling{.top_p = 0.95}, Sampling{.temperature = 2, .top_p = 0.5},
            Sampling{.top_p = 1e-6}, Sampling{.top_p = 0.999999},
            Sampling{.top_k = 40, .top_p = 0.9}, Sampling{.temperature = 1e-3, .top_p = 0.9}})
        for (int i = 0; i < 4; ++i) {
          const double uniform = random.uniform();
          EXPECT_EQ(draw(logits, sampling, uniform), draw_sorted(logits, sampling, uniform))
              << "vocabulary " << vocabulary << " spread " << spread << " T "
              << sampling.temperature << " k " << sampling.top_k << " p " << sampling.top_p
              << " uniform " << uniform;
        }
    }
}

// Greedy tokens of the model if the whole sequence is run again for every token.
std::vector<int64_t> without_state(LanguageModel& model, const at::Tensor& prompt, int64_t count) {
  const at::NoGradGuard no_grad;
  at::Tensor tokens = prompt;
  for (int64_t i = 0; i < count; ++i) {
    ModelState state;
    tokens = at::cat({tokens, model.logits(tokens, state).slice(1, -1).argmax(-1)}, 1);
  }
  const at::Tensor made = tokens.slice(1, prompt.size(1)).squeeze(0).contiguous();
  return {made.data_ptr<int64_t>(), made.data_ptr<int64_t>() + made.numel()};
}

TEST(Generate, CachedDecodingEqualsRunningTheWholeSequence) {
  const auto model = random_model(kModel);
  for (const int64_t length : {1, 5, 17}) {
    const at::Tensor prompt = random_tokens(1, length, 40, "prompt");
    EXPECT_EQ(generate(*model, prompt, 30, {.temperature = 0}, std::vector<uint64_t>{0}).front(),
              without_state(*model, prompt, 30))
        << "prompt of " << length;
  }
}

// The last token is not read, so it needs no position.
TEST(Generate, TokensPastTheLastPositionAreRefusedBeforeAnyIsMade) {
  const std::string learned = "[model]\npositions = \"learned\"\nmax_positions = 64\n";
  const std::string rest = std::string(kModel).substr(std::string("[model]\n").size());
  const std::string keys = "constants = \"keys\"\nmax_positions = 64\n";
  for (const std::string& text : {learned + rest, kModel + keys}) {
    const auto model = random_model(text);
    int64_t made = 0;
    const auto make = [&](int64_t prompt, int64_t count) {
      made = 0;
      return generate(*model, random_tokens(1, prompt, 40, "prompt"), count, {},
                      std::vector<uint64_t>{0}, -1, [&](int64_t number) { made = number; });
    };
    EXPECT_EQ(make(3, 62).front().size(), 62u) << text;
    EXPECT_TRUE(make(65, 0).front().empty()) << text;
    EXPECT_THROW(make(3, 63), BadInput) << text;
    EXPECT_EQ(made, 0) << text;
  }
}

TEST(PrepareInference, LogitsKeepTheirBits) {
  for (const char* head : {"tie_embeddings = true", "tie_embeddings = false"}) {
    const std::string positions = "[model]\npositions = \"learned\"\nmax_positions = 64\n";
    const std::string rest = std::string(kModel).substr(std::string("[model]\n").size());
    const auto text = positions + head + "\n" + rest;
    const auto model = random_model(text);
    model->to(at::kFloat);
    model->compute_dtype = at::kBFloat16;
    const at::NoGradGuard no_grad;
    const at::Tensor tokens = random_tokens(2, 17, 40, "tokens");
    const auto logits = [&] {
      ModelState state;
      const at::Tensor read = model->logits(tokens, state);
      return at::cat({read, model->logits(tokens.slice(1, 0, 1), state)}, 1);
    };
    const at::Tensor before = logits();
    model->prepare_inference();
    EXPECT_EQ(model->head_weight().scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::equal(logits(), before)) << head;
  }
}

TEST(Generate, DependsOnPromptAndSeedAlone) {
  const auto model = random_model(kModel);
  const at::Tensor prompts = random_tokens(3, 9, 40, "prompts");
  const auto together = generate(*model, prompts, 20, {}, std::vector<uint64_t>{5, 6, 5});
  for (int64_t b = 0; b < 3; ++b)
    EXPECT_EQ(generate(*model, prompts.slice(0, b, b + 1), 20, {},
                       std::vector<uint64_t>{b == 1 ? 6u : 5u})
                  .front(),
              together[size_t(b)])
        << "row " << b;
  const at::Tensor one = prompts.slice(0, 0, 1);
  EXPECT_NE(generate(*model, one, 20, {}, std::vector<uint64_t>{6}).front(), together[0]);
  EXPECT_EQ(generate(*model, one, 12, {}, std::vector<uint64_t>{5}).front(),
            std::vector<int64_t>(together[0].begin(), together[0].begin() + 12));
}

// 40 prompts of 2,000 tokens are read in two parts of 32 and 8 sequences.
TEST(Generate, LongPromptsOfManySequencesAreReadInParts) {
  const auto model = random_model(
      "[model]\nvocab_size = 40\nd_model = 8\nnum_layers = 3\n"
      "pattern = [\"top1_chunk\", \"mamba1\", \"attention\"]\n[model.attention]\nnum_heads = 1\n"
      "window = 6\n[model.top1_chunk]\nnum_heads = 1\nchunk_size = 7\nselection = \"approx\"\n");
  const at::Tensor prompts = random_tokens(40, 2000, 40, "prompts");
  const std::vector<uint64_t> seeds(40, 3);
  ModelState state;
  const auto first = generate(*model, prompts, 9, {}, seeds, -1, {}, &state);
  EXPECT_EQ(state.position, 2008);
  for (const int64_t b : {0, 31, 32, 39}) {
    ModelState alone;
    const at::Tensor prompt = prompts.slice(0, b, b + 1);
    EXPECT_EQ(generate(*model, prompt, 9, {}, std::vector<uint64_t>{3}, -1, {}, &alone).front(),
              first[size_t(b)])
        << "row " << b;
    for (size_t i = 0; i < state.layers.size(); ++i)
      for (const auto& [name, tensor] : alone.layers[i].tensors())
        if (tensor.dim() > 0)
          EXPECT_LE(relative_error(state.layers[i].find(name)->slice(0, b, b + 1), tensor), 1e-12)
              << "row " << b << " layer " << i << " " << name;
  }
}

TEST(Generate, StopsBehindTheStopToken) {
  const auto model = random_model(kModel);
  const at::Tensor prompts = random_tokens(2, 4, 40, "stop");
  const std::vector<uint64_t> seeds = {1, 2};
  const auto all = generate(*model, prompts, 60, {}, seeds);
  const int64_t stop = all[0][7];
  const auto stopped = generate(*model, prompts, 60, {}, seeds, stop);
  for (size_t b = 0; b < 2; ++b) {
    auto end = std::ranges::find(all[b], stop);
    if (end != all[b].end()) ++end;
    EXPECT_EQ(stopped[b], std::vector<int64_t>(all[b].begin(), end)) << "row " << b;
  }
  EXPECT_TRUE(generate(*model, prompts, 0, {}, seeds)[0].empty());
}

// With captured steps, and with `watch`, which prevents them: the same tokens, also after a stop
// token and from a state that was left in between.
TEST(Generate, OnCudaCapturedStepsDrawTheSameTokens) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const std::string attention = "[model.attention]\nnum_heads = 4\n";
  const std::string mamba2 = "[model.mamba2]\nstate_size = 16\nhead_dim = 16\n";
  const std::string rwkv7 = "[model.rwkv7]\nnum_heads = 4\n";
  for (const auto& [pattern, tables] :
       {std::pair<std::string, std::string>{"\"attention\"", attention},
        {"\"mamba2\"", mamba2},
        {"\"rwkv7\"", rwkv7},
        {"\"attention\"", attention + "window = 9\n"},
        {"\"attention\", \"mamba2\"", attention + mamba2}}) {
    SCOPED_TRACE(pattern);
    const auto model = random_model("[model]\nvocab_size = 40\nd_model = 64\npattern = [" +
                                    pattern + "]\n" + tables);
    model->to(at::kCUDA, at::kFloat);
    model->compute_dtype = at::kBFloat16;
    model->prepare_inference();
    const at::Tensor prompts = random_tokens(3, 30, 40, "prompts").to(at::kCUDA);
    const std::vector<uint64_t> seeds = {1, 2, 3};
    const auto eager = [&](const at::Tensor& tokens, int64_t count, int64_t stop,
                           ModelState* state) {
      model->watch = [](int64_t, const at::Tensor&) {};
      auto out = generate(*model, tokens, count, {.top_p = 0.9}, seeds, stop, {}, state);
      model->watch = nullptr;
      return out;
    };
    const auto captured = [&](const at::Tensor& tokens, int64_t count, int64_t stop,
                              ModelState* state) {
      return generate(*model, tokens, count, {.top_p = 0.9}, seeds, stop, {}, state);
    };
    const auto expected = eager(prompts, 100, -1, nullptr);
    EXPECT_EQ(captured(prompts, 100, -1, nullptr), expected);
    const int64_t stop = expected[0][50];
    EXPECT_EQ(captured(prompts, 100, stop, nullptr), eager(prompts, 100, stop, nullptr));
    // The first 20 tokens, then the others from the state
    ModelState state;
    const auto first = captured(prompts, 20, 39, &state);
    if (first[0].size() < 20) continue;  // all sequences ended
    ASSERT_EQ(state.position, 49);
    const at::Tensor last =
        at::tensor({expected[0][19], expected[1][19], expected[2][19]}, at::kLong)
            .unsqueeze(1)
            .to(at::kCUDA);
    const auto rest = eager(last, 80, -1, &state);
    for (size_t b = 0; b < 3; ++b)
      EXPECT_EQ(rest[b], std::vector<int64_t>(expected[b].begin() + 20, expected[b].end())) << b;
  }
}

TEST(Generate, RefusesMoreThanTheModelsPositions) {
  const auto model = random_model(
      "[model]\nvocab_size = 10\nd_model = 8\npositions = \"learned\"\nmax_positions = 12\n");
  const at::Tensor prompt = random_tokens(1, 5, 10, "positions");
  const std::vector<uint64_t> seed = {0};
  EXPECT_EQ(generate(*model, prompt, 8, {}, seed)[0].size(), 8u);
  EXPECT_THROW(generate(*model, prompt, 9, {}, seed), BadInput);
  EXPECT_THROW(generate(*model, prompt, -1, {}, seed), BadInput);
}

// A generation saved in the middle and taken up again draws what an uninterrupted one draws,
// for every mixer.
TEST(Generate, GoesOnFromASavedState) {
  const data::Folder folder;
  for (const std::string& mixer : mixers().names()) {
    const std::string table = mixers().at(mixer).examples.front();
    const auto model = random_model(
        fmt::format("[model]\nvocab_size = 40\nd_model = 48\npattern = [\"{0}\"]\n[model.{0}]\n{1}",
                    mixer, table));
    model->compute_dtype = at::kDouble;
    const at::Tensor prompt = random_tokens(1, 5, 40, "prompt");
    const std::vector<uint64_t> seed = {3};
    const auto whole = generate(*model, prompt, 24, {}, seed).front();
    Generation begun{{prompt.data_ptr<int64_t>(), prompt.data_ptr<int64_t>() + 5}, {}};
    const auto first = generate(*model, prompt, 10, {}, seed, -1, {}, &begun.state).front();
    begun.tokens.insert(begun.tokens.end(), first.begin(), first.end());
    save_generation(folder / "saved", *model, begun);
    Generation again = load_generation(folder / "saved", *model, 2);
    ASSERT_EQ(again.tokens, begun.tokens);
    ASSERT_EQ(again.state.position, 14);
    const at::Tensor unread =
        at::tensor(again.tokens, at::kLong).slice(0, again.state.position).expand({2, -1});
    const auto rest =
        generate(*model, unread, 14, {}, std::vector<uint64_t>{4, 3}, -1, {}, &again.state);
    EXPECT_EQ(rest[1], std::vector<int64_t>(whole.begin() + 10, whole.end())) << mixer;
    EXPECT_NE(rest[0], rest[1]) << mixer;
  }
}

TEST(Generate, ASavedStateBelongsToItsModel) {
  const data::Folder folder;
  const auto model = random_model(kModel);
  const auto other = random_model(kModel, 2);
  save_generation(folder / "saved", *model, {{1, 2}, {}});
  EXPECT_EQ(load_generation(folder / "saved", *model).tokens, (std::vector<int64_t>{1, 2}));
  EXPECT_THROW(load_generation(folder / "saved", *other), BadInput);
  model->compute_dtype = at::kBFloat16;
  EXPECT_THROW(load_generation(folder / "saved", *model), BadInput);
  const auto broken = [&](const std::string& name, const std::string& position) {
    auto said = Safetensors(folder / "saved").metadata();
    said["position"] = position;
    save_tensors(folder / "broken",
                 {{"tokens", at::tensor({1, 2}, at::kLong)}, {name, at::zeros({1, 2})}}, said);
    return folder / "broken";
  };
  model->compute_dtype = at::kFloat;
  for (const auto& [name, position] : {std::pair("layers.0.k", "1"),
                                       {"layers.0.k", "x"},
                                       {"layers.0.k", "2"},
                                       {"layers.0.k", "-1"},
                                       {"layers.99.k", "1"},
                                       {"layers.x.k", "1"},
                                       {"k", "1"}})
    EXPECT_THROW(load_generation(broken(name, position), *model), BadInput)
        << name << " " << position;
  save_tensors(folder / "else", {{"x", at::zeros({2})}});
  EXPECT_THROW(load_generation(folder / "else", *model), BadInput);
}

// Names, shapes and values of the layers, and the position, are those that were saved.
TEST(Generate, ChangedSavedStateIsRejected) {
  const data::Folder folder;
  const auto model = random_model(kModel);
  Generation begun{{1, 2, 3, 4}, {}};
  const at::Tensor prompt = at::tensor({1, 2, 3}, at::kLong).unsqueeze(0);
  generate(*model, prompt, 1, {}, std::vector<uint64_t>{1}, -1, {}, &begun.state);
  save_generation(folder / "saved", *model, begun);
  EXPECT_EQ(load_generation(folder / "saved", *model).state.position, begun.state.position);
  const NamedTensors tensors = load_tensors(folder / "saved");
  const auto metadata = Safetensors(folder / "saved").metadata();
  const auto expect_rejected = [&](const NamedTensors& changed,
                                   const std::map<std::string, std::string>& said) {
    save_tensors(folder / "changed", changed, said);
    EXPECT_EQ(
        data::message_of([&] { load_generation(folder / "changed", *model); }),
        (folder / "changed").string() + ": changed since it was saved; save the generation again");
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    SCOPED_TRACE(tensors[i].first);
    NamedTensors changed = tensors;
    changed[i].first += "x";
    if (tensors[i].first != "tokens") expect_rejected(changed, metadata);
    changed = tensors;
    changed[i].second = tensors[i].second.unsqueeze(0);
    expect_rejected(changed, metadata);
    changed[i].second = tensors[i].second + 1;
    expect_rejected(changed, metadata);
    changed[i].second = tensors[i].second.to(at::kHalf);
    expect_rejected(changed, metadata);
  }
  auto said = metadata;
  said["position"] = "1";
  expect_rejected(tensors, said);
}

// Any bytes are accepted unchanged or rejected with an error.
TEST(Generate, RandomlyChangedFileOfAStateIsRejected) {
  const data::Folder folder;
  const auto model = random_model(kModel);
  Generation begun{{1, 2, 3, 4}, {}};
  const at::Tensor prompt = at::tensor({1, 2, 3}, at::kLong).unsqueeze(0);
  generate(*model, prompt, 1, {}, std::vector<uint64_t>{1}, -1, {}, &begun.state);
  save_generation(folder / "saved", *model, begun);
  const std::string whole = read_file(folder / "saved");
  Random random(1, "saved states");
  int accepted = 0;
  for (int i = 0; i < 300; ++i) {
    folder.write("changed", fuzz::mutated_bytes(whole, random));
    try {
      load_generation(folder / "changed", *model);
      ++accepted;
    } catch (const BadInput&) {
    }
  }
  EXPECT_LT(accepted, 30);  // changes of white space or of keys that nobody reads
}

}  // namespace
}  // namespace assay::nn
