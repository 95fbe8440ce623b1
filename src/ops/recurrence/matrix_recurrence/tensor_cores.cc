// The recurrence on tensor cores as an autograd function.
#include <torch/torch.h>

#include "ops/core/asynchronous.h"
#include "ops/core/dispatch.h"
#include "ops/recurrence/matrix_recurrence/matrix_recurrence.h"

namespace assay::ops {

#ifndef ASSAY_CUDA
bool on_tensor_cores(const MatrixRecurrence&, const at::Tensor&) { return false; }
std::tuple<at::Tensor, at::Tensor> by_tensor_cores(const MatrixRecurrence&, const at::Tensor&) {
  TORCH_CHECK(false, "built without CUDA kernels");
}
#else

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The tensors that the kernel reads, in this order; undefined where absent.
enum Input { kQ, kK, kV, kA, kB, kBeta, kLogDecay, kU, kSkip, kState, kInputs };
using Inputs = std::array<at::Tensor, kInputs>;

ChunkedForward describe(const Inputs& in, Rule rule, double scale) {
  const at::Tensor& state = in[kState];
  ChunkedForward p{.rule = rule, .scale = float(scale)};
  p.batch = state.size(0);
  p.time = in[kQ].size(1);
  p.heads = state.size(1);
  p.key_dim = state.size(2);
  p.value_dim = state.size(3);
  p.q = heads(in[kQ]);
  p.k = heads(in[kK]);
  p.v = heads(in[kV]);
  p.a = heads(in[kA]);
  p.b = heads(in[kB]);
  p.beta = heads(in[kBeta]);
  p.log_decay = heads(in[kLogDecay]);
  if (const at::Tensor& g = in[kLogDecay]; g.defined()) {
    p.decay_dtype = kernel_dtype(g.scalar_type());
    p.decay_dim = g.size(3);
  }
  for (const auto& [dtype, i] : {std::pair(&p.beta_dtype, kBeta), {&p.u_dtype, kU}})
    if (in[i].defined()) *dtype = kernel_dtype(in[i].scalar_type());
  p.u = data(in[kU]);
  p.skip = static_cast<const float*>(data(in[kSkip]));
  p.initial_state = static_cast<const float*>(data(state));
  return p;
}

struct Results {
  at::Tensor out;
  at::Tensor final_state;
  at::Tensor chunks;
};
Results run(ChunkedForward p, const Inputs& in) {
  const at::Device device = in[kQ].device();
  const Results results{at::empty({p.batch, p.time, p.heads, p.value_dim}, in[kQ].options()),
                        at::empty_like(in[kState]), workspace(cuda::chunk_bytes(p), device)};
  p.out = data(results.out);
  p.final_state = static_cast<float*>(data(results.final_state));
  p.chunks = data(results.chunks);
  const at::Tensor scratch = workspace(cuda::workspace_bytes(p), device);
  cuda::matrix_recurrence(p, data(scratch), current_stream(device));
  return results;
}
// Without decays per channel, inputs are small and heads often share q and k: in Mamba-2 the states
// before all chunks have 8 times the bytes of v. The backward pass computes them again.
bool computes_again(const ChunkedForward& p) {
  return p.rule == Rule::gla && p.decay_dim <= 1 && !p.u && !cuda::is_scalar(p);
}

struct ByTensorCores : torch::autograd::Function<ByTensorCores> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const OptionalTensor& a,
                               const OptionalTensor& b, const OptionalTensor& beta,
                               const OptionalTensor& log_decay, const OptionalTensor& u,
                               const OptionalTensor& skip, const at::Tensor& state, int64_t rule,
                               double scale, bool keeps, bool b_is_k) {
    const Inputs in{q,
                    k,
                    v,
                    or_undefined(a),
                    or_undefined(b),
                    or_undefined(beta),
                    or_undefined(log_decay),
                    or_undefined(u),
                    or_undefined(skip),
                    state};
    const c10::DeviceGuard guard(q.device());
    ChunkedForward p = describe(in, Rule(rule), scale);
    p.keeps = keeps && !computes_again(p);
    const Results results = run(p, in);
    if (keeps) {
      variable_list saved(in.begin(), in.end());
      saved.push_back(p.keeps ? results.chunks : at::Tensor());
      ctx->save_for_backward(saved);
    }
    ctx->saved_data["rule"] = rule;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["b_is_k"] = b_is_k;
    ctx->set_materialize_grads(false);
    return {results.out, results.final_state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    Inputs in;
    std::copy_n(saved.begin(), kInputs, in.begin());
    const Rule rule = Rule(ctx->saved_data["rule"].toInt());
    const c10::DeviceGuard guard(in[kQ].device());
    ChunkedBackward work{describe(in, rule, ctx->saved_data["scale"].toDouble())};
    ChunkedForward& p = work.forward;
    p.keeps = true;
    const at::Tensor chunks = saved[kInputs].defined() ? saved[kInputs] : run(p, in).chunks;
    p.chunks = data(chunks);

    Inputs out;
    auto by_head = [&](Input i) {
      const int64_t heads = i == kQ || i == kK ? cuda::key_gradients(p) : p.heads;
      if (in[i].defined())
        out[i] = at::empty({p.batch, p.time, heads, in[i].size(3)}, in[i].options());
      return data(out[i]);
    };
    auto by_chunk = [&](Input i) {
      if (!in[i].defined()) return static_cast<float*>(nullptr);
      auto shape = in[i].sizes().vec();
      shape.insert(shape.begin(), cuda::chunk_count(p));
      out[i] = at::empty(shape, in[i].options());
      return static_cast<float*>(data(out[i]));
    };
    const at::Tensor dout =
        gradients[0].defined()
            ? aligned(gradients[0].contiguous())
            : at::zeros({p.batch, p.time, p.heads, p.value_dim}, in[kQ].options());
    const at::Tensor dfinal =
        gradients[1].defined() ? aligned(gradients[1].contiguous()) : at::Tensor();
    out[kState] = at::empty_like(in[kState]);
    work.dout = heads(dout);
    work.dfinal_state = static_cast<const float*>(data(dfinal));
    work.dq = by_head(kQ);
    work.dk = by_head(kK);
    work.dv = by_head(kV);
    work.da = by_head(kA);
    work.db = ctx->saved_data["b_is_k"].toBool() ? nullptr : by_head(kB);
    work.dbeta = static_cast<float*>(by_head(kBeta));
    work.dlog_decay = by_head(kLogDecay);
    work.du = by_chunk(kU);
    work.dskip = by_chunk(kSkip);
    work.dinitial_state = static_cast<float*>(data(out[kState]));
    const at::Tensor scratch = workspace(cuda::workspace_bytes(work), dout.device());
    cuda::matrix_recurrence(work, data(scratch), current_stream(dout.device()));

    for (const Input i : {kQ, kK, kV, kA, kB}) out[i] = sum_of_sharers(out[i], in[i]);
    for (const Input i : {kU, kSkip})
      if (out[i].defined()) out[i] = out[i].sum(0);
    variable_list result(out.begin(), out.end());
    result.resize(kInputs + 4);  // rule, scale, keeps and b_is_k have none
    return result;
  }
};

Rule rule_of(const MatrixRecurrence& s) {
  return s.beta.defined() ? Rule::delta : s.a.defined() ? Rule::dplr : Rule::gla;
}
at::Tensor rows(const at::Tensor& x) { return aligned_rows(sequence(x, at::kBFloat16)); }
// Gates and parameters: float32, or bfloat16 as they are where that may be.
at::ScalarType gate_dtype(const at::Tensor& x, bool may_be_half) {
  return may_be_half && x.scalar_type() == at::kBFloat16 ? at::kBFloat16 : at::kFloat;
}

bool has_scalar_decays(const MatrixRecurrence& s) {
  return on_hopper(s.q.device()) && rule_of(s) == Rule::gla && !s.u.defined() &&
         (!s.log_decay.defined() || s.log_decay.size(3) == 1);
}

bool is_recorded(const MatrixRecurrence& s, const at::Tensor& state) {
  return wants_gradient({s.q, s.k, s.v, s.a, s.b, s.beta, s.rate, s.log_decay, s.u, s.skip, state});
}

// Whether cuda::decode takes the steps.
bool is_few(const MatrixRecurrence& s, const at::Tensor& state) {
  return !s.rate.defined() && !s.skip.defined() && s.q.size(1) <= cuda::kMaxDecodeSteps &&
         !is_recorded(s, state);
}

// In sizes that the kernels have: nothing is written to what is added, nor read from it.
std::tuple<at::Tensor, at::Tensor> by_larger_sizes(MatrixRecurrence s, const at::Tensor& state,
                                                   int64_t key_dim, int64_t value_dim) {
  const auto enlarge = [](at::Tensor& x, int64_t size) {
    if (x.defined()) x = at::constant_pad_nd(x, {0, size - x.size(-1)});
  };
  for (at::Tensor* x : {&s.q, &s.k, &s.a, &s.b, &s.u}) enlarge(*x, key_dim);
  if (s.log_decay.defined() && s.log_decay.size(3) > 1) enlarge(s.log_decay, key_dim);
  enlarge(s.v, value_dim);
  const int64_t K = state.size(2);
  const int64_t V = state.size(3);
  const auto [out, last] =
      by_tensor_cores(s, at::constant_pad_nd(state, {0, value_dim - V, 0, key_dim - K}));
  return {out.narrow(3, 0, V).contiguous(), last.narrow(2, 0, K).narrow(3, 0, V).contiguous()};
}

// For decoding: nothing is kept or prepared, and gates are read in their own dtype.
std::tuple<at::Tensor, at::Tensor> by_few_steps(const MatrixRecurrence& s,
                                                const at::Tensor& state) {
  const c10::DeviceGuard guard(state.device());
  const auto gate = [](const at::Tensor& x) {
    if (!x.defined()) return x;
    const at::Tensor y = sequence(x, gate_dtype(x, true));
    if (y.size(3) == 1) return y;
    // The decays of rwkv5 are one row for all sequences, which the kernel reads where it is
    const auto is_shared = [&](int64_t i) { return y.size(i) == 1 || y.stride(i) == 0; };
    return is_shared(0) && is_shared(1) ? aligned(y) : aligned_rows(y);
  };
  const at::Tensor u = gate(s.u.defined() ? s.u.unsqueeze(0).unsqueeze(0) : s.u);
  const Inputs in{
      rows(s.q),    rows(s.k),         rows(s.v), rows(s.a), rows(s.b),
      gate(s.beta), gate(s.log_decay), u,         {},        aligned(state.contiguous())};
  ChunkedForward p = describe(in, rule_of(s), s.scale);
  const at::Tensor out = at::empty({p.batch, p.time, p.heads, p.value_dim}, in[kQ].options());
  const at::Tensor last = next_state(in[kState]);
  p.out = data(out);
  p.final_state = static_cast<float*>(data(last));
  cuda::decode(p, current_stream(state.device()));
  return {out, last};
}

}  // namespace

bool on_tensor_cores(const MatrixRecurrence& s, const at::Tensor& state) {
  if (state.scalar_type() != at::kFloat || s.q.scalar_type() != at::kBFloat16) return false;
  if (!s.k.defined()) return false;
  if (!on_gpu(state.device())) return false;
  const int64_t key_dim = cuda::key_size(rule_of(s), s.u.defined(), state.size(2));
  if (key_dim == 0) return false;
  // Over a whole sequence a delta rule's short keys stay in fp32: rounded to bf16 they cost 1.0
  // to 1.5 %.
  const bool fits = key_dim == state.size(2) && state.size(3) % 16 == 0;
  if (!fits && rule_of(s) != Rule::gla && !is_few(s, state)) return false;
  if (s.decay.defined() || s.c.defined() || s.e.defined()) return false;
  if (s.beta.defined() && s.log_decay.defined() && s.log_decay.size(3) > 1) return false;
  if (s.rate.defined() || s.skip.defined())
    return s.transition == Transition::diagonal && !s.beta.defined() && !s.u.defined() &&
           s.log_decay.defined() && s.log_decay.size(3) == 1;
  return s.transition == Transition::diagonal
             ? !(s.u.defined() && s.beta.defined())
             : s.transition == Transition::rank_one && !s.u.defined();
}

std::tuple<at::Tensor, at::Tensor> by_tensor_cores(const MatrixRecurrence& s,
                                                   const at::Tensor& state) {
  const bool keeps = is_recorded(s, state);
  const bool few = is_few(s, state);
  const int64_t key_dim = cuda::key_size(rule_of(s), s.u.defined(), state.size(2));
  const int64_t value_dim = cuda::value_size(state.size(3), few, has_scalar_decays(s));
  if (key_dim != state.size(2) || value_dim != state.size(3))
    return by_larger_sizes(s, state, key_dim, value_dim);
  if (few) return by_few_steps(s, state);
  const at::Tensor beta = sequence(optional(s.rate.defined() ? s.rate : s.beta), at::kFloat);
  const at::Tensor g = s.log_decay.defined()
                           ? sequence(s.log_decay, gate_dtype(s.log_decay, s.log_decay.size(3) > 1))
                           : s.log_decay;
  const at::Tensor u = parameter(optional(s.u), at::kFloat);
  const at::Tensor skip = parameter(optional(s.skip), at::kFloat);
  const variable_list out = ByTensorCores::apply(
      rows(s.q), rows(s.k), rows(s.v), optional(rows(s.a)), optional(rows(s.b)), optional(beta),
      optional(g), optional(u), optional(skip), aligned(state.contiguous()), int64_t(rule_of(s)),
      s.scale, keeps, s.b.defined() && s.b.is_same(s.k));
  return {out[0], out[1]};
}

#endif

}  // namespace assay::ops
