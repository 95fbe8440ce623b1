// Mamba-3's element-wise parts: checks, and the operators around the kernels.
#include <numbers>

#include "ops/core/rowwise_op.h"
#include "ops/rowwise/mamba3_elements/kernel.h"
#include "ops/rowwise/mamba3_elements/mamba3_elements.h"

namespace assay::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kRotate = "mamba3_rotate";
constexpr int64_t kChunk = 16;

// Sequences of `time` steps as chunks.
struct Chunks {
  int64_t size;
  int64_t count;
  explicit Chunks(int64_t time) : size(std::min(time, kChunk)), count((time + size - 1) / size) {}

  // x [B, T, D] as [B, chunks, size, D], with zeros after the last step
  at::Tensor of(const at::Tensor& x) const {
    const int64_t missing = count * size - x.size(1);
    const at::Tensor all = missing ? at::constant_pad_nd(x, {0, 0, 0, missing}) : x;
    return all.unflatten(1, {count, size});
  }
  at::Tensor steps(const at::Tensor& x, int64_t time) const {
    return x.flatten(1, 2).slice(1, 0, time);
  }
};

struct RotateFunction : torch::autograd::Function<RotateFunction> {
  // saved: b, c, biases, steps, turns, starts
  static Mamba3Rotate describe(const variable_list& saved) {
    const at::Tensor& b = saved[0];
    Mamba3Rotate p{};
    p.dtype = kernel_dtype(b.scalar_type());
    p.batch = b.size(0);
    p.time = b.size(1);
    p.groups = b.size(2);
    p.heads = saved[3].size(2);
    p.state_size = b.size(3);
    p.pairs = saved[4].size(2);
    p.chunk = Chunks(p.time).size;
    p.b = data(b);
    p.c = data(saved[1]);
    p.biases = data(saved[2]);
    p.steps = data(saved[3]);
    p.turns = data(saved[4]);
    p.starts = data(saved[5]);
    return p;
  }

  // The angles before each chunk and after the last one, [B, chunks + 1, H, P], modulo 2π.
  static at::Tensor starts_of(const at::Tensor& steps, const at::Tensor& turns,
                              const at::Tensor& angle) {
    const Chunks chunks(steps.size(1));
    const at::Tensor sums = at::matmul(chunks.of(steps).mT(), chunks.of(turns));
    const auto modulo = [&](const at::Tensor& x) {
      return x.remainder(2 * std::numbers::pi).to(angle.scalar_type());
    };
    // Sums are in float64, because those over many chunks lose digits in float32.
    if (chunks.count == 1)
      return at::stack({angle, modulo(sums.squeeze(1).to(at::kDouble) + angle)}, 1);
    const at::Tensor all = at::cat({angle.unsqueeze(1), sums}, 1).to(at::kDouble);
    return modulo(prefix_sums(all.flatten(2)).view_as(all));
  }

  // biases [2, H, N]; the others as in mamba3_elements.h, with an angle
  static variable_list forward(AutogradContext* ctx, const at::Tensor& b, const at::Tensor& c,
                               const at::Tensor& biases, const at::Tensor& steps,
                               const at::Tensor& turns, const at::Tensor& angle) {
    const at::Tensor starts = starts_of(steps, turns, angle);
    const variable_list saved{b, c, biases, steps, turns, starts};
    const at::Tensor rotated_b =
        at::empty({b.size(0), b.size(1), steps.size(2), b.size(3)}, b.options());
    const at::Tensor rotated_c = at::empty_like(rotated_b);
    const at::Tensor dot = at::empty_like(steps);
    Mamba3Rotate p = describe(saved);
    p.rotated_b = data(rotated_b);
    p.rotated_c = data(rotated_c);
    p.dot = data(dot);
    launch(b.device(), [&](auto stream) { cuda::mamba3_rotate(p, stream); });
    ctx->save_for_backward(saved);
    return {rotated_b, rotated_c, dot, starts.select(1, -1).clone()};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& b = saved[0];
    const at::Tensor& steps = saved[3];
    const at::Tensor& turns = saved[4];
    const Chunks chunks(b.size(1));
    const auto gradient = [&](size_t n) { return aligned(gradients[n].contiguous()); };
    const at::Tensor drotated_b = gradient(0);
    const at::Tensor drotated_c = gradient(1);
    const at::Tensor ddot = gradient(2);
    Mamba3RotateBackward bwd{};
    bwd.forward = describe(saved);
    bwd.drotated_b = data(drotated_b);
    bwd.drotated_c = data(drotated_c);
    bwd.ddot = data(ddot);
    const at::Tensor dbiases = at::empty_like(saved[2]);
    const at::Tensor dsteps = at::empty_like(steps);
    const at::Tensor dangles =
        at::empty({b.size(0), chunks.count, steps.size(2), turns.size(2)}, steps.options());
    bwd.dbiases = data(dbiases);
    bwd.dsteps = data(dsteps);
    bwd.dangles = data(dangles);
    at::Tensor db;
    at::Tensor dc;
    at::Tensor dturns;
    launch(b.device(), [&](auto stream) {
      const int64_t slices = cuda::slices(bwd.forward);
      auto parts = b.sizes().vec();
      parts.insert(parts.begin(), slices);
      db = at::empty(parts, steps.options());
      dc = at::empty_like(db);
      dturns =
          at::empty({slices * b.size(2), b.size(0), b.size(1), turns.size(2)}, steps.options());
      bwd.db = data(db);
      bwd.dc = data(dc);
      bwd.dturns = data(dturns);
      const at::Tensor scratch = workspace(cuda::workspace_bytes(bwd), b.device());
      cuda::mamba3_rotate(bwd, scratch.data_ptr(), stream);
    });
    const auto total = [](const at::Tensor& x) { return x.size(0) == 1 ? x[0] : x.sum(0); };
    // the gradient of the angles after each chunk, and that of the first angle
    const at::Tensor within = dangles.to(at::kDouble);
    const at::Tensor sums = prefix_sums(within.flatten(2)).view_as(within);
    const at::Tensor all = sums.select(1, -1).unsqueeze(1) + gradients[3].unsqueeze(1);
    const at::Tensor later = (all - sums).to(steps.scalar_type());
    return {total(db).to(b.scalar_type()),
            total(dc).to(b.scalar_type()),
            dbiases,
            dsteps + chunks.steps(at::matmul(chunks.of(turns), later.mT()), b.size(1)),
            total(dturns) + chunks.steps(at::matmul(chunks.of(steps), later), b.size(1)),
            all.squeeze(1).to(steps.scalar_type())};
  }

  template <class OnCuda>
  static void launch(const at::Device& device, OnCuda&& on_cuda) {
    dispatch(device, [](const auto&) { fail("{}: no kernel for this device", kRotate); }, on_cuda);
  }
};

// One factor per head of each row of `like`.
void check_factor(const char* op, const char* name, const at::Tensor& factor, const char* like_name,
                  const at::Tensor& like) {
  TORCH_CHECK_VALUE(factor.dim() == like.dim() && factor.size(-1) > 0, op, ": ", name,
                    " has shape ", factor.sizes(), ", expected [..., heads]");
  auto shape = like.sizes().vec();
  shape.back() = factor.size(-1);
  check_shape(op, name, factor, shape, "[..., heads]");
  check_like(op, name, factor, like_name, like);
}

}  // namespace

Mamba3Rotated mamba3_rotate(const at::Tensor& b, const at::Tensor& c, const at::Tensor& b_bias,
                            const at::Tensor& c_bias, const at::Tensor& steps,
                            const at::Tensor& turns, const OptionalTensor& angle) {
  check_dims(kRotate, "b", b, 4, "[B, T, G, N]");
  check_dims(kRotate, "steps", steps, 3, "[B, T, H]");
  check_dims(kRotate, "turns", turns, 3, "[B, T, P]");
  const int64_t batch = b.size(0);
  const int64_t time = b.size(1);
  const int64_t heads = steps.size(2);
  const int64_t state_size = b.size(3);
  const int64_t pairs = turns.size(2);
  TORCH_CHECK_VALUE(heads % b.size(2) == 0, kRotate, ": b has ", b.size(2),
                    " groups, which do not divide ", heads, " heads");
  TORCH_CHECK_VALUE(2 * pairs <= state_size, kRotate, ": turns has ", pairs, " pairs, but b has ",
                    state_size, " channels");
  check_shape(kRotate, "c", c, b.sizes(), "[B, T, G, N]");
  check_shape(kRotate, "b_bias", b_bias, {heads, state_size}, "[H, N]");
  check_shape(kRotate, "c_bias", c_bias, {heads, state_size}, "[H, N]");
  check_shape(kRotate, "steps", steps, {batch, time, heads}, "[B, T, H]");
  check_shape(kRotate, "turns", turns, {batch, time, pairs}, "[B, T, P]");
  if (angle) check_shape(kRotate, "angle", *angle, {batch, heads, pairs}, "[B, H, P]");
  for (const auto& [name, tensor] : {std::pair("b", b),
                                     {"c", c},
                                     {"b_bias", b_bias},
                                     {"c_bias", c_bias},
                                     {"steps", steps},
                                     {"turns", turns}})
    check_like(kRotate, name, tensor, "b", b);
  if (angle) check_like(kRotate, "angle", *angle, "b", b);
  const auto dtype = sequence_dtype({b, c});
  const auto real = real_dtype(dtype);
  const auto narrow = [&](const at::Tensor& x) { return x.to(b.scalar_type()); };
  if (!on_gpu(b.device()) || state_size % 8 || state_size > 256) {
    const Mamba3Rotated out =
        mamba3_rotate_reference(b.to(dtype), c.to(dtype), b_bias.to(real), c_bias.to(real),
                                steps.to(real), turns.to(real), optional(parameter(angle, real)));
    return {narrow(out.b), narrow(out.c), out.dot, out.angle};
  }
  const auto in = [](const at::Tensor& x, at::ScalarType type) {
    return aligned(parameter(x, type));
  };
  const at::Tensor first =
      angle ? in(*angle, real) : at::zeros({batch, heads, pairs}, steps.options().dtype(real));
  const auto out = RotateFunction::apply(in(b, dtype), in(c, dtype),
                                         at::stack({b_bias.to(real), c_bias.to(real)}),
                                         in(steps, real), in(turns, real), first);
  return {narrow(out[0]), narrow(out[1]), out[2], out[3]};
}

Mamba3Written mamba3_write(const at::Tensor& x, const at::Tensor& factor) {
  constexpr const char* op = "mamba3_write";
  const int64_t heads = factor.dim() > 0 ? factor.size(-1) : 0;
  check_sequences(op, heads, {{"x", x}});
  check_factor(op, "factor", factor, "x", x);
  if (!has_rowwise_kernel(x, heads)) return mamba3_write_reference(x, factor);
  const auto out = rowwise<Mamba3Write>({x}, {}, 0, heads, {factor});
  return {out[0], out[1]};
}

at::Tensor mamba3_output(const at::Tensor& y, const at::Tensor& x, const at::Tensor& z,
                         const at::Tensor& skip) {
  constexpr const char* op = "mamba3_output";
  const int64_t heads = skip.dim() > 0 ? skip.size(-1) : 0;
  check_sequences(op, heads, {{"y", y}, {"x", x}, {"z", z}});
  check_factor(op, "skip", skip, "y", y);
  if (!has_rowwise_kernel(y, heads)) return mamba3_output_reference(y, x, z, skip);
  return rowwise<Mamba3Output>({y, x, z}, {}, 0, heads, {skip})[0];
}

const std::string composed = "composed from tensor arithmetic";
const std::string rotation_path =
    kCudaKernels
        ? "cuda kernel sm_90a or compute_80 for state sizes that 8 divides; else " + composed
        : composed + ": built without CUDA";
const bool registered_mamba3 = register_paths(kRotate, composed, rotation_path) &&
                               register_kernels("mamba3_write") &&
                               register_kernels("mamba3_output");

}  // namespace assay::ops
