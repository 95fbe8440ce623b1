// Needles against prompts that RULER wrote, and MQAR against examples that Zoology wrote.
#include <torch/torch.h>

#include <cmath>
#include <set>
#include <sstream>

#include "base/safetensors.h"
#include "data/folder.h"
#include "ops/golden.h"
#include "tasks/mqar.h"
#include "tasks/niah.h"
#include "tasks/template.h"
#include "tasks/text.h"

namespace assay::tasks {
namespace {

using data::Folder, data::message_of;

int64_t count_words(const std::string& text) { return int64_t(split(text, "").size()); }

fs::path golden_needles_file(int64_t length) {
  return golden_folder() / fmt::format("ruler_niah_single_noise_{}.jsonl", length);
}
std::vector<Json> golden_needles(int64_t length) {
  std::vector<Json> out;
  std::istringstream lines(read_file(golden_needles_file(length)));
  for (std::string line; std::getline(lines, line);) out.push_back(Json::parse(line));
  return out;
}

TEST(TaskNiah, PromptsAreThoseOfRuler) {
  for (const int64_t length : {512, 1024}) {
    if (length == 1024 && !golden_data_is_complete()) continue;
    const NiahOptions options{.variant = 1, .length = length};
    const int64_t units = haystack_units(options, count_words);
    for (const Json& golden : golden_needles(length)) {
      const std::string prompt =
          golden["input"].get<std::string>() + golden["answer_prefix"].get<std::string>();
      const std::vector<std::string> lines = split(prompt, "\n");
      EXPECT_EQ(int64_t(lines.size()), units + 3)
          << "template, needle and question are one line each";
      int64_t place = 0;
      while (!lines[size_t(place) + 1].starts_with("One of the special magic numbers for "))
        ++place;
      const std::string key = split(split(lines[size_t(place) + 1], "numbers for ")[1], " is:")[0];
      const NeedleSample sample = needle_sample(options, units, place, key, golden["outputs"][0]);
      EXPECT_EQ(sample.prompt, prompt);
      EXPECT_EQ(count_words(sample.prompt) + 128, golden["length"].get<int64_t>());
    }
  }
}

TEST(TaskNiah, HaystackFillsTheLengthAndDepthsAreEven) {
  std::string book;
  for (int i = 0; i < 300; ++i)
    book += fmt::format("The {} house was \"blue.\" Nobody knew it\n\n", i);
  for (const int variant : {1, 2, 3})
    for (const int64_t length : {600, 3000}) {
      const NiahOptions options{
          .variant = variant, .length = length, .samples = 9, .haystack = book};
      const auto samples = needle_samples(options, count_words);
      ASSERT_EQ(samples.size(), 9u);
      std::set<std::string> answers;
      for (const NeedleSample& sample : samples) {
        EXPECT_LE(sample.tokens + 128, length);
        EXPECT_GE(sample.tokens + 128, length - 25) << variant;
        EXPECT_NE(sample.prompt.find(sample.answer + "."), std::string::npos);
        EXPECT_EQ(sample.answer.size(), variant == 3 ? 36u : 7u);
        answers.insert(sample.answer);
        const double place =
            double(sample.prompt.find("One of the special")) / double(sample.prompt.size());
        EXPECT_NEAR(place, sample.depth, 0.2) << sample.depth;
      }
      EXPECT_EQ(answers.size(), 9u);
    }
  EXPECT_NE(message_of([] { haystack_units({.length = 150}, count_words); }).find("too short"),
            std::string::npos);
  EXPECT_EQ(needle_score(" It is\t77\n", "77"), 1);
  EXPECT_EQ(needle_score("AB-cd", "ab-CD"), 1);
  EXPECT_EQ(needle_score("7 7", "77"), 0);
}

struct Golden {
  std::string name;
  MqarData data;
};
const std::vector<Golden> kGolden = {{"mqar_L64_kv4", {256, 64, 4}},
                                     {"mqar_L64_kv4_random", {256, 64, 4, 0.01, true}},
                                     {"mqar_L256_kv16", {8192, 256, 16}}};

// The rule, for one example.
void expect_rule(const int64_t* inputs, const int64_t* labels, const MqarData& data) {
  std::map<int64_t, int64_t> value_of;
  std::set<int64_t> values;
  for (int64_t i = 0; i < data.pairs; ++i) {
    EXPECT_TRUE(inputs[2 * i] >= 1 && inputs[2 * i] < data.vocab_size / 2);
    EXPECT_TRUE(inputs[2 * i + 1] >= data.vocab_size / 2 && inputs[2 * i + 1] < data.vocab_size);
    value_of[inputs[2 * i]] = inputs[2 * i + 1];
    values.insert(inputs[2 * i + 1]);
  }
  EXPECT_EQ(int64_t(value_of.size()), data.pairs);
  EXPECT_EQ(int64_t(values.size()), data.pairs);
  std::set<int64_t> asked;
  for (int64_t i = 0; i < data.length; ++i) {
    if (labels[i] == -100) {
      if (i >= 2 * data.pairs && !data.random_non_queries) EXPECT_EQ(inputs[i], 0);
      continue;
    }
    EXPECT_TRUE(i >= 2 * data.pairs && i % 2 == 0) << i;
    EXPECT_EQ(labels[i], value_of.at(inputs[i]));
    asked.insert(inputs[i]);
  }
  EXPECT_EQ(int64_t(asked.size()), data.pairs);
}

TEST(TaskMqar, ExamplesFollowTheRuleOfZoology) {
  for (const Golden& golden : kGolden) {
    const MqarBatch made = mqar_examples(golden.data, 5, 100, 50);
    for (int64_t row = 0; row < 50; ++row)
      expect_rule(made.inputs[row].data_ptr<int64_t>(), made.labels[row].data_ptr<int64_t>(),
                  golden.data);
    if (golden.name != "mqar_L64_kv4" && !golden_data_is_complete()) continue;
    const auto stored = ops::read_golden(ops::golden_file(golden.name));
    const at::Tensor inputs = stored.at("out.inputs").to(at::kLong);
    const at::Tensor labels = stored.at("out.labels").to(at::kLong);
    for (int64_t row = 0; row < inputs.size(0); ++row)
      expect_rule(inputs[row].data_ptr<int64_t>(), labels[row].data_ptr<int64_t>(), golden.data);
  }
  EXPECT_THROW(mqar_examples({256, 64, 17}, 0, 0, 1), BadInput);
  EXPECT_TRUE(at::equal(mqar_examples(kGolden[0].data, 5, 3, 2).inputs,
                        mqar_examples(kGolden[0].data, 5, 0, 5).inputs.slice(0, 3)));
}

// Σ (a − b)² / (a + b) of two counts of equal size, on cells of at least ten.
double chi_square(const std::vector<double>& a, const std::vector<double>& b, int& freedom) {
  double sum = 0;
  double rest_a = 0;
  double rest_b = 0;
  freedom = -1;
  const auto add = [&](double x, double y) {
    if (x + y < 10) return;
    sum += (x - y) * (x - y) / (x + y);
    ++freedom;
  };
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] + b[i] >= 10) add(a[i], b[i]);
    else {
      rest_a += a[i];
      rest_b += b[i];
    }
  }
  add(rest_a, rest_b);
  return sum;
}

TEST(TaskMqar, SlotsAreDistributedAsInZoology) {
  for (const Golden& golden : kGolden) {
    if (golden.name != "mqar_L64_kv4" && !golden_data_is_complete()) continue;
    const auto stored = ops::read_golden(ops::golden_file(golden.name));
    const int64_t slots = (golden.data.length - 2 * golden.data.pairs) / 2;
    const int64_t examples = 20'000;
    std::vector<double> all(size_t(slots), 0);
    std::vector<double> first(size_t(slots), 0);
    const MqarBatch made = mqar_examples(golden.data, 9, 0, examples);
    const int64_t* inputs = made.inputs.data_ptr<int64_t>();
    const int64_t* labels = made.labels.data_ptr<int64_t>();
    for (int64_t row = 0; row < examples; ++row)
      for (int64_t slot = 0; slot < slots; ++slot) {
        const int64_t at = row * golden.data.length + 2 * golden.data.pairs + 2 * slot;
        if (labels[at] == -100) continue;
        ++all[size_t(slot)];
        if (inputs[at] == inputs[row * golden.data.length]) ++first[size_t(slot)];
      }
    for (const auto& [name, counts] :
         {std::pair{"stat.slot_count", all}, {"stat.slot_count_first_key", first}}) {
      const at::Tensor theirs = stored.at(name).contiguous();
      const std::vector<double> expected(theirs.data_ptr<double>(),
                                         theirs.data_ptr<double>() + slots);
      int freedom = 0;
      const double statistic = chi_square(counts, expected, freedom);
      EXPECT_LT(statistic, freedom + 5 * std::sqrt(2.0 * freedom)) << golden.name << " " << name;
      EXPECT_GT(freedom, 5);
    }
  }
}

TEST(TaskMqar, RecallIsLearnedWithAStateOnly) {
  const Folder folder;
  folder.write("plan.toml", R"([mqar]
lengths = [16]
pairs = [2]
widths = [32]
learning_rates = [3e-3]
models = ["gated_delta_net", "none"]
vocab_size = 32
train_examples = 3000
test_examples = 200
epochs = 3
batch_size = 50
[model.gated_delta_net]
pattern = ["gated_delta_net"]
channel_mixer = "none"
gated_delta_net = { num_heads = 1 }
[model.none]
pattern = ["attention"]
channel_mixer = "none"
attention = { num_heads = 1, window = 1 }
)");
  const MqarStudy study = MqarStudy::read(folder / "plan.toml");
  ASSERT_EQ(study.runs.size(), 2u);
  const MqarResult recalls = train_mqar(study.runs[0], study.plan, at::kCPU);
  EXPECT_GT(recalls.accuracy, 0.9);
  EXPECT_GT(recalls.state_bytes, 0);
  EXPECT_LT(train_mqar(study.runs[1], study.plan, at::kCPU).accuracy, 0.5)
      << "a window of one position sees no pair";
  for (const char* precision : {"bf16", "fp64"}) {
    MqarPlan plan = study.plan;
    plan.precision = precision;
    plan.train_examples = 100;
    plan.epochs = 1;
    EXPECT_EQ(train_mqar(study.runs[0], plan, at::kCPU).epochs, 1) << precision;
  }
}

TEST(TaskMqar, WrongPlansAreRefused) {
  const Folder folder;
  const auto message = [&](const std::string& text) {
    return message_of([&] { MqarStudy::read(folder.write("plan.toml", text)); });
  };
  EXPECT_NE(message("[mqar]\nlengts = [16]\n").find("did you mean 'lengths'?"), std::string::npos);
  EXPECT_NE(message("[mqar]\nlengths = [16]\n").find("one number for each"), std::string::npos);
  EXPECT_NE(
      message("[mqar]\nmodels = [\"atention\"]\n[model.attention]\npattern = [\"attention\"]\n")
          .find("did you mean"),
      std::string::npos);
  for (const char* plan : {"small", "no_convolution", "one_gpu", "zoology"})
    EXPECT_NO_THROW(
        MqarStudy::read(fs::path(ASSAY_SOURCE_DIR) / "plans/mqar" / (std::string(plan) + ".toml")))
        << plan;
}

}  // namespace
}  // namespace assay::tasks
