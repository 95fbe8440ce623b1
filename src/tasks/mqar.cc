#include "tasks/mqar.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>

#include "base/files.h"
#include "base/interrupt.h"
#include "base/random.h"
#include "nn/lm_loss.h"
#include "train/config.h"
#include "train/device.h"
#include "train/optimizer.h"

namespace assay::tasks {
namespace {

constexpr int64_t kNoLabel = -100;

// `count` distinct numbers of first … first + size − 1, in the order drawn (the start of
// a Fisher–Yates shuffle).
std::vector<int64_t> distinct(Random& random, int64_t first, int64_t size, int64_t count) {
  std::map<int64_t, int64_t> moved;
  const auto at = [&](int64_t i) { return moved.contains(i) ? moved[i] : i; };
  std::vector<int64_t> out;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t j = i + int64_t(random.below(uint64_t(size - i)));
    const int64_t chosen = at(j);
    moved[j] = at(i);
    out.push_back(first + chosen);
  }
  return out;
}

std::vector<int64_t> draw_slots(Random& random, const std::vector<double>& weights, int64_t count) {
  std::vector<double> left = weights;
  std::vector<int64_t> out;
  for (int64_t i = 0; i < count; ++i) {
    double total = 0;
    for (const double weight : left) total += weight;
    double target = random.uniform() * total;
    size_t slot = 0;
    for (size_t j = 0; j < left.size(); ++j) {
      if (left[j] == 0) continue;
      slot = j;
      target -= left[j];
      if (target < 0) break;
    }
    out.push_back(int64_t(slot));
    left[slot] = 0;
  }
  return out;
}

struct Loss {
  // of the queries
  at::Tensor hidden;
  at::Tensor targets;
};
// Examples on a device. The places of the queries are found once, because a search on a GPU would
// make every step wait for it.
struct Examples {
  at::Tensor inputs;   // [N, L]
  at::Tensor places;   // [N, n]: of the queries, in the rows of their batch [batch_size · L]
  at::Tensor targets;  // [N, n]: their values
};
Examples on_device(const MqarBatch& batch, int64_t batch_size, c10::Device device) {
  const int64_t count = batch.inputs.size(0);
  const int64_t length = batch.inputs.size(1);
  const at::Tensor positions = (batch.labels != kNoLabel).nonzero().select(1, 1).view({count, -1});
  const at::Tensor rows = at::arange(count, at::kLong).remainder(batch_size).unsqueeze(1);
  return {batch.inputs.to(device), (rows * length + positions).to(device),
          batch.labels.gather(1, positions).to(device)};
}

// Hidden vectors and targets of the queries of examples [begin, end), a batch or its first rows.
Loss queries(nn::LanguageModel& model, const Examples& all, int64_t begin, int64_t end) {
  nn::ModelState state{.last = true};
  const at::Tensor hidden = model.hidden(all.inputs.slice(0, begin, end), state).flatten(0, 1);
  return {hidden.index_select(0, all.places.slice(0, begin, end).flatten()),
          all.targets.slice(0, begin, end).flatten()};
}

double accuracy(nn::LanguageModel& model, const Examples& test, int64_t batch_size) {
  const at::NoGradGuard no_grad;
  const int64_t count = test.inputs.size(0);
  at::Tensor right = at::zeros({}, test.inputs.options());
  for (int64_t begin = 0; begin < count; begin += batch_size) {
    const Loss found = queries(model, test, begin, std::min(begin + batch_size, count));
    right += (model.logits_of_hidden(found.hidden).argmax(1) == found.targets).sum();
  }
  return double(right.item<int64_t>()) / double(test.targets.numel());
}

ConfigNode configuration(const ConfigNode& table, int64_t width, const MqarData& data,
                         const std::string& source) {
  std::string own = fmt::format("d_model = {}\nvocab_size = {}\n", width, data.vocab_size);
  if (table.value("positions") == "\"learned\"" || table.value("positions") == "'learned'")
    own += fmt::format("max_positions = {}\n", data.length);
  return ConfigNode::merged({table, ConfigNode::parse(own, source)});
}

}  // namespace

void MqarData::check() const {
  if (length % 2 != 0 || pairs < 1 || 4 * pairs > length)
    fail(
        "MQAR: {} pairs and their queries do not fit {} tokens (4 tokens per pair, an even length)",
        pairs, length);
  if (vocab_size <= length || vocab_size / 2 - 1 < pairs)
    fail("MQAR: vocab_size = {} must be above the length {}", vocab_size, length);
}

MqarBatch mqar_examples(const MqarData& data, uint64_t seed, int64_t first, int64_t count) {
  data.check();
  const int64_t half = data.vocab_size / 2;
  const int64_t begun = 2 * data.pairs;
  std::vector<double> weights;
  for (int64_t i = 0; i < (data.length - begun) / 2; ++i)
    weights.push_back(std::pow(double(i + 1), data.power - 1));
  MqarBatch out{at::zeros({count, data.length}, at::kLong),
                at::full({count, data.length}, kNoLabel, at::kLong)};
  for (int64_t row = 0; row < count; ++row) {
    Random random(seed, "mqar", uint64_t(first + row));
    int64_t* inputs = out.inputs.data_ptr<int64_t>() + row * data.length;
    int64_t* labels = out.labels.data_ptr<int64_t>() + row * data.length;
    const std::vector<int64_t> keys = distinct(random, 1, half - 1, data.pairs);
    const std::vector<int64_t> values = distinct(random, half, data.vocab_size - half, data.pairs);
    const std::vector<int64_t> slots = draw_slots(random, weights, data.pairs);
    for (int64_t i = 0; i < data.pairs; ++i) {
      const int64_t place = begun + 2 * slots[size_t(i)];
      inputs[2 * i] = keys[size_t(i)];
      inputs[2 * i + 1] = values[size_t(i)];
      inputs[place] = keys[size_t(i)];
      labels[place] = values[size_t(i)];
    }
    if (!data.random_non_queries) continue;
    for (int64_t i = 0; i < data.length; ++i)
      if (inputs[i] == 0) inputs[i] = int64_t(random.below(uint64_t(data.vocab_size)));
  }
  return out;
}

MqarStudy MqarStudy::read(const fs::path& file) {
  const ConfigNode root = ConfigNode::read_file(file);
  root.read(Fields{}, {"mqar", "model"});
  const ConfigNode table = root.child("mqar");
  const ConfigNode models = root.child("model");
  MqarStudy study;
  table.read(study.plan);
  MqarPlan& plan = study.plan;
  if (plan.models.empty()) plan.models = models.keys();
  if (plan.lengths.size() != plan.pairs.size() || plan.lengths.empty())
    fail("{}: 'pairs' needs one number for each of the {} lengths. Nothing was run.",
         table.where("pairs"), plan.lengths.size());
  const bool positive =
      plan.train_examples > 0 && plan.test_examples > 0 && plan.epochs > 0 && plan.batch_size > 0;
  if (!positive || plan.widths.empty() || plan.learning_rates.empty() || plan.models.empty())
    fail(
        "{}: examples, epochs and batch_size must be positive, and models, "
        "widths and learning_rates not empty. Nothing was run.",
        file.string());
  const std::vector<std::string> precisions = {"auto", "bf16", "fp32", "fp64"};
  if (std::ranges::find(precisions, plan.precision) == precisions.end())
    fail("{}: precision must be one of {}. Nothing was run.", table.where("precision"),
         fmt::join(precisions, ", "));
  for (const std::string& name : plan.models) {
    if (!models.has(name)) {
      const std::vector<std::string> names = models.keys();
      fail("{}: there is no table [model.{}]{}. Nothing was run.", table.where("models"), name,
           did_you_mean(name, names));
    }
    for (const int64_t width : plan.widths)
      for (size_t i = 0; i < plan.lengths.size(); ++i) {
        const MqarData data{plan.vocab_size, plan.lengths[i], plan.pairs[i], plan.power,
                            plan.random_non_queries};
        data.check();
        const ConfigNode complete = configuration(models.child(name), width, data, file.string());
        const std::string toml = nn::ModelSpec::read(complete).toml();
        for (const double rate : plan.learning_rates)
          study.runs.push_back({name, toml, width, data, rate});
      }
  }
  return study;
}

MqarResult train_mqar(const MqarRun& run, const MqarPlan& plan, c10::Device device,
                      const std::function<void(int64_t, double)>& progress) {
  const auto start = std::chrono::steady_clock::now();
  nn::LanguageModel model(nn::ModelSpec::read(ConfigNode::parse(run.toml).child("model")));
  model.initialise(uint64_t(plan.seed));
  model.compute_dtype = train::compute_dtype(plan.precision, device);
  model.to(device, model.compute_dtype == at::kDouble ? at::kDouble : at::kFloat);
  const uint64_t seed = uint64_t(plan.seed) * 2;
  const auto examples = [&](uint64_t of, int64_t count) {
    return on_device(mqar_examples(run.data, of, 0, count), plan.batch_size, device);
  };
  const Examples train = examples(seed, plan.train_examples);
  const Examples test = examples(seed + 1, plan.test_examples);
  const int64_t steps_per_epoch = (plan.train_examples + plan.batch_size - 1) / plan.batch_size;
  train::TrainConfig config;
  config.steps = plan.epochs * steps_per_epoch;
  config.schedule = "cosine";
  config.learning_rate = run.learning_rate;
  config.weight_decay = plan.weight_decay;
  config.beta2 = 0.999;
  config.clip = 0;
  train::AdamW optimizer(model, config);
  MqarResult result;
  int64_t step = 0;
  for (int64_t epoch = 0; epoch < plan.epochs && result.accuracy < plan.stop_at; ++epoch) {
    for (int64_t begin = 0; begin < plan.train_examples; begin += plan.batch_size, ++step) {
      check_interrupt();
      const int64_t end = std::min(begin + plan.batch_size, plan.train_examples);
      const Loss found = queries(model, train, begin, end);
      nn::lm_loss(found.hidden, model.head_weight(), found.targets).backward();
      optimizer.step(train::learning_rate_at(config, step), step);
    }
    result.accuracy = accuracy(model, test, plan.batch_size);
    result.epochs = epoch + 1;
    if (progress) progress(result.epochs, result.accuracy);
  }
  result.parameters = model.parameter_count();
  result.state_bytes = model.state_bytes(run.data.length);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace assay::tasks
