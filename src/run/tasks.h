#pragma once
// Results of tasks (docs/tasks.md) on the final weights of a run, small enough for its record.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/record.h"

namespace assay::run {

// One metric over the items of a task, in their order. Two runs with the same key of the task have
// the same items.
struct TaskMetric {
  std::string name;  // "acc"
  // Values of 0 or 1: one bit per item as hexadecimal digits, the first item highest.
  std::optional<std::string> bits;
  // Other metrics: sums of log-likelihoods over at most kBlocks blocks of neighbouring items. The
  // weights are the sums of the numbers that they are divided by.
  static constexpr int64_t kBlocks = 50;
  std::optional<std::vector<double>> sums;
  std::optional<std::vector<double>> weights;
  ASSAY_FIELDS(name, bits, sums, weights)
};

struct TaskResult {
  // key: see TaskQuestion
  std::string name;
  std::string key;
  std::string problem;  // why the task has no metrics; empty otherwise
  int64_t items = 0;
  int64_t truncated = 0;  // items of which the model did not read the first tokens
  std::vector<TaskMetric> metrics;
  ASSAY_FIELDS(name, key, problem, items, truncated, metrics)
};

// tasks.json
struct TaskResults {
  std::vector<TaskResult> results;
  ASSAY_FIELDS(results)
};

// A task of a plan, as `assay eval tasks --dry-run --json` describes it.
struct TaskQuestion {
  std::string name;
  // sha256 of all that decides the items and how they are asked: definition, documents, number of
  // items, tokenizer, longest input
  std::string key;
  bool recall = false;  // the answer is in the prompt
  std::vector<std::string> metrics;
  int64_t items = 0;
  int64_t longest = 0;  // input tokens of the longest item
  int64_t least = 0;    // input tokens without which an item cannot be answered
  ASSAY_FIELDS(name, key, recall, metrics, items, longest, least)
};
struct TaskQuestions {
  std::vector<TaskQuestion> tasks;
  ASSAY_FIELDS(tasks)
};

// Values of the items, each 0 or 1, as bits and back. BadInput when the text has fewer than `items`
// bits or is not hexadecimal.
std::string bits_of(const std::vector<double>& values);
std::vector<double> values_of(const std::string& bits, int64_t items);
// Is a metric made of log-likelihoods? Otherwise it is a share of items.
bool is_likelihood(const std::string& metric);
// The number that a metric reports for a mean log-likelihood: a perplexity, or bits per byte.
double likelihood_metric(const std::string& metric, double mean);
// The difference that is reported for a difference of means: of the logarithms of perplexities, or
// of bits per byte.
double likelihood_difference(const std::string& metric, double difference);
// Sums over blocks, rounded to 7 digits.
std::vector<double> block_sums(const std::vector<double>& values);

}  // namespace assay::run
