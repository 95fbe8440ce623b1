// assay::top1_chunk: checks, casts, the choice of the path, and the autograd function around the kernels.
#include <torch/torch.h>

#include "ops/parallel.h"
#include "ops/paths.h"
#include "ops/tensors.h"
#include "ops/top1_chunk/kernel.h"
#include "ops/top1_chunk/top1_chunk.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "top1_chunk";
constexpr const char* kComposed = "composed from tensor arithmetic";

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// As the kernels want them; selected is undefined unless it is forced.
struct Inputs {
  at::Tensor q, k, v, selected;
  int64_t chunk_size, top_k;
  double scale;
  Selection selection;
};

struct Outputs {
  at::Tensor out, logsumexp, selected;
};

Top1ChunkForward describe(const Inputs& in, const Outputs& outputs) {
  Top1ChunkForward p{};
  p.dtype = kernel_dtype(in.q.scalar_type());
  p.batch = in.q.size(0), p.time = in.q.size(1), p.past = in.k.size(1) - p.time;
  p.heads = in.q.size(2), p.kv_heads = in.k.size(2), p.head_dim = in.q.size(3);
  p.chunk_size = in.chunk_size, p.top_k = in.top_k, p.scale = in.scale, p.selection = in.selection;
  p.forced = in.selected.defined();
  p.q = view(in.q), p.k = view(in.k), p.v = view(in.v), p.out = view(outputs.out);
  p.logsumexp = data(outputs.logsumexp), p.selected = static_cast<int64_t*>(data(outputs.selected));
  return p;
}

// Null when a kernel takes this call, else why not.
const char* why_composed(const Inputs& in) {
  if (in.q.is_cpu()) return nullptr;
#ifdef ASSAY_CUDA
  if (in.q.is_cuda())
    return in.k.size(1) > in.q.size(1) ? "takes as many keys as queries" : cuda::why_unsupported(describe(in, {}));
#endif
  return "was not built";
}

template <class Work>  // Top1ChunkForward or …Backward
void launch(const Work& work, const at::Device& device) {
#ifdef ASSAY_CUDA
  if (device.is_cuda()) {
    const c10::DeviceGuard guard(device);
    const at::Tensor scratch = workspace(cuda::workspace_bytes(work), device);
    return cuda::top1_chunk(work, scratch.data_ptr(), current_stream(device));
  }
#endif
  cpu::top1_chunk(work, workspace(cpu::workspace_bytes(work), device).data_ptr(), at_parallel_for());
}

Outputs run(const Inputs& in) {
  const int64_t batch = in.q.size(0), time = in.q.size(1), heads = in.q.size(2);
  const auto options = in.q.options();
  const Outputs out{
      at::empty(in.q.sizes(), options), at::empty({batch, heads, time}, options.dtype(real_dtype(in.q.scalar_type()))),
      in.selected.defined() ? in.selected : at::empty({batch, heads, time, in.top_k}, options.dtype(at::kLong))};
  launch(describe(in, out), in.q.device());
  return out;
}

struct Top1Chunk : torch::autograd::Function<Top1Chunk> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const OptionalTensor& selected, int64_t chunk_size, int64_t top_k, double scale,
                               int64_t selection) {
    const Inputs in{q, k, v, or_undefined(selected), chunk_size, top_k, scale, Selection(selection)};
    const Outputs out = run(in);
    ctx->save_for_backward({q, k, v, out.out, out.logsumexp, out.selected});
    ctx->saved_data["chunk_size"] = chunk_size, ctx->saved_data["scale"] = scale;
    ctx->mark_non_differentiable({out.logsumexp, out.selected});
    return {out.out, out.logsumexp, out.selected};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list s = ctx->get_saved_variables();
    const Inputs in{s[0],
                    s[1],
                    s[2],
                    s[5],
                    ctx->saved_data["chunk_size"].toInt(),
                    s[5].size(3),
                    ctx->saved_data["scale"].toDouble(),
                    Selection::exact};
    const at::Tensor dout = sequence(gradients[0], in.q.scalar_type());
    const at::Tensor dq = at::empty(in.q.sizes(), in.q.options());
    const at::Tensor dk = at::empty(in.k.sizes(), in.k.options()), dv = at::empty_like(dk);
    launch(Top1ChunkBackward{describe(in, {s[3], s[4], s[5]}), view(dout), view(dq), view(dk), view(dv)},
           in.q.device());
    return {dq, dk, dv, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t chunk_size, double scale,
           std::string_view selection, int64_t top_k, const OptionalTensor& selected) {
  check_attention(kOp, q, k, v);
  TORCH_CHECK_VALUE(chunk_size >= 1, kOp, ": chunk_size is ", chunk_size, ", expected 1 or more");
  TORCH_CHECK_VALUE(std::isfinite(scale), kOp, ": scale is ", scale, ", expected a finite number");
  TORCH_CHECK_VALUE(selection != "shortlist", kOp,
                    ": selection 'shortlist' is not offered; there are 'exact', 'approx'");
  TORCH_CHECK_VALUE(selection == "exact" || selection == "approx", kOp, ": selection is '", selection,
                    "', expected 'exact' or 'approx'");
  TORCH_CHECK_VALUE(top_k >= 1, kOp, ": top_k is ", top_k, ", expected 1 or more");
  if (!selected) return;
  check_shape(kOp, "selected", *selected, {q.size(0), q.size(2), q.size(1), top_k}, "[B, H, T, top_k]");
  TORCH_CHECK_VALUE(selected->scalar_type() == at::kLong && selected->device() == q.device(), kOp, ": selected holds ",
                    selected->scalar_type(), " on ", selected->device(), ", expected Long on ", q.device());
}

// What is no candidate of its query becomes −1.
at::Tensor candidates_of(const at::Tensor& selected, int64_t past, int64_t chunk_size) {
  const at::Tensor own = at::arange(past, past + selected.size(2), selected.options()).floor_divide(chunk_size);
  return selected.masked_fill((selected < 0) | (selected >= own.unsqueeze(1)), -1).contiguous();
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> top1_chunk(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                          int64_t chunk_size, double scale, std::string_view selection,
                                                          int64_t top_k, const OptionalTensor& selected) {
  check(q, k, v, chunk_size, scale, selection, top_k, selected);
  auto dtype = sequence_dtype({q, k, v});
  if (q.is_cpu()) dtype = real_dtype(dtype);  // the backward's δ needs out unrounded; the CPU computes in float anyway
  const Inputs in{sequence(q, dtype),
                  sequence(k, dtype),
                  sequence(v, dtype),
                  selected ? candidates_of(*selected, k.size(1) - q.size(1), chunk_size) : at::Tensor(),
                  chunk_size,
                  top_k,
                  scale,
                  selection == "exact" ? Selection::exact : Selection::approx};
  if (const char* reason = why_composed(in)) {
    TORCH_WARN_ONCE(kOp, " is ", kComposed, ": the kernel for ", q.device(), " ", reason);
    return top1_chunk_reference(q, k, v, chunk_size, scale, selection, top_k, selected);
  }
  const auto out =
      Top1Chunk::apply(in.q, in.k, in.v, optional(in.selected), chunk_size, top_k, scale, int64_t(in.selection));
  return {out[0].to(q.scalar_type()), out[1], out[2]};
}

const bool registered_path = register_paths(
    kOp, cpu_kernel_path(),
    kCudaKernels ? std::string("cuda kernel sm_90a for bfloat16, a head_dim of 64, 96 or 128, a chunk_size "
                               "up to 256 and as many keys as queries; else ") +
                       kComposed
                 : std::string(kComposed) + ": built without CUDA");
TORCH_LIBRARY_FRAGMENT(assay, m) {
  m.def(
      "top1_chunk(Tensor q, Tensor k, Tensor v, int chunk_size, float scale, str selection='exact', int top_k=1, "
      "Tensor? selected=None) -> (Tensor out, Tensor logsumexp, Tensor selected)",
      top1_chunk);
}

}  // namespace assay::ops
