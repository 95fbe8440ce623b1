// assay::taylor_exp_attention: checks and registration.
#include <torch/torch.h>

#include "ops/core/dispatch.h"
#include "ops/core/register.h"
#include "ops/recurrence/matrix_recurrence/matrix_recurrence.h"
#include "ops/recurrence/taylor_exp/kernel.h"
#include "ops/recurrence/taylor_exp/taylor_exp.h"

namespace assay::ops {

namespace {
constexpr const char* kOp = "taylor_exp_attention";

// By the device's kernel.
template <class... Pointers>
void run(const TaylorFeatures& p, const at::Device& device, Pointers... pointers) {
  dispatch(
      device, [&](const auto& pool) { cpu::taylor_features(p, pointers..., pool); },
      [&](auto stream) { cuda::taylor_features(p, pointers..., stream); });
}

struct Features : torch::autograd::Function<Features> {
  static TaylorFeatures describe(const at::Tensor& x, const at::Tensor& weights) {
    return {kernel_dtype(x.scalar_type()), x.numel() / x.size(-1), x.size(-1), data(x),
            data(weights)};
  }
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const OptionalTensor& weights) {
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = feature_count(x.size(-1));
    const at::Tensor y = at::empty(shape, x.options());
    run(describe(x, or_undefined(weights)), x.device(), data(y));
    ctx->save_for_backward({x, or_undefined(weights)});
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor dy = gradients[0].contiguous();
    const at::Tensor dx = at::empty_like(saved[0]);
    run(describe(saved[0], saved[1]), dx.device(), static_cast<const void*>(data(dy)), data(dx));
    return {dx, at::Tensor()};
  }
};

// weights ⊙ φ(x)
at::Tensor features(const at::Tensor& x, const OptionalTensor& weights = {}) {
  if (x.is_cpu() || on_gpu(x.device())) return Features::apply(x.contiguous(), weights);
  return weights ? taylor_exp_features(x) * *weights : taylor_exp_features(x);
}

#ifdef ASSAY_CUDA
bool in_few_steps(const HeadShape& shape, const at::Tensor& q, const at::Tensor& k,
                  const at::Tensor& v, const OptionalTensor& initial_state) {
  const int64_t size = feature_count(shape.key_dim) * (shape.value_dim + 1);
  return on_hopper(q.device()) && !wants_gradient({q, k, v, or_undefined(initial_state)}) &&
         size <= kMaxTaylorState && shape.time <= kFewTaylorSteps &&
         shape.key_dim <= kMaxTaylorKey && shape.value_dim <= kMaxTaylorValue &&
         sequence_dtype({q, k, v}) != at::kDouble;
}

std::tuple<at::Tensor, at::Tensor> by_few_steps(const HeadShape& shape, const at::Tensor& q,
                                                const at::Tensor& k, const at::Tensor& v,
                                                double scale, bool normalize, double eps,
                                                const OptionalTensor& initial_state) {
  const c10::DeviceGuard guard(q.device());
  auto as_read = [](const at::Tensor& x) {
    return sequence(x, x.scalar_type() == at::kBFloat16 ? at::kBFloat16 : at::kFloat);
  };
  const at::Tensor query = as_read(q);
  const at::Tensor key = as_read(k);
  const at::Tensor value = as_read(v);
  at::Tensor first = parameter(initial_state, at::kFloat);
  if (first.defined() && reinterpret_cast<uintptr_t>(first.data_ptr()) % 16) first = first.clone();
  const at::Tensor out =
      at::empty({shape.batch, shape.time, shape.heads, shape.value_dim}, query.options());
  const at::Tensor last =
      at::empty({shape.batch, shape.heads, feature_count(shape.key_dim), shape.value_dim + 1},
                q.options().dtype(at::kFloat));
  TaylorSteps p{shape.batch,     shape.time,   shape.heads, shape.key_dim,
                shape.value_dim, float(scale), float(eps),  normalize};
  p.q = heads(query);
  p.k = heads(key);
  p.v = heads(value);
  p.q_dtype = kernel_dtype(query.scalar_type());
  p.k_dtype = kernel_dtype(key.scalar_type());
  p.v_dtype = kernel_dtype(value.scalar_type());
  p.initial_state = static_cast<const float*>(data(first));
  p.out = data(out);
  p.final_state = static_cast<float*>(data(last));
  cuda::decode(p, current_stream(q.device()));
  return {out.to(q.scalar_type()), last};
}
#endif

}  // namespace

std::tuple<at::Tensor, at::Tensor> taylor_exp_attention(const at::Tensor& q, const at::Tensor& k,
                                                        const at::Tensor& v, double scale,
                                                        bool normalize, double eps,
                                                        const OptionalTensor& initial_state) {
  const HeadShape shape = check_heads(kOp, "q", q, k, v, scale);
  TORCH_CHECK_VALUE(std::isfinite(eps) && eps >= 0, kOp, ": eps is ", eps,
                    ", expected a finite number of 0 or more");
  const int64_t F = feature_count(shape.key_dim);
  if (initial_state) {
    check_shape(kOp, "initial_state", *initial_state,
                {shape.batch, shape.heads, F, shape.value_dim + 1},
                "[B, H, 1 + K + K(K+1)/2, V + 1]");
    check_like(kOp, "initial_state", *initial_state, "q", q);
  }
#ifdef ASSAY_CUDA
  if (in_few_steps(shape, q, k, v, initial_state))
    return by_few_steps(shape, q, k, v, scale, normalize, eps, initial_state);
#endif
  const auto sequence = sequence_dtype({q, k, v});
  const auto real = real_dtype(sequence);
  // In bf16 the sums of the tensor cores take a feature with its rounding, as they take
  // every key's number.
  const auto as = on_gpu(q.device()) && F <= cuda::kLargestKey ? sequence : real;
  const at::Tensor weights = taylor_exp_weights(shape.key_dim, scale, q.options().dtype(real));
  const Prepare prepare = [=](const std::vector<at::Tensor>& s) {
    const at::Tensor value = s[2].to(as);
    return MatrixRecurrence{.q = features(s[0].to(as), weights),
                            .k = features(s[1].to(as)),
                            .v = at::cat({value, at::ones_like(value.narrow(-1, 0, 1))}, -1)};
  };
  const at::Tensor state =
      first_state(initial_state, {shape.batch, shape.heads, F, shape.value_dim + 1}, real, q);
  const auto [rounded, last] = recurrence(prepare, {q, k, v}, state, shape.time);
  const at::Tensor sums = rounded.to(real);
  at::Tensor out = sums.narrow(-1, 0, shape.value_dim);
  if (normalize) out = out / (sums.narrow(-1, shape.value_dim, 1) + eps);
  return {out.to(q.scalar_type()).contiguous(), last};  // without the column of normalisers
}

const bool registered_path =
    register_matrix_recurrence(kOp, /*cuda_numerics=*/2, /*cpu_numerics=*/2);
TORCH_LIBRARY_FRAGMENT(assay, m) {
  register_operator(
      m,
      "taylor_exp_attention(Tensor q, Tensor k, Tensor v, float scale, bool normalize, float eps, "
      "Tensor? initial_state=None) -> (Tensor out, Tensor final_state)",
      "out_t = Σ_j w_tj v_j / Σ_j w_tj, w = 1 + s + s²/2, s = scale · q_t·k_j, j ≤ t",
      taylor_exp_attention);
}

}  // namespace assay::ops
