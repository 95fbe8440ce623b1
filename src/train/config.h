#pragma once
// Table [train] of a configuration. Every run records it with all defaults written out.
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"

namespace assay::train {

struct TrainConfig {
  int64_t steps = 0;
  int64_t tokens = 0;
  int64_t batch_size = 8;
  int64_t micro_batch_size = 0;
  int64_t gradient_slices = 0;
  int64_t sequence_length = 256;
  int64_t context_slices = 1;
  double learning_rate = 1e-3;
  int64_t warmup_steps = 0;
  double warmup_fraction = 0;
  std::string schedule = "linear";
  double final_learning_rate = 0;
  double decay_fraction = 0.2;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;
  double clip = 1;
  int64_t seed = 0;
  std::vector<std::string> domains;
  std::vector<std::string> eval_sets;
  std::vector<double> weights;
  int64_t eval_every = 0;
  int64_t eval_tokens = 0;
  int64_t end_tokens = 0;
  int64_t checkpoint_every = 0;
  int64_t log_every = 0;
  std::vector<int64_t> keep_steps;
  std::string precision = "auto";
  bool recompute_activations = false;
  double spike = 3;
  void fields(auto&& field) {
    field("steps", steps, "optimizer steps; give steps or tokens");
    field("tokens", tokens, "training tokens, rounded up to whole steps");
    field("batch_size", batch_size, "sequences per step");
    field("micro_batch_size", micro_batch_size,
          "sequences per forward pass; gradients are summed over a step; 0: those of a slice");
    field("gradient_slices", gradient_slices,
          "equal parts of a batch whose gradients are summed in a fixed order; "
          "ranks that share them give the same bits; 0: one per rank");
    field("sequence_length", sequence_length, "tokens per sequence");
    field("context_slices", context_slices,
          "equal consecutive parts of every sequence; ranks can share them");
    field("learning_rate", learning_rate, "peak value");
    field("warmup_steps", warmup_steps, "steps of linear warm-up from 0");
    field("warmup_fraction", warmup_fraction,
          "share of the steps; sets warmup_steps when that is 0");
    field("schedule", schedule,
          "after the warm-up: linear, cosine, wsd (constant, then linear decay) or constant");
    field("final_learning_rate", final_learning_rate,
          "after the last step, as a share of the peak");
    field("decay_fraction", decay_fraction, "wsd: share of the steps that decay");
    field("beta1", beta1, "AdamW");
    field("beta2", beta2, "AdamW");
    field("epsilon", epsilon, "AdamW");
    field("weight_decay", weight_decay,
          "decoupled, on matrices, short convolutions and embeddings");
    field("clip", clip, "largest norm of the gradient; 0: none");
    field("seed", seed, "of weights and data order");
    field("domains", domains, "trained on; empty: all of the store");
    field("weights", weights, "of the domains; empty: by their tokens");
    field("eval_sets", eval_sets, "DOMAIN.SPLIT; empty: valid of the trained domains, test of all");
    field("eval_every", eval_every, "steps between evaluations; 0: twenty evaluations per run");
    field("eval_tokens", eval_tokens,
          "tokens per set and evaluation; 0: set so that evaluation takes 3 % of the run");
    field("end_tokens", end_tokens,
          "tokens per set in the evaluation at the end of the run; 0: all of them");
    field("checkpoint_every", checkpoint_every,
          "steps between checkpoints; 0: first after 30 s, then saving takes 2 % of the time");
    field("log_every", log_every, "steps per line of metrics.jsonl; 0: two hundred lines per run");
    field("keep_steps", keep_steps,
          "checkpoints that are never removed; the newest two always stay");
    field("precision", precision,
          "bf16, fp32, fp64 or auto (bf16 on CUDA, fp32 on CPU); weights and moments stay fp32, "
          "or fp64 with fp64");
    field("recompute_activations", recompute_activations,
          "activation checkpointing: less memory, a third more time");
    field("spike", spike, "nats above the running mean of the loss that stop a run; 0: never");
  }

  // Checks ranges and fills what follows from the rest (steps, intervals). BadInput names the key
  // and its place.
  void complete(const ConfigNode& table, int64_t ranks = 1);
  std::string toml() const;
  int64_t warmup_steps_of_fraction() const {
    constexpr double kRounding = 1e-12;  // 0.29 · 100 is below 29 in floating point
    return int64_t(warmup_fraction * double(steps) * (1 + kRounding));
  }
  // As versions before 26 November 2026 rounded it. Runs with it can be resumed.
  int64_t earlier_warmup_steps() const { return int64_t(warmup_fraction * double(steps)); }
  int64_t tokens_per_step() const { return batch_size * sequence_length; }
};

// The [train] that a model was trained with, from the config.toml of its run: `model` is a run or a
// checkpoint of one. Nothing for other models.
std::optional<TrainConfig> train_config_of(const std::filesystem::path& model);

// Learning rate of step 0 … steps − 1.
double learning_rate_at(const TrainConfig& config, int64_t step);

}  // namespace assay::train
