// Sequences that decode together at positions of their own, for every mixer.
#include "nn/slots.h"

#include <torch/torch.h>

#include "testing.h"

namespace assay::nn {
namespace {

constexpr int64_t kVocabulary = 40;

struct Example {
  std::string name, toml;
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
        slots.put(slot, read(sequences[size_t(slot)]));
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
            << "step " << step << " slot " << slot;
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
      slots.put((slot + 1 + i) % count, read(tokens));
    }
    slots.put(slot, read(prompt));
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

INSTANTIATE_TEST_SUITE_P(Mixers, SlotsForms, testing::ValuesIn(examples()),
                         [](const auto& example) { return example.param.name; });

}  // namespace
}  // namespace assay::nn
