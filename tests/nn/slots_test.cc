// Sequences that decode together at positions of their own, for every mixer.
#include "nn/slots.h"

#include <torch/torch.h>

#include "testing.h"

namespace assay::nn {
namespace {

constexpr int64_t kVocabulary = 40;
at::Tensor any_token() { return at::zeros({1}, at::kLong); }  // step() replaces it

struct Example {
  std::string name;
  std::string toml;
};

// Every registered form of every mixer, every channel mixer after attention and after a recurrence,
// and learned positions.
std::vector<Example> examples() {
  std::vector<Example> out;
  const std::string head = "[model]\nvocab_size = 40\nd_model = 48\n";
  for (const std::string& mixer : mixers().names()) {
    int number = 0;
    for (const std::string& table : mixers().at(mixer).examples) {
      const std::string toml =
          fmt::format("{0}pattern = [\"{1}\"]\n[model.{1}]\n{2}", head, mixer, table);
      out.push_back({fmt::format("{}_{}", mixer, number++), toml});
    }
  }
  out.push_back({"learned_positions", head + "positions = \"learned\"\nmax_positions = 90\n"});
  for (const std::string& channel_mixer : channel_mixers().names())
    for (const std::string mixer : {"attention", "rwkv6"})
      out.push_back({fmt::format("{}_after_{}", channel_mixer, mixer),
                     fmt::format("{}pattern = [\"{}\"]\nchannel_mixer = \"{}\"\n"
                                 "[model.{}]\nnum_heads = 4\n",
                                 head, mixer, channel_mixer, mixer)});
  return out;
}

struct SlotsForms : testing::TestWithParam<Example> {
  std::shared_ptr<LanguageModel> model = random_model(GetParam().toml);
  at::NoGradGuard no_grad;

  ModelState read(const at::Tensor& tokens) const {
    ModelState state;
    model->hidden(tokens, state);
    return state;
  }
  at::Tensor logits_alone(const at::Tensor& tokens) const {
    ModelState state;
    return model->logits(tokens, state)[0][-1];
  }
};

// Rows join and leave at different times; each is compared with its sequence read in one piece.
TEST_P(SlotsForms, RowsEqualTheirSequencesReadAlone) {
  Slots slots(*model, 3);
  const int64_t lengths[] = {1, 9, 30};
  std::vector<at::Tensor> sequences(3);
  for (int64_t step = 0; step < 40; ++step) {
    for (int64_t slot = 0; slot < 3; ++slot) {
      if (step % 17 == 5 * slot) {  // a new sequence takes the slot
        const int64_t length = lengths[(slot + step) % 3];
        sequences[size_t(slot)] =
            random_tokens(1, length, kVocabulary, fmt::format("{} {}", slot, step));
        if (slots.used(slot)) slots.clear(slot);
        slots.put(slot, read(sequences[size_t(slot)]), any_token());
      }
      if (slot == 1 && step == 30) slots.clear(slot);
    }
    const at::Tensor next = random_tokens(1, 3, kVocabulary, fmt::format("next {}", step));
    const at::Tensor logits = slots.step(
        {next[0][0].item<int64_t>(), next[0][1].item<int64_t>(), next[0][2].item<int64_t>()});
    for (int64_t slot = 0; slot < 3; ++slot) {
      if (!slots.used(slot)) continue;
      at::Tensor& sequence = sequences[size_t(slot)];
      sequence = at::cat({sequence, next.slice(1, slot, slot + 1)}, 1);
      if (step % 8 == 0)
        EXPECT_LE(relative_error(logits[slot], logits_alone(sequence)), 1e-6)
            << "step " << step << " slot " << slot
            << ". Does the part that reads caches run in by_sequence?";
    }
  }
}

// In float32, where products and element-wise operations treat the last rows or elements in another
// way for some numbers of rows.
TEST_P(SlotsForms, BitsDoNotDependOnTheOtherRows) {
  constexpr int64_t count = 8;
  model->to(at::kFloat);
  const at::Tensor prompt = random_tokens(1, 21, kVocabulary, "prompt");
  const auto decode = [&](int64_t slot, int64_t others) {
    Slots slots(*model, count);
    for (int64_t i = 0; i < others; ++i) {
      const at::Tensor tokens =
          random_tokens(1, 3 + 11 * i, kVocabulary, fmt::format("other {}", i));
      slots.put((slot + 1 + i) % count, read(tokens), any_token());
    }
    slots.put(slot, read(prompt), any_token());
    std::vector<at::Tensor> rows;
    for (int64_t step = 0; step < 6; ++step) {
      std::vector<int64_t> tokens(count);
      for (int64_t i = 0; i < count; ++i) tokens[size_t(i)] = (7 * step + i) % kVocabulary;
      tokens[size_t(slot)] = 3 * step % kVocabulary;
      if (step == 3 && others > 0) slots.clear((slot + 1) % count);
      rows.push_back(slots.step(tokens)[slot].clone());
    }
    return at::stack(rows);
  };
  const at::Tensor alone = decode(0, 0);
  EXPECT_TRUE(at::equal(decode(0, 4), alone));
  EXPECT_TRUE(at::equal(decode(5, 0), alone));
  EXPECT_TRUE(at::equal(decode(7, 2), alone));
}

// On a GPU, in the precision of serving: full attention of several forms, recurrences, a channel
// mixer with a state, a hybrid, and models that are not captured.
const std::vector<Example>& cuda_examples() {
  const auto toml = [](const std::string& pattern, const std::string& rest) {
    return fmt::format("[model]\nvocab_size = 40\nd_model = 64\nnum_layers = 3\npattern = [{}]\n{}",
                       pattern, rest);
  };
  static const std::vector<Example> examples = {
      {"transformer", toml("\"attention\"", "[model.attention]\nnum_heads = 4\nnum_kv_heads = 2")},
      {"qk_norm", toml("\"attention\"", "[model.attention]\nnum_heads = 2\nqk_norm = true")},
      {"qk_rmsnorm",
       toml("\"attention\"", "[model.attention]\nnum_heads = 4\nqk_rmsnorm = \"head\"")},
      {"post_norm", toml("\"attention\", \"mamba2\"",
                         "post_norm = [\"attention\"]\nresidual_scale = 0.5\n"
                         "embedding_scale = 3.0\nlogit_divisor = 2.0\n"
                         "[model.mamba2]\nstate_size = 16\nhead_dim = 16")},
      {"alibi", toml("\"attention\"", "[model.attention]\nnum_heads = 8\nposition = \"alibi\"")},
      {"wide", "[model]\nvocab_size = 40\nd_model = 320\nchannel_mixer = \"swiglu\"\n"},
      {"layernorm", toml("\"attention\"", "norm = \"layernorm\"")},
      {"zero_centered", toml("\"attention\"", "norm = \"zero_centered_rmsnorm\"")},
      {"plain_gelu", toml("\"attention\"", "channel_mixer = \"gelu\"\n[model.gelu]\nbias = true")},
      {"learned", toml("\"attention\"",
                       "positions = \"learned\"\nmax_positions = 1100\n"
                       "[model.attention]\nposition = \"none\"")},
      {"mamba2", toml("\"mamba2\"", "[model.mamba2]\nstate_size = 16\nhead_dim = 16")},
      {"rwkv7",
       toml("\"rwkv7\"", "channel_mixer = \"rwkv7_channel_mix\"\n[model.rwkv7]\nnum_heads = 4")},
      {"hybrid", toml("\"attention\", \"mamba2\", \"gla\"",
                      "[model.mamba2]\nstate_size = 16\nhead_dim = 16")},
      {"window", toml("\"attention\"", "[model.attention]\nwindow = 9")},
      {"retention", toml("\"retention\"", "[model.retention]\nnum_heads = 2")},
      {"top1_exact", toml("\"top1_chunk\"", "[model.top1_chunk]\nchunk_size = 16\nhead_dim = 64")},
      {"top1_approx", toml("\"top1_chunk\"",
                           "[model.top1_chunk]\nchunk_size = 16\nselection = \"approx\"\n"
                           "head_dim = 64\nnum_heads = 2\nnum_kv_heads = 1")},
      {"hybrid_top1", toml("\"attention\", \"top1_chunk\", \"mamba2\"",
                           "[model.top1_chunk]\nchunk_size = 128\nselection = \"approx\"\n"
                           "head_dim = 64\nposition = \"none\"\ntop_k = 2\n"
                           "[model.mamba2]\nstate_size = 16\nhead_dim = 16")},
      {"not_captured",
       toml("\"attention\", \"top1_chunk\"", "[model.top1_chunk]\nchunk_size = 16")},
  };
  return examples;
}

struct SlotsCuda : testing::TestWithParam<Example> {
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
    model = random_model(GetParam().toml);
    model->to(at::kCUDA, at::kFloat);
    model->compute_dtype = at::kBFloat16;
    model->prepare_inference();
  }
  // Logits of `steps` steps of a batch that is decoded without slots or graphs.
  std::vector<at::Tensor> logits_without_slots(const at::Tensor& tokens, int64_t prompt) const {
    ModelState state;
    model->hidden(tokens.narrow(1, 0, prompt), state);
    std::vector<at::Tensor> out;
    for (int64_t t = prompt; t < tokens.size(1); ++t)
      out.push_back(model->logits(tokens.narrow(1, t, 1), state).squeeze(1));
    return out;
  }
  ModelState state_after(const at::Tensor& tokens, int64_t row, int64_t prompt) const {
    ModelState state;
    model->hidden(tokens.narrow(0, row, 1).narrow(1, 0, prompt), state);
    return state;
  }
  std::shared_ptr<LanguageModel> model;
  at::NoGradGuard no_grad;
};

// A step is captured for 1,024 tokens, and again for 2,048.
TEST_P(SlotsCuda, CapturedStepsGiveTheBitsOfStepsWithoutGraphs) {
  constexpr int64_t kRows = 3;
  constexpr int64_t kPrompt = 1000;
  const at::Tensor tokens = random_tokens(kRows, kPrompt + 60, 40, "tokens").to(at::kCUDA);
  ModelState state;
  model->hidden(tokens.narrow(1, 0, kPrompt), state);
  Slots slots(*model, kRows);
  for (int64_t row = 0; row < kRows; ++row) {
    ModelState one{.layers = {}, .position = kPrompt};
    for (const State& layer : state.layers) {
      one.layers.emplace_back();
      for (const auto& [name, tensor] : layer.tensors())
        one.layers.back()[name] = tensor.dim() == 0 ? tensor : tensor.narrow(0, row, 1).clone();
    }
    slots.put(row, one, any_token());
  }
  const std::vector<at::Tensor> expected = logits_without_slots(tokens, kPrompt);
  const bool same_kernels = GetParam().name != "not_captured";
  for (int64_t t = kPrompt; t < tokens.size(1); ++t) {
    const at::Tensor column = tokens.select(1, t).cpu();
    const int64_t* next = column.data_ptr<int64_t>();
    const at::Tensor& logits = slots.step(std::vector(next, next + kRows));
    if (same_kernels)
      EXPECT_TRUE(at::equal(logits, expected[size_t(t - kPrompt)])) << "position " << t;
    else EXPECT_LE(relative_error(logits, expected[size_t(t - kPrompt)]), 0.05) << "position " << t;
  }
}

// Rows join, leave and grow; no row changes the bits of another.
TEST_P(SlotsCuda, BitsDoNotDependOnTheOtherRows) {
  constexpr int64_t kRows = 4;
  constexpr int64_t kSteps = 40;
  const at::Tensor tokens = random_tokens(kRows, 300, 40, "tokens").to(at::kCUDA);
  const auto decode = [&](int64_t slot, bool others) {
    Slots slots(*model, kRows);
    slots.put(slot, state_after(tokens, 0, 40), any_token());
    std::vector<at::Tensor> rows;
    for (int64_t step = 0; step < kSteps; ++step) {
      for (int64_t other = 1; others && other < kRows; ++other) {
        if (step == 3 * other)
          slots.put((slot + other) % kRows, state_after(tokens, other, 60 * other), any_token());
        if (step == 11 * other) slots.clear((slot + other) % kRows);
      }
      std::vector<int64_t> next(kRows, step % 7);
      next[size_t(slot)] = 3 * step % 40;
      rows.push_back(slots.step(next)[slot].clone());
    }
    return at::stack(rows);
  };
  const at::Tensor alone = decode(0, false);
  EXPECT_TRUE(at::equal(decode(0, true), alone));
  EXPECT_TRUE(at::equal(decode(3, true), alone));
}

INSTANTIATE_TEST_SUITE_P(Models, SlotsCuda, testing::ValuesIn(cuda_examples()),
                         [](const auto& example) { return example.param.name; });

INSTANTIATE_TEST_SUITE_P(Mixers, SlotsForms, testing::ValuesIn(examples()),
                         [](const auto& example) { return example.param.name; });

}  // namespace
}  // namespace assay::nn
