#pragma once
// Costs of an architecture. Each figure is counted, or measured on the device that is used.
#include <c10/core/Device.h>

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "base/config.h"

namespace assay::bench {

struct ModelBench {
  // Batch and length of a step and of the FLOPs; vocabulary of models that do not set one
  int64_t batch = 1;
  int64_t time = 2048;
  int64_t vocabulary = 32000;
  int64_t steps = 3;  // timed, after one that warms up; 0: none
  // Sequences of a decoding step that is timed; 0: none
  int64_t decode = 0;
  // Tokens of prompts that so many sequences read, and tokens that they then generate; prompt 0:
  // none. This takes the place of the decoding step.
  int64_t prompt = 0;
  int64_t generate = 5000;
  int64_t largest = 200'000'000;                         // parameters of a model that is timed
  std::vector<int64_t> state_lengths = {2048, 100'000};  // tokens
  std::string precision = "auto";
  std::string full_attention = "deterministic";  // ops::choose_full_attention
  bool recompute_activations = false;
  bool profile = false;  // one step more, by operator and kernel
};

// model: the [model] table.
// {"parameters"         trained numbers
//  "flops_per_token"    of a forward at length `time`: two for each weight of the projections and
//  of the head, and what
//                       each mixer's mixing_flops says; norms, gates and the embedding
//                       are not counted
//  "state_bytes"        {"2048": …}: of one sequence, counted from
//  its tensors (LanguageModel::state_bytes)
//  "operators"          {op: path} that its layers call; torch's own are not listed
//  "seconds_per_step", "tokens_per_second", "peak_memory_bytes"
//      median of whole training steps (forward, backward,
//                       AdamW) on random tokens; null where not timed, and "failure" says why}
// With `decode` also "decode", one step of so many sequences after `time` tokens each: {"seconds"
// (on CUDA of a captured graph), "bytes": the state before it, what it allocated and wrote of it,
// and the weights in the model's precision, "bytes_per_second" of a large copy, "seconds_per_token"
// of nn::generate with such prompts, where a token is one per sequence}. With `prompt` instead
// "generation", of one call of nn::generate after a shorter one that warms up: {"prompt_seconds",
// "seconds" of the tokens after the first one, "prompt_tokens_per_second", "tokens_per_second",
// "total_seconds"}, and "peak_memory_bytes" of it. With `profile` also
// "profile", of one training step or, without them, one decode step, most time first: [{"op",
// "kernel", "calls", "seconds"}, …] (bench/profile.h). Memory that runs out, or a shape that an
// operator refuses, is a "failure", with what was counted before. BadInput on a model that cannot
// be read.
nlohmann::json bench_model(const ConfigNode& model, const ModelBench& options, c10::Device device);

}  // namespace assay::bench
