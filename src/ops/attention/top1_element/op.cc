// assay::top1_element: checks, casts, the choice of the path, and the autograd
// function around both.
#include <torch/torch.h>

#include "ops/attention/top1_element/flash.h"
#include "ops/attention/top1_element/kernel.h"
#include "ops/attention/top1_element/top1_element.h"
#include "ops/core/dispatch.h"
#include "ops/core/register.h"
#include "ops/core/split.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "top1_element";
constexpr const char* kComposed = "composed from tensor arithmetic in O(T) memory";

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Inputs {
  at::Tensor q;
  at::Tensor k;
  at::Tensor v;
  double scale;
};

Top1ElementForward describe(const Inputs& in, const Top1ElementOutputs& o) {
  Top1ElementForward p{};
  p.dtype = kernel_dtype(in.q.scalar_type());
  p.batch = in.q.size(0);
  p.time = in.q.size(1);
  p.past = in.k.size(1) - p.time;
  p.heads = in.q.size(2);
  p.kv_heads = in.k.size(2);
  p.head_dim = in.q.size(3);
  p.scale = in.scale;
  p.q = view(in.q);
  p.k = view(in.k);
  p.v = view(in.v);
  p.out = view(o.out);
  p.logsumexp = data(o.logsumexp);
  p.soft = data(o.soft);
  p.index = static_cast<int64_t*>(data(o.index));
  return p;
}

enum class Path { kernel, flash, composed };

// The path, and why it is composed if it is.
std::pair<Path, const char*> path_of(const Inputs& in) {
  if (in.q.is_cpu()) return {Path::kernel, nullptr};
#ifdef ASSAY_CUDA
  if (on_hopper(in.q.device())) {
    const char* reason = cuda::why_unsupported(describe(in, {}));
    return {reason ? Path::composed : Path::kernel, reason};
  }
#endif
  const char* reason = why_no_flash(in.q, in.k, in.v);
  return {reason ? Path::composed : Path::flash, reason};
}

template <class Work>  // Top1ElementForward or …Backward
void launch(const Work& work, const at::Device& device) {
  const auto scratch = [&](size_t bytes) { return workspace(bytes, device); };
  dispatch(
      device,
      [&](const auto& pool) {
        cpu::top1_element(work, scratch(cpu::workspace_bytes(work)).data_ptr(), pool);
      },
      [&](auto stream) {
        cuda::top1_element(work, scratch(cuda::workspace_bytes(work)).data_ptr(), stream);
      });
}

Top1ElementOutputs run(const Inputs& in, bool with_gradient) {
  const auto [path, reason] = path_of(in);
  if (path == Path::composed) {
    TORCH_WARN_ONCE(kOp, " is ", kComposed, "; the kernel for ", in.q.device(), " ", reason);
    return top1_element_composed(in.q, in.k, in.v, in.scale, with_gradient);
  }
  if (path == Path::flash) return top1_element_flash(in.q, in.k, in.v, in.scale, with_gradient);
  const int64_t batch = in.q.size(0);
  const int64_t time = in.q.size(1);
  const int64_t heads = in.q.size(2);
  const auto real = in.q.options().dtype(real_dtype(in.q.scalar_type()));
  const auto wanted = [&](at::IntArrayRef sizes) {
    return with_gradient ? at::empty(sizes, real) : at::Tensor();
  };
  const Top1ElementOutputs o{at::empty(in.q.sizes(), in.q.options()),
                             at::empty({batch, heads, time}, real.dtype(at::kLong)),
                             wanted({batch, heads, time}),
                             wanted({batch, heads, time, in.q.size(3)})};
  launch(describe(in, o), in.q.device());
  return o;
}

struct Top1Element : torch::autograd::Function<Top1Element> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, double scale) {
    const Top1ElementOutputs o = run({q, k, v, scale}, true);
    ctx->save_for_backward({q, k, v, o.index, o.logsumexp, o.soft});
    ctx->saved_data["scale"] = scale;
    ctx->mark_non_differentiable({o.index});
    return {o.out, o.index};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list s = ctx->get_saved_variables();
    const Inputs in{s[0], s[1], s[2], ctx->saved_data["scale"].toDouble()};
    const Top1ElementOutputs o{{}, s[3], s[4], s[5]};
    const at::Tensor dout = aligned_rows(sequence(gradients[0], in.q.scalar_type()));
    if (const Path path = path_of(in).first; path != Path::kernel) {
      const auto backward =
          path == Path::flash ? top1_element_flash_backward : top1_element_composed_backward;
      const auto [dq, dk, dv] = backward(in.q, in.k, in.v, in.scale, o, dout);
      return {dq, dk, dv, at::Tensor()};
    }
    const at::Tensor dq = gradient_memory(in.q);
    const at::Tensor dk = gradient_memory(in.k);
    const at::Tensor dv = gradient_memory(in.v);
    launch(Top1ElementBackward{describe(in, o), view(dout), view(dq), view(dk), view(dv)},
           in.q.device());
    return {dq, dk, dv, at::Tensor()};
  }
};

}  // namespace

std::tuple<at::Tensor, at::Tensor> top1_element(const at::Tensor& q, const at::Tensor& k,
                                                const at::Tensor& v, double scale) {
  check_attention(kOp, q, k, v);
  TORCH_CHECK_VALUE(std::isfinite(scale), kOp, ": scale is ", scale, ", expected a finite number");
  if (q.is_meta())
    return {at::empty(q.sizes(), q.options()),
            at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kLong))};
  const auto dtype = sequence_dtype({q, k, v});
  const auto rows = [&](const at::Tensor& x) { return aligned_rows(sequence(x, dtype)); };
  const Inputs in{rows(q), rows(k), rows(v), scale};
  if (!at::GradMode::is_enabled() ||
      !(q.requires_grad() || k.requires_grad() || v.requires_grad())) {
    const Top1ElementOutputs o = run(in, false);
    return {o.out.to(q.scalar_type()), o.index};
  }
  const auto out = Top1Element::apply(in.q, in.k, in.v, scale);
  return {out[0].to(q.scalar_type()), out[1]};
}

const bool registered_path = register_paths(
    kOp, cpu_kernel_path(),
    kCudaKernels ? std::string("cuda kernel sm_90a, or compute_80 and FlashAttention-2, "
                               "for bfloat16 and a head_dim of 64, 96 or 128; else ") +
                       kComposed
                 : std::string(kComposed) + "; built without CUDA");
TORCH_LIBRARY_FRAGMENT(assay, m) {
  register_operator(
      m, "top1_element(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor out, Tensor index)",
      "out_t = v_j*, j* = argmax over j ≤ t of q_t·k_j; gradient of the softmax", top1_element);
}

}  // namespace assay::ops
