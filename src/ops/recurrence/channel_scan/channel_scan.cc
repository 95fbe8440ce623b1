// The autograd function around the CUDA kernels, and the composed form of Update::decay.
#include "ops/recurrence/channel_scan/channel_scan.h"

#include <torch/torch.h>

#include "ops/core/asynchronous.h"
#include "ops/core/dispatch.h"
#include "ops/core/split.h"
#include "ops/recurrence/checkpointed_scan.h"
#include "ops/recurrence/recurrence_reference.h"

namespace assay::ops {
namespace {

at::ScalarType dtype_of(const ChannelScan& s) {
  return sequence_dtype({s.x, s.delta, s.k, s.q, or_undefined(s.z)});
}

bool is_recorded(const ChannelScan& s) {
  return wants_gradient({s.x, s.delta, s.k, s.q, s.rate, or_undefined(s.D), or_undefined(s.z),
                         or_undefined(s.delta_bias), or_undefined(s.initial_state)});
}

// h_t = decay_t ⊙ h_{t−1} + input_t along dimension 1, h_{−1} = first.       [Hillis & Steele 1986]
at::Tensor prefixes(at::Tensor decay, at::Tensor input, const at::Tensor& first) {
  const int64_t time = decay.size(1);
  // pairs now cover `reach` steps, then twice as many
  for (int64_t reach = 1; reach < time; reach *= 2) {
    const at::Tensor later = decay.slice(1, reach);
    input = at::cat({input.slice(1, 0, reach),
                     at::addcmul(input.slice(1, reach), later, input.slice(1, 0, time - reach))},
                    1);
    decay = at::cat({decay.slice(1, 0, reach), later * decay.slice(1, 0, time - reach)}, 1);
  }
  return at::addcmul(input, decay, first.unsqueeze(1));
}

}  // namespace

bool on_token_kernel(const ChannelScan& s) {
  return on_gpu(s.x.device()) && dtype_of(s) != at::kDouble && s.k.size(-1) <= kMaxTokenStates;
}

bool in_few_steps(const ChannelScan& s) {
  const int64_t groups = s.k.dim() == 4 ? s.k.size(2) : 1;
  return on_gpu(s.x.device()) && dtype_of(s) != at::kDouble && s.k.size(-1) <= kMaxDecodeStates &&
         (groups == 1 || s.x.size(2) / groups % 32 == 0) && s.x.size(1) <= kMaxTokenDecodeSteps &&
         !is_recorded(s);
}

std::string token_kernel_path(const std::string& otherwise) {
  return kCudaKernels
             ? "cuda kernel sm_90a or compute_80 for float32 and bfloat16 and a state_size up to " +
                   std::to_string(kMaxTokenStates) + "; else " + otherwise
             : otherwise;
}

std::tuple<at::Tensor, at::Tensor> by_prefixes(const ChannelScan& s) {
  const auto real = real_dtype(dtype_of(s));
  const int64_t groups = s.k.dim() == 4 ? s.k.size(2) : 1;
  const int64_t width = s.x.size(2) / groups;
  const int64_t N = s.k.size(-1);
  auto of_groups = [](const at::Tensor& x) { return x.dim() == 3 ? x.unsqueeze(2) : x; };
  // Inside, all are [B, t, groups, channels of a group, N].
  const Piece piece = [=](const std::vector<at::Tensor>& part, const at::Tensor& state) {
    const auto by_group = [&](const at::Tensor& x, int64_t dim) {
      return x.unflatten(dim, {groups, width});
    };
    const at::Tensor step = by_group(part[1], 2);
    const at::Tensor decay = at::exp(step.unsqueeze(-1) * part[4].to(real));
    const at::Tensor input =
        (step * by_group(part[0], 2)).unsqueeze(-1) * part[2].to(real).unsqueeze(3);
    const at::Tensor states = prefixes(decay, input, by_group(state, 1));
    return std::tuple(at::matmul(states, part[3].to(real).unsqueeze(-1)).squeeze(-1).flatten(2),
                      states.select(1, -1).flatten(1, 2));
  };
  // once: the gradients of both its uses are added before they are rounded
  const at::Tensor x = s.x.to(real);
  at::Tensor step = s.delta.to(real);
  if (s.delta_bias) step = step + s.delta_bias->to(real);
  if (s.delta_softplus) step = at::softplus(step);
  const at::Tensor rate = s.rate.dim() == 2 ? s.rate.reshape({1, 1, groups, width, N})
                                            : s.rate.unsqueeze(2).unsqueeze(2);
  auto [y, last] = scan_with_recompute(
      piece, {x, step, of_groups(s.k), of_groups(s.q), rate},
      first_state(s.initial_state, {x.size(0), x.size(2), N}, real, x), x.size(1), 64);
  if (s.D) y = y + s.D->to(real) * x;
  if (s.z) y = y * at::silu(s.z->to(real));
  // `last` alone, not as a part of all states
  return {y.to(s.x.scalar_type()), last.contiguous()};
}

#ifdef ASSAY_CUDA

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

enum Input { kX, kDelta, kK, kQ, kRate, kD, kZ, kBias, kState, kInputs };
// as the kernels want them; what is absent is undefined
using Inputs = std::array<at::Tensor, kInputs>;

const float* floats(const at::Tensor& x) { return static_cast<const float*>(data(x)); }
float* written(const at::Tensor& x) { return static_cast<float*>(data(x)); }

ChannelScanForward describe(const Inputs& in, Update update, bool delta_softplus) {
  ChannelScanForward p{kernel_dtype(in[kX].scalar_type()), update};
  p.batch = in[kX].size(0);
  p.time = in[kX].size(1);
  p.channels = in[kX].size(2);
  p.state_size = in[kK].size(-1);
  p.delta_softplus = delta_softplus;
  p.x = view(in[kX]);
  p.delta = view(in[kDelta]);
  p.k = view(in[kK]);
  p.q = view(in[kQ]);
  p.rate = view(in[kRate]);
  p.rate_of_channels = in[kRate].defined() && in[kRate].dim() == 2;
  p.groups = in[kK].dim() == 4 ? in[kK].size(2) : 1;
  p.z = view(in[kZ]);
  p.D = floats(in[kD]);
  p.delta_bias = floats(in[kBias]);
  p.initial_state = floats(in[kState]);
  return p;
}

template <class Work>  // ChannelScanForward or …Backward
void launch(const Work& work, const at::Device& device) {
  const c10::DeviceGuard guard(device);
  const at::Tensor scratch = workspace(cuda::workspace_bytes(work), device);
  cuda::channel_scan(work, scratch.data_ptr(), current_stream(device));
}

struct ByTokenKernel : torch::autograd::Function<ByTokenKernel> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& delta,
                               const at::Tensor& k, const at::Tensor& q, const OptionalTensor& rate,
                               const OptionalTensor& D, const OptionalTensor& z,
                               const OptionalTensor& delta_bias, const OptionalTensor& state,
                               int64_t update, bool delta_softplus, bool keeps) {
    const Inputs in{x,
                    delta,
                    k,
                    q,
                    or_undefined(rate),
                    or_undefined(D),
                    or_undefined(z),
                    or_undefined(delta_bias),
                    or_undefined(state)};
    ChannelScanForward p = describe(in, Update(update), delta_softplus);
    const auto real = x.options().dtype(at::kFloat);
    const at::Tensor y = at::empty(x.sizes(), x.options());
    const at::Tensor last = at::empty({p.batch, p.channels, p.state_size}, real);
    at::Tensor chunk_states;
    if (keeps) chunk_states = at::empty({cuda::chunk_states(p)}, real);
    p.y = view(y);
    p.final_state = written(last);
    p.chunk_states = written(chunk_states);
    launch(p, x.device());
    if (keeps) {
      variable_list saved(in.begin(), in.end());
      saved.push_back(chunk_states);
      ctx->save_for_backward(saved);
    }
    ctx->saved_data["update"] = update;
    ctx->saved_data["delta_softplus"] = delta_softplus;
    ctx->set_materialize_grads(false);
    return {y, last};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    Inputs in;
    Inputs out;
    std::copy_n(saved.begin(), size_t{kInputs}, in.begin());
    ChannelScanBackward work{describe(in, Update(ctx->saved_data["update"].toInt()),
                                      ctx->saved_data["delta_softplus"].toBool())};
    work.forward.chunk_states = written(saved[kInputs]);
    for (int i = 0; i < kInputs; ++i)
      if (in[i].defined())  // sums over channels, batch or time in float32
        out[i] = i == kK || i == kQ ? at::empty(in[i].sizes(), in[i].options().dtype(at::kFloat))
                                    : gradient_memory(in[i]);
    const at::Tensor dy = gradients[0].defined() ? gradients[0].contiguous()
                                                 : at::zeros(in[kX].sizes(), in[kX].options());
    const at::Tensor dlast = gradients[1].defined() ? gradients[1].contiguous() : at::Tensor();
    work.dy = view(dy);
    work.dfinal_state = floats(dlast);
    work.dx = view(out[kX]);
    work.ddelta = view(out[kDelta]);
    work.dz = view(out[kZ]);
    work.dk = written(out[kK]);
    work.dq = written(out[kQ]);
    work.drate = written(out[kRate]);
    work.dD = written(out[kD]);
    work.ddelta_bias = written(out[kBias]);
    work.dinitial_state = written(out[kState]);
    launch(work, dy.device());
    for (const Input i : {kK, kQ}) out[i] = out[i].to(in[i].scalar_type());
    variable_list result(out.begin(), out.end());
    result.resize(kInputs + 3);  // update, delta_softplus and keeps have none
    return result;
  }
};

at::ScalarType read_as(const at::Tensor& x) {
  return x.scalar_type() == at::kBFloat16 ? at::kBFloat16 : at::kFloat;
}

// Steps' arguments as their kernel reads them; `kept` holds what had to be copied.
struct StepArguments {
  std::vector<at::Tensor> kept;
  TypedView of_sequence(const OptionalTensor& x) {
    if (!x || !x->defined()) return {};
    kept.push_back(sequence(x, read_as(*x)));
    return {view(kept.back()), kernel_dtype(read_as(*x))};
  }
  TypedView of_parameter(const OptionalTensor& x) {
    if (!x || !x->defined()) return {};
    kept.push_back(parameter(x, read_as(*x)));
    return {{data(kept.back())}, kernel_dtype(read_as(*x))};
  }
};

std::tuple<at::Tensor, at::Tensor> decode(const ChannelScan& s) {
  const c10::DeviceGuard guard(s.x.device());
  const bool by_head = s.rate.defined() && s.rate.dim() == 1;
  const bool by_channel = s.rate.defined() && s.rate.dim() == 2;
  const at::Tensor first = parameter(s.initial_state, at::kFloat);
  StepArguments as_read;
  TokenSteps p{
      .update = s.update, .batch = s.x.size(0), .time = s.x.size(1), .channels = s.x.size(2)};
  p.state_size = s.k.size(-1);
  p.head_dim = s.head_dim;
  p.groups = s.k.dim() == 4 ? s.k.size(2) : 1;
  p.delta_softplus = s.delta_softplus;
  p.x = as_read.of_sequence(s.x);
  p.delta = as_read.of_sequence(s.delta);
  p.k = as_read.of_sequence(s.k);
  p.q = as_read.of_sequence(s.q);
  p.z = as_read.of_sequence(s.z);
  p.rate = by_head || by_channel ? as_read.of_parameter(s.rate) : as_read.of_sequence(s.rate);
  p.rate_channel_stride = by_channel ? p.state_size : 0;
  p.rate_of_heads = by_head;
  p.D = as_read.of_parameter(s.D);
  p.delta_bias = as_read.of_parameter(s.delta_bias);
  p.initial_state = floats(first);
  const at::Tensor y = at::empty(s.x.sizes(), s.x.options().dtype(read_as(s.x)));
  const at::Tensor last =
      first.defined()
          ? next_state(first).view({p.batch, p.channels, p.state_size})
          : at::empty({p.batch, p.channels, p.state_size}, s.x.options().dtype(at::kFloat));
  p.y = {view(y), p.x.dtype};
  p.final_state = written(last);
  cuda::decode(p, current_stream(s.x.device()));
  return {y.to(s.x.scalar_type()), last};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> by_token_kernel(const ChannelScan& s) {
  if (in_few_steps(s)) return decode(s);
  const auto dtype = dtype_of(s);
  const Inputs in{sequence(s.x, dtype),
                  sequence(s.delta, dtype),
                  sequence(s.k, dtype),
                  sequence(s.q, dtype),
                  s.rate.defined() && s.rate.dim() == 2 ? parameter(s.rate, at::kFloat)
                                                        : sequence(s.rate, at::kFloat),
                  parameter(s.D, at::kFloat),
                  sequence(s.z, dtype),
                  parameter(s.delta_bias, at::kFloat),
                  parameter(s.initial_state, at::kFloat)};
  const variable_list out = ByTokenKernel::apply(
      in[kX], in[kDelta], in[kK], in[kQ], optional(in[kRate]), optional(in[kD]), optional(in[kZ]),
      optional(in[kBias]), optional(in[kState]), int64_t(s.update), s.delta_softplus,
      is_recorded(s));
  return {out[0].to(s.x.scalar_type()), out[1]};
}

#else

std::tuple<at::Tensor, at::Tensor> by_token_kernel(const ChannelScan&) {
  throw Unsupported("channel_scan: built without CUDA");
}

#endif

}  // namespace assay::ops
