#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/torch.h>

#include <algorithm>

#include "ops/core/called.h"
#include "ops/core/dispatch.h"
#include "ops/core/parallel.h"
#include "ops/core/paths.h"
#include "ops/core/tensors.h"
#include "ops/cpu/cpu_tiles.h"
#include "ops/dense/linear/kernel.h"
#include "ops/dense/linear/linear.h"
#include "ops/rowwise/glu/glu.h"
#include "ops/rowwise/norm/norm.h"

namespace assay::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using OneDnnLinear = at::Tensor(const at::Tensor&, const at::Tensor&,
                                const std::optional<at::Tensor>&, std::string_view,
                                c10::List<std::optional<at::Scalar>>,
                                std::optional<std::string_view>);

// Registered by torch where it was built with oneDNN.
const auto* onednn() {
  static const auto op = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  return op && at::globalContext().userEnabledMkldnn() ? &*op : nullptr;
}

bool uses_onednn(const at::Tensor& x) {
  return x.is_cpu() && x.scalar_type() == at::kFloat && onednn();
}

// Without AVX-512, oneDNN has no products in bfloat16, and those of torch take a multiple of the
// time of a conversion and a product in float32.
bool is_faster_in_f32(const at::Tensor& x) {
  static const bool onednn_has_bf16 = [] {
    const auto op =
        c10::Dispatcher::singleton().findSchema({"mkldnn::_is_mkldnn_bf16_supported", ""});
    return op && op->typed<bool()>().call();
  }();
  return x.is_cpu() && x.scalar_type() == at::kBFloat16 && !onednn_has_bf16;
}

at::Tensor onednn_linear(const at::Tensor& x, const at::Tensor& weight,
                         const OptionalTensor& bias) {
  static const auto call = onednn()->typed<OneDnnLinear>();
  return call.call(x, weight, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

// With fewer rows, a library is faster, because the kernel copies the weight first.
constexpr int64_t kManyRows = 256;
bool has_many_rows(const at::Tensor& x) { return x.numel() >= kManyRows * x.size(-1); }

// The kernel reads two numbers in bfloat16 at a time.
bool has_words(const at::Tensor& matrix) {
  if (matrix.scalar_type() == at::kFloat) return true;
  return matrix.scalar_type() == at::kBFloat16 &&
         reinterpret_cast<uintptr_t>(matrix.data_ptr()) % 4 == 0;
}
// Whether a product with this result is left to oneDNN, which is at least as fast with AMX.
bool is_for_onednn(at::ScalarType result) { return result == at::kBFloat16 && cpu::has_tiles(); }
bool is_matrix(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_contiguous() && tensor.numel() > 0 && has_words(tensor);
}
// Whether the kernel serves product(a, b). `a` may have any number of dimensions.
bool serves_many_rows(const at::Tensor& a, const at::Tensor& b) {
  const bool fits = b.dim() == 2 && a.size(-1) == b.size(1) && a.scalar_type() == b.scalar_type();
  return fits && is_matrix(a) && (is_matrix(b) || is_matrix(b.t())) &&
         !is_for_onednn(a.scalar_type()) && has_many_rows(a) &&
         (a.scalar_type() == at::kFloat || a.size(-1) % 2 == 0);
}

void multiply(MatrixProduct work, const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  work.dtype = kernel_dtype(a.scalar_type());
  work.a = data(a);
  work.b = data(b);
  work.c_dtype = kernel_dtype(c.scalar_type());
  work.c = data(c);
  work.tasks = at::get_num_threads();
  const size_t bytes = cpu::workspace_bytes(work);
  cpu::matrix_product(work, workspace(bytes, at::kCPU).data_ptr(), at_parallel_for());
}

// a bᵀ + bias by the kernel, [..., N].
at::Tensor many_rows(const at::Tensor& a, const at::Tensor& b, const OptionalTensor& bias = {}) {
  std::vector<int64_t> shape = a.sizes().vec();
  shape.back() = b.size(0);
  const at::Tensor c = at::empty(shape, a.options());
  const at::Tensor wide = parameter(bias, at::kFloat);
  const MatrixProduct work{.rows = a.numel() / a.size(-1),
                           .columns = b.size(0),
                           .depth = a.size(-1),
                           .b_transposed = b.is_contiguous(),
                           .bias = static_cast<const float*>(data(wide))};
  multiply(work, a, b, c);
  return c;
}

// x Wᵀ + b of many rows by the kernel or by oneDNN.
at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  return serves_many_rows(x, weight) ? many_rows(x, weight, bias) : onednn_linear(x, weight, bias);
}

at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x) {
  at::Tensor dweight = at::empty({dy.size(1), x.size(1)}, x.options());
  ops::weight_gradient(dy, x, dweight, /*add=*/false);
  return dweight;
}

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const OptionalTensor& bias) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["bias"] = bias.has_value();
    return ops::forward(x, weight, bias);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& weight = saved[1];
    const at::Tensor x = saved[0].flatten(0, -2);
    const at::Tensor dy = gradients[0].contiguous();
    const at::Tensor rows = dy.flatten(0, -2);
    const at::Tensor dx = ctx->needs_input_grad(0) ? product(dy, weight.t()) : at::Tensor();
    return {dx, weight_gradient(rows, x),
            ctx->saved_data["bias"].toBool() ? rows.sum(0) : at::Tensor()};
  }
};

// Columns of zeros that a product without a bias gets on a GPU: rows of bfloat16 then begin at
// multiples of 16 bytes, which fast products and kernels that read parts of a row need.
int64_t missing_columns(const at::Tensor& weight, const OptionalTensor& bias) {
  return weight.is_cuda() && !bias ? -weight.size(0) & 7 : 0;
}
at::Tensor with_more_columns(const at::Tensor& weight, int64_t missing) {
  return at::constant_pad_nd(weight, {0, 0, 0, missing});
}

// `weight` in bfloat16. A new version gets new memory: a graph may still need the earlier one.
at::Tensor rounded_weight(const at::Tensor& weight,
                          const c10::intrusive_ptr<RoundedWeight>& rounded) {
  if (rounded && rounded->is_of(weight)) return rounded->value;
  const at::Tensor value = weight.to(at::kBFloat16);
  if (rounded) {
    rounded->value = value;
    rounded->version = int64_t(weight._version());
  }
  return value;
}

struct MasterLinear : torch::autograd::Function<MasterLinear> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& master,
                            const OptionalTensor& bias,
                            const c10::intrusive_ptr<GradientPlace>& place,
                            const c10::intrusive_ptr<RoundedWeight>& rounded) {
    const int64_t missing = missing_columns(master, bias);
    at::Tensor weight = rounded_weight(master, rounded);
    if (missing > 0) weight = with_more_columns(weight, missing);
    ctx->save_for_backward({x, weight, master});
    ctx->saved_data["bias"] = bias.has_value();
    if (place) ctx->saved_data["place"] = c10::IValue::make_capsule(place);
    const auto narrow = bias ? OptionalTensor(bias->to(x.scalar_type())) : bias;
    if (serves_many_rows(x, weight)) return many_rows(x, weight, narrow);
    if (missing > 0) return at::linear(x, weight).narrow(-1, 0, master.size(0));
    if (!is_faster_in_f32(x)) return at::linear(x, weight, narrow);
    const at::Tensor y = product(x, weight);
    return narrow ? y.add_(*narrow) : y;
  }
  // Memory for the gradient of `master`.
  static at::Tensor gradient_memory(AutogradContext* ctx, const at::Tensor& master) {
    const auto found = ctx->saved_data.find("place");
    const auto apart = [&] { return at::empty(master.sizes(), master.options()); };
    if (found == ctx->saved_data.end() || master.grad().defined()) return apart();
    auto& place = static_cast<GradientPlace&>(*found->second.toCapsule());
    if (!std::exchange(place.is_free, false)) return apart();
    return at::alias(place.memory);  // autograd keeps a tensor that nobody else holds
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    at::Tensor dy = gradients[0].flatten(0, -2);
    if (at::GradMode::is_enabled()) {  // create_graph: in operators of torch, differentiable
      const at::Tensor same_weight = saved[2].to(x.scalar_type());
      return {at::matmul(dy, same_weight).view(x.sizes()),
              at::matmul(dy.t(), x.flatten(0, -2)).to(at::kFloat),
              ctx->saved_data["bias"].toBool() ? dy.sum(0, false, at::kFloat) : at::Tensor(),
              {},
              {}};
    }
    if (dy.is_cpu()) dy = dy.contiguous();
    const int64_t columns = dy.size(1);
    const int64_t missing = weight.size(0) - columns;
    if (missing > 0) dy = at::constant_pad_nd(dy, {0, missing});
    at::Tensor dweight = missing > 0 ? at::empty(weight.sizes(), saved[2].options())
                                     : gradient_memory(ctx, saved[2]);
    ops::weight_gradient(dy, x.flatten(0, -2), dweight, /*add=*/false);
    return {ctx->needs_input_grad(0) ? product(dy, weight.t()).view(x.sizes()) : at::Tensor(),
            missing > 0 ? dweight.narrow(0, 0, columns) : dweight,
            ctx->saved_data["bias"].toBool() ? dy.sum(0, false, at::kFloat) : at::Tensor(),
            {},
            {}};
  }
};

// With more rows, a library is faster (README.md next to this file).
int64_t most_few_rows(at::ScalarType dtype) { return dtype == at::kBFloat16 ? 16 : 8; }

bool serves_few_rows(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const bool dtype = x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16;
  return x.is_cpu() && dtype && x.dim() > 1 && x.numel() > 0 &&
         x.numel() <= most_few_rows(x.scalar_type()) * x.size(-1) && weight.is_contiguous() &&
         weight.scalar_type() == x.scalar_type() && !wants_gradient({x, weight, bias});
}

// The kernel reads all rows of x for every 16 rows of the weight. With many rows and a large weight
// this takes longer than the library. More than 16 rows need the shared memory of Hopper.
bool serves_few_rows_on_cuda(const at::Tensor& x, const at::Tensor& weight,
                             const at::Tensor& bias) {
  if (!on_gpu(x.device()) || x.scalar_type() != at::kBFloat16 || x.numel() == 0) return false;
  const int64_t rows = x.numel() / x.size(-1);
  const int64_t most = weight.size(0) <= 8192 && on_hopper(x.device()) ? 64 : 16;
  return rows <= most && x.size(-1) % 8 == 0 && weight.is_contiguous() &&
         weight.scalar_type() == x.scalar_type() && weight.device() == x.device() &&
         reinterpret_cast<uintptr_t>(weight.data_ptr()) % 16 == 0 &&
         !wants_gradient({x, weight, bias});
}

// Whether the kernel also normalises x + y. Each of its blocks normalises all rows, so with more
// rows a kernel of the norm alone is faster.
bool serves_norm(const at::Tensor& x, const at::Tensor& y, const at::Tensor& norm_weight,
                 const at::Tensor& weight, const at::Tensor& bias) {
  const auto vectors = [&](const at::Tensor& tensor, at::ScalarType dtype) {
    return tensor.scalar_type() == dtype && tensor.device() == x.device() &&
           tensor.is_contiguous() && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  };
  if (!serves_few_rows_on_cuda(x, weight, bias) || wants_gradient({y, norm_weight})) return false;
  const int64_t rows = x.numel() / x.size(-1);
  return rows <= 2 && x.size(-1) <= 2048 && rows * weight.numel() <= int64_t{1} << 26 &&
         vectors(x, at::kBFloat16) && vectors(norm_weight, at::kFloat) &&
         (!y.defined() || (vectors(y, at::kBFloat16) && y.sizes() == x.sizes()));
}

// The rows are those of the norm of x + added, if its weight is defined; sum gets x + added.
struct NormOfRows {
  at::Tensor weight;
  at::Tensor added;
  at::Tensor sum;
  double eps = 0;
};
at::Tensor few_rows(const at::Tensor& sequence, const at::Tensor& weight, const at::Tensor& bias,
                    const std::optional<GluActivation>& glu, bool weight_at_rest,
                    const NormOfRows& norm = {}) {
  const at::Tensor x = aligned(sequence.contiguous());
  const at::Tensor b = parameter(optional(bias), x.scalar_type());
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = weight.size(0) / (glu ? 2 : 1);
  const at::Tensor y = at::empty(shape, x.options());
  LinearFewRows work{.dtype = kernel_dtype(x.scalar_type()),
                     .rows = x.numel() / x.size(-1),
                     .in = x.size(-1),
                     .out = weight.size(0),
                     .x = data(x),
                     .weight = data(weight),
                     .bias = data(b),
                     .y = data(y),
                     .gated = glu.has_value(),
                     .weight_at_rest = weight_at_rest,
                     .norm_weight = static_cast<const float*>(data(norm.weight)),
                     .eps = norm.eps,
                     .added = data(norm.added),
                     .sum = data(norm.sum)};
  if (glu) {
    work.c = glu->c;
    work.a = glu->a;
  }
  dispatch(
      x.device(),
      [&](const auto& pool) {
        const size_t bytes = cpu::workspace_bytes(work);
        cpu::linear_few_rows(work, workspace(bytes, at::kCPU).data_ptr(), pool);
      },
      [&](auto stream) { cuda::linear_few_rows(work, stream); });
  return y;
}

void check(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  record_call("linear");
  check_dims("linear", "weight", weight, 2, "[N, K]");
  check_shape("linear", "weight", weight, {weight.size(0), x.size(-1)}, "[N, K]");
  if (bias.defined()) check_shape("linear", "bias", bias, {weight.size(0)}, "[N]");
}

const bool registered = register_paths(
    "linear",
    cpu_kernel_path() +
        " for up to 8 rows in float32 and 16 in bfloat16 without a gradient, "
        "for 256 rows or more, and for gradients of weights; "
        "else torch (also bfloat16 with AMX)",
    kCudaKernels
        ? "cuda kernel sm_90a or compute_80 without a gradient for up to 64 rows in bfloat16, "
          "16 on GPUs other than Hopper and if the weight has more than 8,192 rows; else torch"
        : "torch (built without CUDA)",
    /*cuda_numerics=*/1, /*cpu_numerics=*/2);

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                  bool weight_at_rest) {
  check(x, weight, bias);
  if (serves_few_rows(x, weight, bias) || serves_few_rows_on_cuda(x, weight, bias))
    return few_rows(x, weight, bias, {}, weight_at_rest);
  const int64_t missing = missing_columns(weight, optional(bias));
  if (missing > 0 && x.scalar_type() == at::kBFloat16 && has_many_rows(x))
    return at::linear(x, with_more_columns(weight, missing)).narrow(-1, 0, weight.size(0));
  const bool many = x.is_cpu() && x.dim() > 1 && serves_many_rows(x.contiguous(), weight);
  if (!many && is_faster_in_f32(x))
    return linear(x.to(at::kFloat), weight.to(at::kFloat),
                  bias.defined() ? bias.to(at::kFloat) : bias)
        .to(x.scalar_type());
  if (!many && (!uses_onednn(x) || x.dim() < 2)) return at::linear(x, weight, optional(bias));
  if (!wants_gradient({x, weight, bias})) return forward(x.contiguous(), weight, optional(bias));
  return LinearFunction::apply(x.contiguous(), weight, optional(bias));
}

at::Tensor linear_of_master(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            const c10::intrusive_ptr<GradientPlace>& place,
                            const c10::intrusive_ptr<RoundedWeight>& rounded) {
  check(x, weight, bias);
  return MasterLinear::apply(x.is_cpu() ? x.contiguous() : x, weight, optional(bias), place,
                             rounded);
}

at::Tensor linear_glu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      std::string_view activation, bool weight_at_rest) {
  check(x, weight, bias);
  if (serves_few_rows_on_cuda(x, weight, bias) && weight.size(0) % 2 == 0)
    return few_rows(x, weight, bias, glu_activation(activation), weight_at_rest);
  return glu(linear(x, weight, bias, weight_at_rest), activation);
}

std::pair<at::Tensor, at::Tensor> norm_linear(const at::Tensor& x, const at::Tensor& y,
                                              const at::Tensor& norm_weight, double eps,
                                              const at::Tensor& weight, const at::Tensor& bias,
                                              std::string_view activation, bool weight_at_rest) {
  check(x, weight, bias);
  const bool gated = !activation.empty();
  if (serves_norm(x, y, norm_weight, weight, bias) && !(gated && weight.size(0) % 2)) {
    check_shape("rms_norm", "weight", norm_weight, {x.size(-1)}, "[D]");
    const NormOfRows norm{norm_weight, y, y.defined() ? at::empty_like(x) : y, eps};
    const auto glu = gated ? std::optional(glu_activation(activation)) : std::nullopt;
    const at::Tensor out = few_rows(x, weight, bias, glu, weight_at_rest, norm);
    return {y.defined() ? norm.sum : x, out};
  }
  const auto [sum, normed] = y.defined() ? add_norm(x, y, norm_weight, std::nullopt, eps)
                                         : std::pair(x, rms_norm(x, norm_weight, eps));
  return {sum, gated ? linear_glu(normed, weight, bias, activation, weight_at_rest)
                     : linear(normed, weight, bias, weight_at_rest)};
}

void weight_gradient(const at::Tensor& dy, const at::Tensor& x, at::Tensor& dweight, bool add) {
  record_call("linear");
  const auto dtype = dweight.scalar_type();
  const bool fits = dy.dim() == 2 && x.dim() == 2 && dy.size(0) == x.size(0) &&
                    dy.scalar_type() == x.scalar_type() &&
                    dweight.sizes() == at::IntArrayRef({dy.size(1), x.size(1)});
  const bool kernel = fits && is_matrix(dy) && is_matrix(x) && dweight.numel() > 0 &&
                      dweight.is_contiguous() && !is_for_onednn(dtype) &&
                      (dtype == at::kFloat || (dtype == x.scalar_type() && !add));
  if (kernel) {
    const MatrixProduct work{.rows = dy.size(1),
                             .columns = x.size(1),
                             .depth = x.size(0),
                             .a_transposed = true,
                             .add = add};
    multiply(work, dy, x, dweight);
  } else if (dtype == x.scalar_type()) {
    at::addmm_out(dweight, dweight, dy.t(), x, add ? 1 : 0);
  } else if (x.is_cuda()) {
    if (add) at::addmm_out(dweight, dweight, dy.t(), x, dtype);
    else at::mm_out(dweight, dy.t(), x, dtype);
  } else {
    const at::Tensor narrow = at::mm(dy.t(), x);
    if (add) dweight.add_(narrow);
    else dweight.copy_(narrow);
  }
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  record_call("linear");
  check_shape("product", "b", b, {b.size(0), a.size(-1)}, "[N, K]");
  if (serves_many_rows(a, b)) return many_rows(a, b);
  if (is_faster_in_f32(a)) return product(a.to(at::kFloat), b.to(at::kFloat)).to(a.scalar_type());
  return uses_onednn(a) ? onednn_linear(a, b, {}) : at::matmul(a, b.t());
}

}  // namespace assay::ops
