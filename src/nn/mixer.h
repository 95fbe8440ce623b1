#pragma once
// A sequence mixer: the part of an architecture that moves information between positions.
//
// One law for every mixer: wherever a sequence is cut, the output is the same. forward() takes a
// piece of any length and the state left by the pieces before it; step() is its fast special case
// for one token. One piece is the parallel form, pieces of C the chunked form, pieces of one token
// decoding. tests/nn/mixer_forms_test.cc proves it for every entry.
#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/config.h"
#include "base/registry.h"
#include "nn/layers.h"

namespace assay::nn {

// Tensors that a mixer carries from piece to piece, by name. Empty at the start of a sequence.
class State {
 public:
  std::optional<at::Tensor> find(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? std::nullopt : std::optional(found->second);
  }
  at::Tensor& operator[](const std::string& name) { return tensors_[name]; }
  const std::map<std::string, at::Tensor>& tensors() const { return tensors_; }
  int64_t bytes() const;  // counted from the tensors, not declared

  // Tensors that earlier layers pass to later ones within one forward pass, by name (RWKV-7's first
  // values). They are not carried to the next piece, and bytes() does not count them.
  std::map<std::string, at::Tensor> handed;
  // Nothing follows this piece (a whole sequence that is trained on or scored): what it leaves
  // may be anything.
  bool last = false;

  // A loss that training adds to that of the model. It is in `handed`, summed over the layers so
  // far, while a model trains, and absent otherwise.
  static constexpr const char* kAuxiliaryLoss = "auxiliary_loss";
  bool wants_auxiliary_loss() const { return handed.contains(kAuxiliaryLoss); }
  // loss: a scalar, the mean over the tokens of the piece. Only if one is wanted.
  void add_auxiliary_loss(const at::Tensor& loss);

  // Only for a batch whose sequences are at different positions (nn/slots.h), which advances by
  // one token per step: the number of tokens that each row has read, and -1 for an unused row.
  std::vector<int64_t> positions;
  std::vector<State> rows;  // of such a batch: one state per row, for mixers with caches_per_row()
  // Tensors of such a batch on CUDA, for steps that are captured in a graph: a step reads them
  // instead of `positions` and `rows`.
  at::Tensor device_positions;  // [B] i64
  int64_t capacity = 0;         // all positions are below it
  // For mixers with caches_per_row() that can be captured, [B, n] i64: where the n tensors of
  // Mixer::caches() begin. They have room for the new token.
  at::Tensor caches;
  std::vector<at::Tensor> read_by_graph;  // other tensors that a captured step reads: kept alive

  // The tensors that only grow along time, by nn::append. What they held before stays as it was.
  std::set<std::string> appended;

 private:
  std::map<std::string, at::Tensor> tensors_;
};

// Its constructor adds projections with add_linear and other parameters with add_parameter.
struct Mixer : Module {
  // x [B, T, d_model], any T ≥ 1 → [B, T, d_model], dtype of x. Reads the state and replaces it.
  virtual at::Tensor forward(const at::Tensor& x, State& state) = 0;
  // x [B, d_model] → [B, d_model]; the same function for one token.
  virtual at::Tensor step(const at::Tensor& x, State& state) {
    return forward(x.unsqueeze(1), state).squeeze(1);
  }
  // The lengths of its tensors depend on the position, so a batch of sequences at different
  // positions keeps them in State::rows.
  virtual bool caches_per_row() const { return false; }
  // A step of sequences at positions of their own can be captured in a CUDA graph: it does not wait
  // for the device, and it reads no positions on the host. `options`: those of its input, on CUDA.
  virtual bool can_be_captured(const at::TensorOptions& /*options*/) const {
    return !caches_per_row();
  }
  // A tensor of a row that grows along time, for mixers with caches_per_row() that can be captured.
  struct Cache {
    std::string name;
    int64_t tokens = 1;  // for which it has one step
  };
  virtual std::vector<Cache> caches() const { return {{"k"}, {"v"}}; }
  // Adds, without steps, those of them that a row lacks because it has read too few tokens.
  virtual void add_missing_caches(State& /*row*/) const {}
  // Forward FLOPs per token, mean over a sequence of length `time`, without the Linear modules,
  // which the model counts once per token each.
  virtual double mixing_flops(int64_t time) const = 0;
  // The longest sequence that it can read.
  virtual int64_t max_time() const { return INT64_MAX; }
  // Positions of a window: a part of the state grows until this many were read. 0: no window.
  virtual int64_t window() const { return 0; }
  // Its forward() adds an auxiliary loss to a state that wants one.
  virtual bool has_auxiliary_loss() const { return false; }
  // For probes: softmax weights [B, H, T, T] of a whole sequence x [B, T, d_model]; undefined where
  // there are none.
  virtual at::Tensor attention_weights(const at::Tensor& /*x*/) const { return {}; }
  // Raised when starting values, learning rates or weight decay of parameters change without a
  // field of the configuration. A run's key covers it.
  virtual int numerics() const { return 1; }
};

// A mixer that reads x through one projection alone. A decode step normalises x within the kernel
// of this projection.
struct ProjectedMixer : Mixer {
  virtual Projection input_projection() const = 0;
  // The rest of forward() and of step(): of the projected x, [B, T, N] and [B, N].
  virtual at::Tensor mix(const at::Tensor& projected, State& state) = 0;
  virtual at::Tensor mix_step(const at::Tensor& projected, State& state) {
    return mix(projected.unsqueeze(1), state).squeeze(1);
  }
  at::Tensor forward(const at::Tensor& x, State& state) final {
    return mix(input_projection()(x), state);
  }
  at::Tensor step(const at::Tensor& x, State& state) final {
    return mix_step(input_projection()(x), state);
  }
};

// Where a mixer stands in its model, for those whose starting values or parts depend on it; the
// others take d_model.
struct Place {
  Place(int64_t width, int64_t index = 0, int64_t count = 1, bool is_first = true,
        int64_t residuals = 2)
      : d_model(width),
        layer(index),
        num_layers(count),
        first(is_first),
        residuals_per_layer(residuals) {}
  int64_t d_model;
  int64_t layer;
  int64_t num_layers;
  bool first;                   // no earlier layer has the same mixer
  int64_t residuals_per_layer;  // 1 where no channel mixer follows, otherwise 2
};

struct MixerEntry {
  std::shared_ptr<Mixer> (*make)(const ConfigNode& table, const Place& place);
  Fields (*fields)();                         // with the defaults; for `assay describe`
  std::string (*expand)(const ConfigNode&);   // the table with every default written out, as TOML
  std::string (*changed)(const ConfigNode&);  // the values of the table that are not the defaults
  std::string about;                          // formula and source
  std::vector<std::string> examples;          // the small configs it is tested as, as TOML
};
Registry<MixerEntry>& mixers();          // sequence mixers, one file each in mixers/
Registry<MixerEntry>& channel_mixers();  // feed-forward layers, in channel_mixers/

// const RegisterMixer<Retention> registered("retention", "S_t = γ S_{t−1} + k_t v_tᵀ [RetNet, eq.
// 5–7]", {{}, {.num_heads = 3}});
template <class M, Registry<MixerEntry>& (*registry)() = mixers>
struct RegisterMixer {
  using Config = typename M::Config;
  RegisterMixer(const std::string& name, std::string about, std::vector<Config> tested_as) {
    MixerEntry entry;
    entry.make = [](const ConfigNode& table, const Place& place) -> std::shared_ptr<Mixer> {
      if constexpr (std::is_constructible_v<M, Config, const Place&>)
        return std::make_shared<M>(read(table), place);
      else return std::make_shared<M>(read(table), place.d_model);
    };
    entry.fields = [] {
      static Config defaults;
      return fields_of(defaults);
    };
    entry.expand = [](const ConfigNode& table) {
      Config config = read(table);
      return to_toml(fields_of(config));
    };
    entry.changed = [](const ConfigNode& table) {
      Config config = read(table);
      return to_toml(changed_fields(config));
    };
    entry.about = std::move(about);
    for (Config& config : tested_as) entry.examples.push_back(to_toml(fields_of(config)));
    registry().add(name, std::move(entry));
  }
  static Config read(const ConfigNode& table) {
    Config config;
    table.read(config);
    return config;
  }
};
template <class M>
using RegisterChannelMixer = RegisterMixer<M, channel_mixers>;

}  // namespace assay::nn
