#pragma once
// Content of the JSON files of a run folder. docs/runs.md says what each key means; folder.h says
// which file holds which record.
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/record.h"

namespace assay::run {

// Bytes that one sequence carries after so many tokens.
struct StateBytes {
  static constexpr int64_t kShort = 2048;
  static constexpr int64_t kLong = 102'400;
  int64_t at_short = 0;
  int64_t at_long = 0;
  void fields(auto&& field) {
    field("2048", at_short);
    field("102400", at_long);
  }
};

// Versions by operator ("rwkv7") or mixer ("mixer mamba1"), of those that a run calls.
using Numerics = std::map<std::string, int64_t>;

// run.json
struct Provenance {
  int64_t parameters = 0;
  double flops_per_token = 0;
  StateBytes state_bytes;
  std::string device;
  std::string torch;
  std::string assay;
  std::string commit;
  std::map<std::string, std::string> paths;  // implementation, by operator
  Numerics numerics;
  std::string data;                        // fingerprint
  std::optional<int64_t> train_tokens;     // in the training text of the run's domains
  std::optional<std::string> data_folder;  // absent in the record of a run
  std::string started;
  std::string identity;
  std::string key;  // "" in the record of a run
  ASSAY_FIELDS(parameters, flops_per_token, state_bytes, device, torch, assay, commit, paths,
               numerics, data, train_tokens, data_folder, started, identity, key)
};

// Output of `assay train --dry-run --json`.
struct Estimate : Provenance {
  int64_t steps = 0;
  int64_t tokens = 0;
  double learning_rate = 0;
  double estimated_seconds = 0;          // of training and evaluations
  std::optional<double> end_seconds;     // the part of it for the evaluation after the last step
  std::optional<int64_t> longest_input;  // tokens that the model reads at most
  ASSAY_MORE_FIELDS(Provenance, steps, tokens, learning_rate, estimated_seconds, end_seconds,
                    longest_input)
};

// Means over queries; real_relation and a mean entropy are NaN where nothing can be said.
struct LayerProbe {
  int64_t layer = 0;
  std::string mixer;
  double visibility = 0;
  double uniformity = 0;
  double real_relation = 0;
  std::vector<double> attention_entropy;  // by head; empty without softmax weights
  ASSAY_FIELDS(layer, mixer, visibility, uniformity, real_relation, attention_entropy)
};
struct MeanProbe {
  double visibility = 0;
  double uniformity = 0;
  double real_relation = 0;
  double attention_entropy = 0;
  ASSAY_FIELDS(visibility, uniformity, real_relation, attention_entropy)
};
// probes.json
struct Probes {
  int64_t sequence_length = 0;
  int64_t sequences = 0;
  int64_t queries = 0;
  int64_t cotangents = 0;
  double threshold = 0;
  std::vector<LayerProbe> layers;
  MeanProbe mean;
  std::optional<int64_t> step;     // of the run
  std::optional<std::string> set;  // "arxiv.test"
  ASSAY_FIELDS(sequence_length, sequences, queries, cotangents, threshold, layers, mean, step, set)
};

// done.json
struct Outcome {
  int64_t steps = 0;
  int64_t tokens = 0;
  double seconds = 0;
  double tokens_per_second = 0;
  int64_t peak_memory_bytes = 0;
  double final_loss = 0;
  std::optional<double> held_out_loss;
  double evaluation_and_saving_seconds = 0;
  std::optional<Probes> probes;  // not in the file: a study adds it
  ASSAY_FIELDS(steps, tokens, seconds, tokens_per_second, peak_memory_bytes, final_loss,
               held_out_loss, evaluation_and_saving_seconds, probes)
};

// One element per source or document.
struct Clusters {
  std::optional<std::vector<std::string>> names;  // absent when clustered by document
  std::vector<int64_t> documents;
  std::vector<int64_t> tokens;
  std::vector<int64_t> recall_tokens;
  std::vector<double> nll;         // nats, summed
  std::vector<double> recall_nll;  // the part of nll on recall targets
  // Sum of min(loss, ln V + 3), V: size of the vocabulary. Absent in runs of earlier versions.
  std::optional<std::vector<double>> bounded_nll;
  ASSAY_FIELDS(names, documents, tokens, recall_tokens, nll, recall_nll, bounded_nll)
};
struct EndSet {
  static constexpr const char* kBySource = "source";
  static constexpr const char* kByDocument = "document";
  double loss = 0;
  double recall_loss = 0;
  double bits_per_byte = 0;
  int64_t tokens = 0;
  int64_t documents = 0;
  std::string clustered_by;
  Clusters clusters;
  ASSAY_FIELDS(loss, recall_loss, bits_per_byte, tokens, documents, clustered_by, clusters)
};
// end.json
struct End {
  int64_t step = 0;
  int64_t tokens = 0;
  std::map<std::string, EndSet> sets;
  ASSAY_FIELDS(step, tokens, sets)
};

// A line of metrics.jsonl: the mean loss over the steps after the line before, up to `step`.
struct TrainingLine {
  int64_t step = 0;
  double loss = 0;
  std::optional<int64_t> tokens;
  std::optional<double> learning_rate;
  std::optional<double> grad_norm;
  std::optional<double> tokens_per_second;
  std::optional<double> mfu;
  std::optional<double> seconds;
  std::optional<int64_t> memory_bytes;
  std::optional<double> auxiliary_loss;  // not a part of `loss`; absent if no mixer has one
  ASSAY_FIELDS(step, loss, tokens, learning_rate, grad_norm, tokens_per_second, mfu, seconds,
               memory_bytes, auxiliary_loss)
};

// Names of slices (eval/held_out.h). Every token is in one of the first three, in one of the next
// two, and in one position.
namespace slice {
inline constexpr const char* kFrequent = "frequent";
inline constexpr const char* kRare = "rare";
inline constexpr const char* kUnseen = "unseen";
inline constexpr const char* kRepeatedBigram = "repeated_bigram";
inline constexpr const char* kOther = "other";
inline constexpr const char* kAbove12Nats = "above_12_nats";
inline constexpr std::array kAll = {kFrequent,
                                    kRare,
                                    kUnseen,
                                    kRepeatedBigram,
                                    kOther,
                                    "position_0_64",
                                    "position_64_256",
                                    "position_256_1024",
                                    "position_1024_up",
                                    kAbove12Nats};
}  // namespace slice
struct Slice {
  double loss = 0;
  int64_t tokens = 0;
  double share = 0;
  ASSAY_FIELDS(loss, tokens, share)
};
// Lines that a study made from the record of a run have the loss, and the last one slices.
struct EvaluatedSet {
  double loss = 0;
  std::optional<double> bits_per_byte;
  std::optional<int64_t> tokens;
  std::optional<int64_t> documents;
  std::optional<std::map<std::string, Slice>> slices;
  ASSAY_FIELDS(loss, bits_per_byte, tokens, documents, slices)
};
using EvaluatedSets = std::map<std::string, EvaluatedSet>;  // by "arxiv.test"
using Entropies = std::vector<std::vector<double>>;         // by layer, then by head
// A line of metrics.jsonl about an evaluation.
struct EvaluationLine {
  static constexpr const char* kSets = "evaluation";  // only lines of this kind have the key
  int64_t step = 0;
  int64_t tokens = 0;
  EvaluatedSets evaluation;
  std::optional<double> held_out_loss;
  std::optional<double> train_loss;
  std::optional<Entropies> attention_entropy;
  std::optional<double> seconds;
  // Only in lines that a study made from the record of a run
  std::optional<double> smooth_training_loss;    // see training_losses
  std::optional<double> mean_attention_entropy;  // see mean_entropy_of
  void fields(auto&& field) {
    field("step", step);
    field("tokens", tokens);
    field(kSets, evaluation);
    field("held_out_loss", held_out_loss);
    field("train_loss", train_loss);
    field("attention_entropy", attention_entropy);
    field("seconds", seconds);
    field("smooth_training_loss", smooth_training_loss);
    field("mean_attention_entropy", mean_attention_entropy);
  }
};

// state.json of a checkpoint: all that a run needs, in addition to weights and moments, to continue
// as if it had never stopped. JSON holds every double as its shortest exact text.
struct TrainingState {
  int64_t step = 0;          // optimizer steps done; the data state is this one integer
  double interval_loss = 0;  // sum of losses since the last line of metrics
  std::optional<double> interval_auxiliary_loss;  // absent if no mixer has one
  int64_t interval_steps = 0;
  double evaluation_loss = 0;  // sum of losses since the last evaluation
  int64_t evaluation_steps = 0;
  double last_loss = 0;  // of the last step
  double mean_loss = 0;  // running mean that a spike is measured against
  double seconds = 0;    // of training, across restarts
  // safetensors_checksum of the two files; absent in older checkpoints
  std::optional<std::string> weights_checksum;
  std::optional<std::string> moments_checksum;
  ASSAY_FIELDS(step, interval_loss, interval_auxiliary_loss, interval_steps, evaluation_loss,
               evaluation_steps, last_loss, mean_loss, seconds, weights_checksum, moments_checksum)
};

}  // namespace assay::run
