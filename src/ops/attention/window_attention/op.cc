// assay::window_attention: checks, the choice of the path, and the autograd function around
// the kernels.
#include <torch/torch.h>

#include <atomic>

#include "ops/attention/window_attention/flash.h"
#include "ops/attention/window_attention/kernel.h"
#include "ops/attention/window_attention/window_attention.h"
#include "ops/core/dispatch.h"
#include "ops/core/register.h"
#include "ops/core/split.h"
#include "ops/core/tensors.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "window_attention";

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

WindowAttentionForward describe(const WindowInputs& in, const at::Tensor& out,
                                const at::Tensor& logsumexp) {
  WindowAttentionForward p{kernel_dtype(in.q.scalar_type()),
                           in.q.size(0),
                           in.q.size(1),
                           in.k.size(1),
                           in.q.size(2),
                           in.k.size(2),
                           in.q.size(3),
                           in.window,
                           in.scale};
  p.q = view(in.q);
  p.k = view(in.k);
  p.v = view(in.v);
  p.alibi_slopes = data(in.slopes);
  p.decay_sums = data(in.decay_sums);
  p.out = view(out);
  p.logsumexp = data(logsumexp);
  return p;
}

template <class Work>  // WindowAttentionForward or …Backward
void launch(const Work& work, const at::Device& device) {
  const auto scratch = [&](size_t bytes) { return workspace(bytes, device); };
  dispatch(
      device,
      [&](const auto& pool) {
        cpu::window_attention(work, scratch(cpu::workspace_bytes(work)).data_ptr(), pool);
      },
      [&](auto stream) {
        cuda::window_attention(work, scratch(cuda::workspace_bytes(work)).data_ptr(), stream);
      });
}

at::TensorOptions real_options(const at::Tensor& q) {
  return q.options().dtype(real_dtype(q.scalar_type()));
}

// Adds the sink of each head to the softmax that gave out [B, T, H, D] and logsumexp [B, H, T]. The
// backward kernels read only these two, so they need not know of sinks.
void add_sinks(const at::Tensor& out, const at::Tensor& logsumexp, const at::Tensor& sinks) {
  const at::Tensor all = at::logaddexp(logsumexp, sinks.unsqueeze(-1));
  out.mul_((logsumexp - all).exp_().transpose(1, 2).unsqueeze(-1));
  logsumexp.copy_(all);
}
// The weight of a sink is exp(sink − logsumexp), and its value is zero.
at::Tensor gradient_of_sinks(const at::Tensor& sinks, const at::Tensor& logsumexp,
                             const at::Tensor& out, const at::Tensor& dout) {
  const at::Tensor product = (dout.to(logsumexp.scalar_type()) * out).sum(-1);
  const at::Tensor weight = (sinks.unsqueeze(-1) - logsumexp).exp_();
  return -(weight * product.transpose(1, 2)).sum(at::IntArrayRef{0, 2});
}

// out and logsumexp, by a kernel of this folder.
std::tuple<at::Tensor, at::Tensor> by_own_kernel(const WindowInputs& in) {
  const at::Tensor out = at::empty(in.q.sizes(), in.q.options());
  const at::Tensor logsumexp =
      at::empty({in.q.size(0), in.q.size(2), in.q.size(1)}, real_options(in.q));
  launch(describe(in, out, logsumexp), in.q.device());
  return {out, logsumexp};
}

// FlashAttention-2 would round it to bf16, and errors add up along time.
at::Tensor gradient_of_decay_sums(const WindowInputs& in, const at::Tensor& out,
                                  const at::Tensor& logsumexp, const at::Tensor& dout) {
  const at::Tensor delta = (dout.to(at::kFloat) * out).sum(-1).transpose(1, 2).contiguous();
  const at::Tensor gradient = at::empty_like(in.decay_sums);
  WindowAttentionBackward work{describe(in, out, logsumexp), view(dout)};
  work.ddecay_sums = data(gradient);
  dispatch(
      in.q.device(), [](const auto&) { fail("window_attention: FlashAttention-2 needs a GPU"); },
      [&](auto stream) {
        cuda::decay_gradients(work, static_cast<const float*>(data(delta)), stream);
      });
  return gradient;
}
const char* why_no_decay_gradients(const WindowInputs& in) {
  if constexpr (kCudaKernels) return cuda::why_no_decay_gradients(describe(in, {}, {}));
  return "were not built";
}

struct WindowAttention : torch::autograd::Function<WindowAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const OptionalTensor& slopes,
                            const OptionalTensor& sinks, const OptionalTensor& decay_sums,
                            int64_t window, double scale, bool flash) {
    const WindowInputs in{q, k, v, or_undefined(slopes), or_undefined(decay_sums), window, scale};
    const auto [out, logsumexp] = flash ? window_attention_flash(in) : by_own_kernel(in);
    if (sinks) add_sinks(out, logsumexp, *sinks);
    ctx->save_for_backward(
        {q, k, v, in.slopes, in.decay_sums, out, logsumexp, or_undefined(sinks)});
    ctx->saved_data["window"] = window;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["flash"] = flash;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list s = ctx->get_saved_variables();
    const WindowInputs in{s[0],
                          s[1],
                          s[2],
                          s[3],
                          s[4],
                          ctx->saved_data["window"].toInt(),
                          ctx->saved_data["scale"].toDouble()};
    const bool cpu = in.q.is_cpu();
    const at::Tensor dout = aligned_rows(sequence(gradients[0], in.q.scalar_type()));
    const at::Tensor dsinks =
        s[7].defined() ? gradient_of_sinks(s[7], s[6], s[5], dout) : at::Tensor();
    if (ctx->saved_data["flash"].toBool()) {
      const auto [dq, dk, dv] = window_attention_flash_backward(in, s[5], s[6], dout);
      const at::Tensor dsums =
          in.decay_sums.defined() ? gradient_of_decay_sums(in, s[5], s[6], dout) : at::Tensor();
      return {dq, dk, dv, {}, dsinks, dsums, {}, {}, {}};
    }
    const at::Tensor dq = gradient_memory(in.q);
    const auto of_keys = [&](const at::Tensor& x) {
      return cpu ? at::empty(x.sizes(), real_options(x)) : gradient_memory(x);
    };
    const at::Tensor dk = of_keys(in.k);
    const at::Tensor dv = of_keys(in.v);
    const at::Tensor dslopes =
        cpu && in.slopes.defined() ? at::empty_like(in.slopes) : at::Tensor();
    const at::Tensor dsums = in.decay_sums.defined() ? at::empty_like(in.decay_sums) : at::Tensor();
    launch(WindowAttentionBackward{describe(in, s[5], s[6]), view(dout), view(dq), view(dk),
                                   view(dv), data(dslopes), data(dsums)},
           in.q.device());
    const auto dtype = in.k.scalar_type();
    return {dq, dk.to(dtype), dv.to(dtype), dslopes, dsinks, dsums, {}, {}, {}};
  }
};

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t window,
           double scale, const OptionalTensor& slopes, const OptionalTensor& sinks,
           const OptionalTensor& decay_sums) {
  check_dims(kOp, "q", q, 4, "[B, T, H, D]");
  check_dims(kOp, "k", k, 4, "[B, S, Hkv, D]");
  check_shape(kOp, "k", k, {q.size(0), k.size(1), k.size(2), q.size(3)}, "[B, S, Hkv, D]");
  TORCH_CHECK_VALUE(k.size(1) >= q.size(1), kOp, ": k has ", k.size(1),
                    " positions (its size 1), fewer than the ", q.size(1), " queries of q");
  TORCH_CHECK_VALUE(q.size(2) % k.size(2) == 0, kOp, ": k has ", k.size(2),
                    " heads (its size 2), which do not divide the ", q.size(2), " heads of q");
  check_shape(kOp, "v", v, k.sizes(), "[B, S, Hkv, D]");
  if (slopes) check_shape(kOp, "alibi_slopes", *slopes, {q.size(2)}, "[H]");
  if (sinks) check_shape(kOp, "sinks", *sinks, {q.size(2)}, "[H]");
  if (decay_sums)
    check_shape(kOp, "decay_sums", *decay_sums, {q.size(0), k.size(1), q.size(2)}, "[B, S, H]");
  TORCH_CHECK_VALUE(window == -1 || window > 0, kOp, ": window is ", window,
                    ", expected at least 1, or -1 for all");
  TORCH_CHECK_VALUE(std::isfinite(scale), kOp, ": scale is ", scale, ", expected a finite number");
  check_like(kOp, "q", q, "q", q);
  check_like(kOp, "k", k, "q", q);
  check_like(kOp, "v", v, "q", q);
  if (slopes) check_like(kOp, "alibi_slopes", *slopes, "q", q);
  if (sinks) check_like(kOp, "sinks", *sinks, "q", q);
  if (decay_sums) check_like(kOp, "decay_sums", *decay_sums, "q", q);
}

bool constant(const OptionalTensor& slopes) {
  return !slopes || !slopes->requires_grad() || !at::GradMode::is_enabled();
}

std::atomic<bool> own_kernel_chosen = true;  // choose_full_attention()
bool own_kernel_serves(const WindowInputs& in) {
  if (in.q.is_cpu()) return true;
#ifdef ASSAY_CUDA
  if (!on_hopper(in.q.device()) || !own_kernel_chosen) return false;
  const c10::DeviceGuard guard(in.q.device());
  return !cuda::why_unsupported(describe(in, {}, {}));
#else
  return false;
#endif
}

}  // namespace

at::Tensor window_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            int64_t window, double scale, const OptionalTensor& alibi_slopes,
                            const OptionalTensor& sinks, const OptionalTensor& decay_sums) {
  check(q, k, v, window, scale, alibi_slopes, sinks, decay_sums);
  if (q.is_meta()) return at::empty(q.sizes(), q.options());
  if (window < 0) window = k.size(1);
  const auto dtype = sequence_dtype({q, k, v});
  const at::Tensor qs = aligned_rows(sequence(q, dtype));
  const at::Tensor ks = aligned_rows(sequence(k, dtype));
  const at::Tensor vs = aligned_rows(sequence(v, dtype));
  const OptionalTensor slopes = optional(parameter(alibi_slopes, real_dtype(dtype)));
  const OptionalTensor real_sinks = optional(parameter(sinks, real_dtype(dtype)));
  const OptionalTensor sums = optional(parameter(decay_sums, real_dtype(dtype)));
  const WindowInputs in{qs, ks, vs, or_undefined(slopes), or_undefined(sums), window, scale};
  const auto by = [&](bool flash) {
    return WindowAttention::apply(qs, ks, vs, slopes, real_sinks, sums, window, scale, flash);
  };
  // No kernel on GPUs gives slopes a gradient.
  const bool serves = q.is_cpu() || constant(slopes);
  at::Tensor out;
  if (serves && own_kernel_serves(in)) out = by(/*flash=*/false);
  else if (serves && flash_serves(in) && (!sums || !why_no_decay_gradients(in)))
    out = slopes || sinks || sums ? by(/*flash=*/true) : window_attention_fused(in);
  else out = window_attention_blocked(qs, ks, vs, window, scale, slopes, real_sinks, sums);
  return out.to(q.scalar_type());
}

void choose_full_attention(const std::string& kernel) {
  at::Context& context = at::globalContext();
  const bool deterministic = kernel == "deterministic";
  const bool any = deterministic || kernel == "torch";
  TORCH_CHECK_VALUE(any || kernel == "cudnn" || kernel == "flash-2", "full attention by '", kernel,
                    "' is unknown; there are deterministic, torch, cudnn, flash-2");
  own_kernel_chosen = deterministic;
  context.setDeterministicAlgorithms(deterministic, /*warn_only=*/false);
  context.setSDPUseCuDNN(any || kernel == "cudnn");
  context.setSDPUseFlash(any || kernel == "flash-2");
  context.setSDPUseMemEfficient(any);
  context.setSDPUseMath(any);
}

const bool registered_path = register_paths(
    kOp, cpu_kernel_path(),
    std::string(kCudaKernels ? "cuda kernel sm_90a for bfloat16 and a head_dim of 64, 96 or 128; "
                             : "") +
        "torch's FlashAttention-2 for bfloat16 and a head_dim that 8 divides, up to 256; "
        "else, and if ALiBi's slopes have a gradient, composed from tensor arithmetic; "
        "decays with FlashAttention-2 for a head_dim of 64, 96 or 128",
    /*cuda_numerics=*/1, /*cpu_numerics=*/2);
TORCH_LIBRARY_FRAGMENT(assay, m) {
  register_operator(m,
                    "window_attention(Tensor q, Tensor k, Tensor v, int window, float scale, "
                    "Tensor? alibi_slopes=None, Tensor? sinks=None, "
                    "Tensor? decay_sums=None) -> Tensor out",
                    "causal softmax attention over the last `window` positions (−1: all), "
                    "with optional ALiBi, attention sinks and decays",
                    window_attention);
}

}  // namespace assay::ops
