// assay::top1_chunk: checks, casts, the choice of the path, and the autograd function
// around the kernels.
#include <torch/torch.h>

#include "ops/attention/passes/choice.h"
#include "ops/attention/top1_chunk/flash.h"
#include "ops/attention/top1_chunk/kernel.h"
#include "ops/attention/top1_chunk/top1_chunk.h"
#include "ops/core/dispatch.h"
#include "ops/core/register.h"
#include "ops/core/split.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "top1_chunk";
constexpr const char* kComposed = "composed from tensor arithmetic";

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Each is read on its own: on the CPU, if there are earlier keys; on GPUs, in place of flash.
constexpr int64_t kFewQueries = 16;

enum class Path { kernel, step, flash, composed };

struct Settings {
  int64_t chunk_size;
  int64_t top_k;
  double scale;
  Selection selection;
  Path path = Path::kernel;
};

// As the kernels want them; selected is undefined unless it is forced, summaries unless
// they are read.
struct Inputs : Settings {
  at::Tensor q;
  at::Tensor k;
  at::Tensor v;
  at::Tensor selected;
  at::Tensor summaries;
  int64_t past() const { return k.size(1) - q.size(1); }
};

struct Outputs {
  at::Tensor out;
  at::Tensor logsumexp;
  at::Tensor selected;
};

Top1ChunkForward describe(const Inputs& in, const Outputs& outputs) {
  Top1ChunkForward p{};
  p.dtype = kernel_dtype(in.q.scalar_type());
  p.batch = in.q.size(0);
  p.time = in.q.size(1);
  p.past = in.past();
  p.heads = in.q.size(2);
  p.kv_heads = in.k.size(2);
  p.head_dim = in.q.size(3);
  p.chunk_size = in.chunk_size;
  p.top_k = in.top_k;
  p.scale = in.scale;
  p.selection = in.selection;
  p.forced = in.selected.defined();
  p.summaries = view(in.summaries);
  p.q = view(in.q);
  p.k = view(in.k);
  p.v = view(in.v);
  p.out = view(outputs.out);
  p.logsumexp = data(outputs.logsumexp);
  p.selected = static_cast<int64_t*>(data(outputs.selected));
  return p;
}

// The path, and why it is composed if it is.
std::pair<Path, const char*> path_of(const Inputs& in, bool gradients) {
  if (in.q.is_cpu())
    return {in.past() > 0 && in.q.size(1) <= kFewQueries ? Path::step : Path::kernel, nullptr};
#ifdef ASSAY_CUDA
  if (on_gpu(in.q.device())) {
    const Top1ChunkForward call = describe(in, {});
    const char* reason = on_hopper(in.q.device()) ? cuda::why_unsupported(call) : kNeedsHopper;
    const char* no_step = cuda::why_no_step(call);
    if (!reason) return {Path::kernel, nullptr};
    const char* no_flash = why_no_flash(in.q, in.k, in.chunk_size);
    if (!no_flash && (gradients || no_step || in.q.size(1) > kFewQueries))
      return {Path::flash, nullptr};
    if (!gradients && !no_step) return {Path::step, nullptr};
    return {Path::composed, gradients ? reason : no_step};
  }
#endif
  return {Path::composed, "was not built"};
}

template <class Work>  // Top1ChunkForward or …Backward
void launch(const Work& work, const at::Device& device) {
  const auto scratch = [&](size_t bytes) { return workspace(bytes, device); };
  dispatch(
      device,
      [&](const auto& pool) {
        cpu::top1_chunk(work, scratch(cpu::workspace_bytes(work)).data_ptr(), pool);
      },
      [&](auto stream) {
        cuda::top1_chunk(work, scratch(cuda::workspace_bytes(work)).data_ptr(), stream);
      });
}
void launch_step(const Top1ChunkForward& work, const at::Device& device) {
  dispatch(
      device,
      [&](const auto& pool) {
        const at::Tensor scratch = workspace(cpu::step_workspace_bytes(work), device);
        cpu::top1_chunk_step(work, scratch.data_ptr(), pool);
      },
      [&](auto stream) { cuda::top1_chunk_step(work, stream); });
}

Outputs run(const Inputs& in) {
  const int64_t batch = in.q.size(0);
  const int64_t time = in.q.size(1);
  const int64_t heads = in.q.size(2);
  const auto options = in.q.options();
  const Outputs out{at::empty(in.q.sizes(), options),
                    at::empty({batch, heads, time}, options.dtype(real_dtype(in.q.scalar_type()))),
                    in.selected.defined()
                        ? in.selected
                        : at::empty({batch, heads, time, in.top_k}, options.dtype(at::kLong))};
  in.path == Path::step ? launch_step(describe(in, out), in.q.device())
                        : launch(describe(in, out), in.q.device());
  return out;
}

struct Top1Chunk : torch::autograd::Function<Top1Chunk> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const OptionalTensor& selected,
                               const OptionalTensor& summaries, Settings settings) {
    const Outputs out = run({settings, q, k, v, or_undefined(selected), or_undefined(summaries)});
    ctx->save_for_backward({q, k, v, out.out, out.logsumexp, out.selected});
    ctx->saved_data["chunk_size"] = settings.chunk_size;
    ctx->saved_data["scale"] = settings.scale;
    ctx->mark_non_differentiable({out.logsumexp, out.selected});
    return {out.out, out.logsumexp, out.selected};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list s = ctx->get_saved_variables();
    const Settings settings{.chunk_size = ctx->saved_data["chunk_size"].toInt(),
                            .top_k = s[5].size(3),
                            .scale = ctx->saved_data["scale"].toDouble(),
                            .selection = Selection::exact};
    const Inputs in{settings, s[0], s[1], s[2], s[5], {}};
    const at::Tensor dout = aligned_rows(sequence(gradients[0], in.q.scalar_type()));
    const at::Tensor dq = gradient_memory(in.q);
    const at::Tensor dk = gradient_memory(in.k);
    const at::Tensor dv = gradient_memory(in.v);
    launch(Top1ChunkBackward{describe(in, {s[3], s[4], s[5]}), view(dout), view(dq), view(dk),
                             view(dv)},
           in.q.device());
    return {dq, dk, dv, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

void check_summaries(const at::Tensor& summaries, const at::Tensor& k, int64_t chunks) {
  if (summaries.dim() == 5) chunks = std::max(chunks, summaries.size(1));
  const bool parts = k.scalar_type() == at::kBFloat16;
  check_shape(kOp, "summaries", summaries, {k.size(0), chunks, k.size(2), parts ? 2 : 1, k.size(3)},
              parts ? "[B, ⌊S / chunk_size⌋, Hk, 2, D]" : "[B, ⌊S / chunk_size⌋, Hk, 1, D]");
  check_like(kOp, "summaries", summaries, "k", k);
}

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t chunk_size,
           double scale, std::string_view selection, int64_t top_k, const OptionalTensor& selected,
           const OptionalTensor& summaries) {
  check_attention(kOp, q, k, v);
  TORCH_CHECK_VALUE(chunk_size >= 1, kOp, ": chunk_size is ", chunk_size, ", expected 1 or more");
  TORCH_CHECK_VALUE(std::isfinite(scale), kOp, ": scale is ", scale, ", expected a finite number");
  TORCH_CHECK_VALUE(selection == "exact" || selection == "approx", kOp, ": selection is '",
                    selection, "', expected 'exact' or 'approx'");
  TORCH_CHECK_VALUE(top_k >= 1, kOp, ": top_k is ", top_k, ", expected 1 or more");
  if (summaries) check_summaries(*summaries, k, k.size(1) / chunk_size);
  if (!selected) return;
  check_shape(kOp, "selected", *selected, {q.size(0), q.size(2), q.size(1), top_k},
              "[B, H, T, top_k]");
  TORCH_CHECK_VALUE(selected->scalar_type() == at::kLong && selected->device() == q.device(), kOp,
                    ": selected holds ", selected->scalar_type(), " on ", selected->device(),
                    ", expected Long on ", q.device());
}

Selection selection_named(std::string_view name) {
  return name == "exact" ? Selection::exact : Selection::approx;
}

// The summaries that chunk_summaries returned for k, in the form that it has for keys in `dtype`.
at::Tensor summaries_in(at::ScalarType dtype, const at::Tensor& summaries, const at::Tensor& k) {
  const bool parts = k.scalar_type() == at::kBFloat16;
  if (dtype == at::kBFloat16) return sequence(summaries, dtype);
  return sequence(parts ? joined_summaries(summaries) : summaries, real_dtype(dtype));
}

// `selected` with −1 in place of each chunk that is not a candidate of its query.
at::Tensor candidates_of(const at::Tensor& selected, int64_t past, int64_t chunk_size) {
  const at::Tensor own =
      at::arange(past, past + selected.size(2), selected.options()).floor_divide(chunk_size);
  return selected.masked_fill((selected < 0) | (selected >= own.unsqueeze(1)), -1).contiguous();
}

// The choice where FlashAttention-2 reads the chunks, [B, H, T, top_k].
at::Tensor choice_for_flash(const Inputs& in, const OptionalTensor& summaries) {
  const at::Tensor q = aligned_rows(in.q.detach());
  const at::Tensor k = aligned_rows(in.k.detach());
  const bool exact = in.selection == Selection::exact;
  if constexpr (kCudaKernels) {
    Top1Choice c{};
    c.batch = q.size(0);
    c.time = q.size(1);
    c.past = in.past();
    c.heads = q.size(2);
    c.kv_heads = k.size(2);
    c.head_dim = q.size(3);
    c.chunk_size = in.chunk_size;
    c.scale = in.scale;
    c.q = view(q);
    c.k = view(k);
    if (exact && in.top_k == 1 && !cuda::why_unsupported(c)) {
      const at::Tensor index =
          at::empty({c.batch, c.heads, c.time, 1}, q.options().dtype(at::kLong));
      c.index = static_cast<int64_t*>(data(index));
      const c10::DeviceGuard guard(q.device());
      cuda::choose(c, current_stream(q.device()));
      return index;
    }
  }
  return top1_chunk_choice(q, k, in.chunk_size, in.scale, exact ? "exact" : "approx", in.top_k,
                           summaries);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> top1_chunk(const at::Tensor& q, const at::Tensor& k,
                                                          const at::Tensor& v, int64_t chunk_size,
                                                          double scale, std::string_view selection,
                                                          int64_t top_k,
                                                          const OptionalTensor& selected,
                                                          const OptionalTensor& summaries) {
  check(q, k, v, chunk_size, scale, selection, top_k, selected, summaries);
  if (q.is_meta()) {
    const int64_t batch = q.size(0);
    const int64_t time = q.size(1);
    const int64_t heads = q.size(2);
    const at::ScalarType real = real_dtype(sequence_dtype({q, k, v}));
    return {at::empty(q.sizes(), q.options()),
            at::empty({batch, heads, time}, q.options().dtype(real)),
            at::empty({batch, heads, time, top_k}, q.options().dtype(at::kLong))};
  }
  const bool gradients =
      at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
  const Settings settings{chunk_size, top_k, scale, selection_named(selection)};
  Inputs in{settings, q, k, v, {}, {}};
  auto dtype = sequence_dtype({q, k, v});
  // The CPU's backward needs out unrounded for δ, and computes in float anyway.
  if (q.is_cpu() && (gradients || path_of(in, gradients).first == Path::kernel))
    dtype = real_dtype(dtype);
  in.q = sequence(q, dtype);
  in.k = sequence(k, dtype);
  in.v = sequence(v, dtype);
  if (selected) in.selected = candidates_of(*selected, in.past(), chunk_size);
  const auto [path, reason] = path_of(in, gradients);
  if (path == Path::composed) {
    TORCH_WARN_ONCE(kOp, " is ", kComposed, ": the kernel for ", q.device(), " ", reason);
    return top1_chunk_reference(q, k, v, chunk_size, scale, selection, top_k, selected, summaries);
  }
  if (path == Path::flash) {
    const at::Tensor chosen = selected ? in.selected : choice_for_flash(in, summaries);
    const auto [out, logsumexp] = flash_top1_chunk(in.q, in.k, in.v, chosen, chunk_size, scale);
    return {out.to(q.scalar_type()), logsumexp, chosen};
  }
  in.path = path;
  if (!selected && path == Path::step && in.selection == Selection::approx)
    in.summaries =
        summaries ? summaries_in(dtype, *summaries, k) : chunk_summaries(in.k, chunk_size);
  const auto out = Top1Chunk::apply(in.q, in.k, in.v, optional(in.selected), optional(in.summaries),
                                    Settings(in));
  return {out[0].to(q.scalar_type()), out[1], out[2]};
}

namespace {

constexpr const char* kDecode = "top1_chunk_decode";

// Parameters of a decode step whose caches have rows like those of a contiguous k [B, S, Hk, D].
Top1ChunkForward describe_decode(at::ScalarType dtype, at::IntArrayRef heads, int64_t head_dim,
                                 int64_t chunk_size, std::string_view selection, int64_t top_k,
                                 int64_t capacity) {
  Top1ChunkForward p{};
  p.dtype = kernel_dtype(dtype);
  p.batch = p.time = 1;
  p.heads = heads[0];
  p.kv_heads = heads[1];
  p.head_dim = head_dim;
  p.chunk_size = chunk_size;
  p.top_k = top_k;
  p.selection = selection_named(selection);
  p.past = capacity - 1;
  p.k.time_stride = p.v.time_stride = p.kv_heads * head_dim;
  p.summaries.time_stride = p.k.time_stride * (dtype == at::kBFloat16 ? 2 : 1);
  return p;
}

void check_decode(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const at::Tensor& positions, const at::Tensor& caches, std::string_view selection,
                  int64_t chunk_size, int64_t top_k) {
  check_dims(kDecode, "q", q, 3, "[B, H, D]");
  check_dims(kDecode, "k", k, 3, "[B, Hk, D]");
  check_shape(kDecode, "k", k, {q.size(0), k.size(1), q.size(2)}, "[B, Hk, D]");
  check_shape(kDecode, "v", v, k.sizes(), "[B, Hk, D]");
  TORCH_CHECK_VALUE(q.size(1) % k.size(1) == 0, kDecode, ": ", k.size(1),
                    " heads of k do not divide ", q.size(1), " heads of q");
  for (const at::Tensor& x : {k, v})
    TORCH_CHECK_VALUE(x.scalar_type() == q.scalar_type() && x.device() == q.device(), kDecode,
                      ": q, k and v must have one dtype and device");
  TORCH_CHECK_VALUE(
      top1_chunk_decode_serves(q.options(), q.size(2), chunk_size, selection, top_k) &&
          !at::GradMode::is_enabled(),
      kDecode,
      ": it takes float32 or bfloat16 on CUDA without gradients, a head_dim of 64, 96 or 128, "
      "exact or approx, and a chunk_size and top_k that its kernel allows");
  check_shape(kDecode, "positions", positions, {q.size(0)}, "[B]");
  const bool approx = selection == "approx";
  check_shape(kDecode, "caches", caches, {q.size(0), approx ? 3 : 2}, approx ? "[B, 3]" : "[B, 2]");
  for (const at::Tensor& x : {positions, caches})
    TORCH_CHECK_VALUE(x.scalar_type() == at::kLong && x.device() == q.device() && x.is_contiguous(),
                      kDecode, ": positions and caches must be contiguous int64 on q's device");
}

}  // namespace

bool top1_chunk_decode_serves([[maybe_unused]] const at::TensorOptions& options,
                              [[maybe_unused]] int64_t head_dim,
                              [[maybe_unused]] int64_t chunk_size,
                              [[maybe_unused]] std::string_view selection,
                              [[maybe_unused]] int64_t top_k) {
#ifdef ASSAY_CUDA
  constexpr int64_t kCapacity = 1 << 18;
  const auto dtype = options.dtype().toScalarType();
  return on_gpu(options.device()) && (dtype == at::kBFloat16 || dtype == at::kFloat) &&
         (selection == "exact" || selection == "approx") && chunk_size >= 1 && top_k >= 1 &&
         !cuda::why_no_step(
             describe_decode(dtype, {1, 1}, head_dim, chunk_size, selection, top_k, kCapacity));
#else
  return false;
#endif
}

at::Tensor top1_chunk_decode(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& positions, const at::Tensor& caches,
                             int64_t chunk_size, double scale, std::string_view selection,
                             int64_t top_k, int64_t capacity) {
  check_decode(q, k, v, positions, caches, selection, chunk_size, top_k);
  Top1ChunkForward p = describe_decode(q.scalar_type(), {q.size(1), k.size(1)}, q.size(2),
                                       chunk_size, selection, top_k, capacity);
  const at::Tensor out = at::empty(q.sizes(), q.options());
  const auto rows = [](const at::Tensor& x) { return aligned_rows(x.unsqueeze(1)); };
  const at::Tensor queries = rows(q);
  const at::Tensor keys = rows(k);
  const at::Tensor values = rows(v);
  const at::Tensor outputs = out.unsqueeze(1);
  p.batch = q.size(0);
  p.scale = scale;
  p.q = view(queries);
  p.new_k = view(keys);
  p.new_v = view(values);
  p.out = view(outputs);
  p.positions = static_cast<const int64_t*>(data(positions));
  p.caches = static_cast<void* const*>(data(caches));
  launch_step(p, q.device());
  return out;
}

const bool registered_path = register_paths(
    kOp, cpu_kernel_path(),
    kCudaKernels
        ? std::string(
              "cuda kernel sm_90a for bfloat16, a head_dim of 64, 96 or 128, "
              "a chunk_size up to 256, and no earlier keys; "
              "without gradients, a kernel of decode steps, also compute_80, for such a head_dim, "
              "any dtype and earlier keys; else torch's FlashAttention-2 for bfloat16, "
              "a head_dim that 8 divides, up to 256, and no earlier keys; else ") +
              kComposed
        : std::string(kComposed) + ": built without CUDA",
    /*cuda_numerics=*/2);
TORCH_LIBRARY_FRAGMENT(assay, m) {
  register_operator(
      m,
      "top1_chunk(Tensor q, Tensor k, Tensor v, int chunk_size, float scale, "
      "str selection='exact', int top_k=1, Tensor? selected=None, "
      "Tensor? summaries=None) -> (Tensor out, Tensor logsumexp, Tensor selected)",
      "softmax attention over the own chunk and the top_k earlier chunks, by largest score",
      top1_chunk, {"logsumexp"});
}

}  // namespace assay::ops
