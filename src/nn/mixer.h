#pragma once
// A sequence mixer: the part of an architecture that moves information between positions.
//
// One law for every mixer: wherever a sequence is cut, the output is the same. forward() takes a
// piece of any length and the state left by the pieces before it. One piece is the parallel form,
// pieces of C the chunked form, pieces of one token decoding. tests/nn/mixer_forms_test.cc proves
// it for every entry.
#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/registry.h"
#include "nn/cache.h"
#include "nn/layers.h"

namespace assay::nn {

// Its constructor adds projections with add_linear and other parameters with add_parameter.
struct Mixer : Module {
  // x [B, T, d_model], any T ≥ 1 → [B, T, d_model], dtype of x. Reads the state and replaces it.
  // Rows at positions of their own come along time, [1, B, d_model], to a mixer with caches, and as
  // a batch, [B, 1, d_model], to others.
  virtual at::Tensor forward(const at::Tensor& x, State& state) = 0;
  // A step of sequences at positions of their own can be captured in a CUDA graph: it does not wait
  // for the device, and reads no positions on the host. It reads the caches of all rows through
  // State::Rows::addresses. `options`: those of its input, on CUDA.
  virtual bool can_be_captured(const at::TensorOptions& /*options*/) const {
    return caches_.empty();
  }
  // Forward FLOPs per token, mean over a sequence of length `time`, without the Linear modules,
  // which the model counts once per token each.
  virtual double mixing_flops(int64_t time) const = 0;
  // The longest sequence that it can read.
  virtual int64_t max_time() const { return INT64_MAX; }
  // Its forward() adds an auxiliary loss to a state that wants one.
  virtual bool has_auxiliary_loss() const { return false; }
  // For probes: softmax weights [B, H, T, T] of a whole sequence x [B, T, d_model]; undefined where
  // there are none.
  virtual at::Tensor attention_weights(const at::Tensor& /*x*/) const { return {}; }
  // Raised when starting values, learning rates or weight decay of parameters, or results by more
  // than rounding, change without a field of the configuration. A run's key covers it.
  virtual int numerics() const { return 1; }

  const std::vector<Cache>& caches() const { return caches_; }
  // Positions of the longest window of a cache, which grows until so many were read. 0: no window.
  int64_t window() const;

 protected:
  // For the constructor: a part of the state whose length depends on the position.
  Cache add_cache(const std::string& name, CacheOptions options = {}) {
    return caches_.emplace_back(name, std::move(options));
  }

 private:
  std::vector<Cache> caches_;
};

// A mixer that reads x through one projection alone. A decode step normalises x within the kernel
// of this projection.
struct ProjectedMixer : Mixer {
  virtual Projection input_projection() const = 0;
  // The rest of forward(), of the projected x [B, T, N].
  virtual at::Tensor mix(const at::Tensor& projected, State& state) = 0;
  at::Tensor forward(const at::Tensor& x, State& state) final {
    return mix(input_projection()(x), state);
  }
};

// A mixer implements this, too, if it is attention whose heads need nothing of one another. So a
// process can attend with some heads over the whole sequence, although it computes everything else
// for a slice of it (nn/context.h).
struct HeadwiseMixer {
  using HeadList = std::vector<at::Tensor>;
  struct HeadInputs {
    // [B, T, heads, …] of each token: queries [B, T, H, D] first, then keys, values and others,
    // each with as many heads as it has.
    HeadList heads;
    at::Tensor gate;  // of output(); undefined without one
  };
  virtual ~HeadwiseMixer() = default;
  // Returns what attention reads of the mixer's input x [B, T, d_model], whose first token is at
  // `position`.
  virtual HeadInputs head_inputs(const at::Tensor& x, int64_t position, State& state) const = 0;
  virtual size_t num_head_inputs() const { return 3; }  // tensors in HeadInputs::heads
  // Whether the results of `parts` equal parts of the heads, side by side, are those of all heads.
  virtual bool divides_heads(int64_t parts) const = 0;
  // The number of earlier tokens whose keys and values a token reads, if it is the same for all
  // tokens and HeadInputs::heads are queries, keys and values; otherwise −1.
  virtual int64_t reach() const { return -1; }
  // Attention of a whole sequence with an equal part of the heads of each tensor, the first query
  // head being `first`, or of a slice, whose keys and values begin up to reach() tokens earlier.
  // → [B, T, heads, D]
  virtual at::Tensor attend_whole(const HeadList& heads, int64_t first) = 0;
  // Output of the mixer [B, T, d_model] from that of attention [B, T, H D].
  virtual at::Tensor output(const at::Tensor& y, const at::Tensor& gate) const = 0;
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
