#pragma once
// A language model: embeddings, a pattern of layers, a head. Architectures are configurations of
// it, not code.
//   x ← (norm) embed(tokens) (+ positions)
//       each layer: x ← x + mixer(norm x); x ← x + channel_mixer(norm x)
//                   of the mixers in post_norm: x ← x + norm(mixer(x)); x ← x + norm(…)
//   logits = W norm(x)
// embedding_scale and residual_scale multiply the embedding and the outputs of mixers and channel
// mixers; logit_divisor divides the logits. [Granite]
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "nn/layers.h"
#include "nn/mixer.h"

namespace assay::nn {

struct ModelConfig {
  int64_t vocab_size = 0;
  int64_t d_model = 64;
  int64_t num_layers = 2;
  std::vector<std::string> pattern = {"attention"};
  std::string channel_mixer = "geglu";
  std::string norm = "rmsnorm";
  std::vector<std::string> post_norm = {};
  double norm_eps = 1e-5;
  bool embedding_norm = false;
  double embedding_std = 0.02;
  std::string positions = "none";
  int64_t max_positions = 0;
  bool tie_embeddings = true;
  bool residual_in_fp32 = false;
  double embedding_scale = 1;
  double residual_scale = 1;
  double logit_divisor = 1;
  void fields(auto&& field) {
    field("vocab_size", vocab_size, "0: that of the data");
    field("d_model", d_model, "width of the residual stream");
    field("num_layers", num_layers, "layers");
    field("pattern", pattern, "sequence mixers, repeated over the layers");
    field("channel_mixer", channel_mixer, "feed-forward layer after each mixer, or none");
    field("norm", norm, "rmsnorm, layernorm or zero_centered_rmsnorm");
    field("post_norm", post_norm,
          "mixers whose layers normalise outputs instead of inputs, as in OLMo 2");
    field("norm_eps", norm_eps, "added to the variance");
    field("embedding_norm", embedding_norm, "a norm after the embedding too, as in RWKV");
    field("embedding_std", embedding_std, "standard deviation of the embedding's starting values");
    field("positions", positions, "learned or none (rotary positions belong to attention)");
    field("max_positions", max_positions,
          "learned positions; 0: the training's sequence_length; the model reads no longer text");
    field("tie_embeddings", tie_embeddings, "the head uses the embedding's weight");
    field("residual_in_fp32", residual_in_fp32,
          "with bf16 products: the residual stream is added in fp32, as in mamba's code");
    field("embedding_scale", embedding_scale, "multiplies what the first layer reads");
    field("residual_scale", residual_scale, "multiplies what each part of a layer adds");
    field("logit_divisor", logit_divisor, "divides the logits");
  }
};

// Everything that makes a model: its own fields and the tables of the parts its pattern names.
struct ModelSpec {
  ModelConfig config;
  // [model], with a table for each mixer and channel mixer
  ConfigNode tables;
  static ModelSpec read(const ConfigNode& model);  // BadInput on unknown names, keys, types
  std::string toml() const;                        // [model] and its tables, every default expanded
  // The part of toml() that makes the model differ from one with all defaults. A change of a
  // default therefore needs a new numerics version of the mixer, or of the model.
  std::string identity() const;
};

struct ModelState {
  std::vector<State> layers;
  int64_t position = 0;
  bool last = false;  // nothing follows: Context::last
  RowPositions rows;  // instead of `position`, for rows at positions of their own
  // Undefined, or the sum of the auxiliary losses of all layers after a piece that is trained on.
  // LanguageModel::no_auxiliary_loss() before it.
  at::Tensor auxiliary_loss;
  int64_t bytes() const;
};
// The state of sequence rows[i] of the batch as row i of a new batch; rows [N] i64 on the device of
// the state. A row may be taken several times, so that several texts go on from one context. A
// fresh state stays fresh.
ModelState select_rows(const ModelState& state, const at::Tensor& rows);
// The state of sequence b of the batch, in the memory of the batch.
ModelState row_of(const ModelState& state, int64_t b);

struct Layer : torch::nn::Module {
  Layer(const ModelSpec& spec, int64_t index);
  // x [B, T, d_model]; `dtype`: that of the input of the mixers.
  Residual forward(Residual x, State& state, at::ScalarType dtype);
  at::Tensor forward(const at::Tensor& x, State& state, at::ScalarType dtype);
  // The parts of forward() before and after `attention`; attended [B, T, H D].
  HeadwiseMixer::HeadInputs head_inputs(const at::Tensor& x, State& state, at::ScalarType dtype);
  at::Tensor after_attention(const at::Tensor& x, const at::Tensor& attended,
                             const at::Tensor& gate, State& state, at::ScalarType dtype);
  std::shared_ptr<Norm> mixer_norm;
  std::shared_ptr<Norm> channel_norm;
  // the last two null with channel_mixer = "none"
  std::shared_ptr<Mixer> mixer;
  std::shared_ptr<Mixer> channel_mixer;
  HeadwiseMixer* attention;  // the mixer, if it is one
  bool post_norm;
  double residual_scale;

 private:
  // Returns what a mixer or channel mixer with its norm adds to x. x becomes its sum.
  at::Tensor output_of(Mixer& part, const Norm& norm, Residual& x, State& state,
                       at::ScalarType dtype) const;
};

struct LanguageModel : Module {
  explicit LanguageModel(ModelSpec spec);

  // tokens [B, T] i64 → [B, T, d_model], in float32 with residual_in_fp32, else in compute_dtype:
  // what the first layer reads.
  at::Tensor embed(const at::Tensor& tokens, const ModelState& state) const;
  // Output of the last layer for tokens [B, T] i64. Reads and advances the state.
  Residual residual(const at::Tensor& tokens, ModelState& state);
  // residual() after the final norm, in product_dtype(), as the head reads it: [B, T, d_model].
  at::Tensor hidden(const at::Tensor& tokens, ModelState& state);
  // The last part of hidden(): norm and conversion of the output of the last layer.
  at::Tensor normalised(Residual output) const;
  at::ScalarType product_dtype() const;  // of the input of mixers and head
  at::Tensor logits(const at::Tensor& tokens, ModelState& state);  // [B, T, V]
  // Logits for rows of the result of hidden(): [..., d_model] → [..., V].
  at::Tensor logits_of_hidden(const at::Tensor& hidden) const;
  int64_t max_time() const;  // the longest sequence that it can read
  // Mean of −ln p(tokens[:, 1:]) over a batch [B, T + 1]; scalar. Logits are made a few rows
  // at a time.
  at::Tensor loss(const at::Tensor& tokens);
  // loss() from the result of hidden(), [B, T, d_model], and the next tokens [B, T].
  at::Tensor loss_of_hidden(const at::Tensor& hidden, const at::Tensor& targets) const;
  at::Tensor token_losses(const at::Tensor& tokens);  // [B, T] f32, no gradient
  // The terms of the sum that training minimises: loss(tokens), and the auxiliary losses of the
  // layers if a part of the model has one. [1] or [2].
  at::Tensor training_losses(const at::Tensor& tokens);
  at::Tensor no_auxiliary_loss() const;  // zero; undefined if no part has one

  double forward_flops(int64_t time);  // per token, at sequence length `time`
  int64_t parameter_count();
  // Bytes of the state of one sequence after `time` tokens, counted from the tensors of runs that
  // end at most 2,047 tokens after the longest window (or 1,024) is full. Beyond those, the growth
  // per 1,024 tokens at their end is extrapolated. This is exact for caches of keys, windows, means
  // of chunks that divide 1,024, and recurrences.
  int64_t state_bytes(int64_t time);
  const at::Tensor& head_weight() const;
  // Converts the weights of matrix products to compute_dtype once, so that no step does it again.
  // Results keep their bits. For inference: the float32 weights are gone.
  void prepare_inference();

  ModelSpec spec;
  at::ScalarType compute_dtype = at::kFloat;
  bool recompute_activations = false;  // activation checkpointing: a layer keeps its input only
  // Called after the embedding (−1) and each layer with its output, for finding where values first
  // leave the finite.
  std::function<void(int64_t layer, const at::Tensor& output)> watch;
  // Called by residual() before it reads the parameters of the embedding (−1), of each layer, and
  // of what follows the last layer (the number of layers).
  std::function<void(int64_t layer)> before;

  // [V, d_model]; [max_positions, d_model]
  at::Tensor embedding;
  at::Tensor positions;
  std::vector<std::shared_ptr<Layer>> layers;
  // the first null when not configured
  std::shared_ptr<Norm> embedding_norm;
  std::shared_ptr<Norm> norm;
  std::shared_ptr<Linear> head;  // null when tied

 private:
  at::Tensor converted_head_;  // of prepare_inference(), when tied
};

// The parts whose numerics versions decide what a step of training computes.
struct Parts {
  std::set<std::string> operators;        // ops/core/paths.h; without the optimizer's
  std::map<std::string, int64_t> mixers;  // {"mixer mamba1": 2}: those above version 1
};
// Runs one step of a model of one period of the pattern on the CPU, without the Python modules that
// need a GPU.
Parts parts_of(ModelSpec spec);

}  // namespace assay::nn
