#pragma once
// Multi-query associative recall (MQAR) as Zoology generates it [Arora et al. 2023], and small
// models trained on it.
//
//   positions 0 … 2n − 1
//       key_1 value_1 … key_n value_n: distinct keys of 1 … V/2 − 1, distinct values of V/2 … V − 1
//   then slots of two
//       n of the (L − 2n)/2 slots are drawn one after another without replacement, slot i with
//                            weight (i + 1)^(a − 1); the m-th drawn holds key_m again at
//                            its first position
//   labels
//       value_m at the position of that key; −100 elsewhere. The value itself is not shown.
//   the other positions      0, or with random_non_queries a random token of 0 … V − 1
// Example i of a seed is a pure function of both.
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/files.h"
#include "nn/language_model.h"

namespace assay::tasks {

struct MqarData {
  int64_t vocab_size = 8192;
  int64_t length = 64;
  int64_t pairs = 4;
  double power = 0.01;
  bool random_non_queries = false;
  void check() const;  // BadInput unless 4n ≤ L, L is even, V > L
};
struct MqarBatch {
  // [count, L] i64
  at::Tensor inputs;
  at::Tensor labels;
};
MqarBatch mqar_examples(const MqarData& data, uint64_t seed, int64_t first, int64_t count);

// Table [mqar] of plans/mqar.toml.
struct MqarPlan {
  std::vector<std::string> models;
  std::vector<int64_t> lengths = {64, 128};
  std::vector<int64_t> pairs = {4, 8};
  std::vector<int64_t> widths = {64, 128};
  std::vector<double> learning_rates = {1e-4, 1e-3, 1e-2};
  int64_t vocab_size = 8192;
  int64_t train_examples = 100'000;
  int64_t test_examples = 3'000;
  int64_t epochs = 64;
  int64_t batch_size = 256;
  int64_t seed = 0;
  double power = 0.01;
  double weight_decay = 0.1;
  double stop_at = 0.99;
  std::string precision = "auto";
  bool random_non_queries = false;
  void fields(auto&& field) {
    field("models", models, "tables [model.NAME] of this file");
    field("lengths", lengths, "tokens of an example");
    field("pairs", pairs, "pairs of key and value, one number for each length");
    field("widths", widths, "d_model");
    field("learning_rates", learning_rates,
          "tried in this order until one reaches stop_at; the best accuracy counts");
    field("vocab_size", vocab_size, "the first half are keys, the second half values");
    field("train_examples", train_examples, "fixed, read in the same order in every epoch");
    field("test_examples", test_examples, "of another seed");
    field("epochs", epochs, "at most");
    field("batch_size", batch_size, "examples per step");
    field("seed", seed, "of weights and examples");
    field("power", power, "a of the weights of slots; 1: all alike");
    field("weight_decay", weight_decay, "AdamW");
    field("stop_at", stop_at, "accuracy after which training ends");
    field("precision", precision, "auto (bf16 on CUDA, else fp32), bf16, fp32 or fp64");
    field("random_non_queries", random_non_queries, "random tokens where nothing is asked");
  }
};

struct MqarRun {
  // toml: [model] with its tables
  std::string model;
  std::string toml;
  int64_t width = 0;
  MqarData data;
  double learning_rate = 0;
};
// Every run of the plan file, checked: models × widths × lengths × learning rates. BadInput
// with the place.
struct MqarStudy {
  MqarPlan plan;
  std::vector<MqarRun> runs;
  static MqarStudy read(const fs::path& file);
};

struct MqarResult {
  double accuracy =
      0;  // of test queries, after the last epoch; training ends early at plan.stop_at
  int64_t epochs = 0;
  int64_t state_bytes = 0;
  int64_t parameters = 0;
  double seconds = 0;
};
// Trains with AdamW and a cosine schedule to 0. Throws Interrupted between steps.
MqarResult train_mqar(const MqarRun& run, const MqarPlan& plan, c10::Device device,
                      const std::function<void(int64_t epoch, double accuracy)>& progress = {});

}  // namespace assay::tasks
