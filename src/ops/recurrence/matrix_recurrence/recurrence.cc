// The recurrence as an autograd function around the kernel, and the choice of the path.
#include <torch/torch.h>

#include <algorithm>

#include "ops/core/parallel.h"
#include "ops/core/paths.h"
#include "ops/recurrence/checkpointed_scan.h"
#include "ops/recurrence/matrix_recurrence/matrix_recurrence.h"

namespace assay::ops {
namespace {

// Steps that batched products work on at once: tensors of about 2²⁴ numbers fill a GPU.
int64_t segment_length(const at::Tensor& state) {
  const int64_t step = state.size(0) * state.size(1) * std::max(state.size(2), state.size(3));
  return std::clamp<int64_t>((int64_t(1) << 24) / step, 64, 4096) / 64 * 64;
}

MatrixRecurrenceForward describe(const MatrixRecurrence& s, const at::Tensor& state) {
  MatrixRecurrenceForward p{kernel_dtype(state.scalar_type()), s.transition};
  p.batch = state.size(0);
  p.time = s.q.size(1);
  p.heads = state.size(1);
  p.key_dim = state.size(2);
  p.value_dim = state.size(3);
  p.decay_dim = s.decay.defined() ? s.decay.size(3) : 1;
  p.q = heads(s.q);
  p.k = heads(s.k);
  p.v = heads(s.v);
  p.decay = heads(s.decay);
  p.a = heads(s.a);
  p.b = heads(s.b);
  p.c = heads(s.c);
  p.e = heads(s.e);
  p.u = data(s.u);
  p.initial_state = data(state);
  return p;
}

template <class Work>  // MatrixRecurrenceForward or …Backward
void launch(const Work& work) {
  cpu::matrix_recurrence(work, workspace(cpu::workspace_bytes(work), at::kCPU).data_ptr(),
                         at_parallel_for());
}

struct Outputs {
  at::Tensor out;
  at::Tensor final_state;
  at::Tensor chunk_states;
};
Outputs run(const MatrixRecurrence& steps, const at::Tensor& state, bool with_gradient) {
  MatrixRecurrenceForward p = describe(steps, state);
  Outputs outputs{at::empty({p.batch, p.time, p.heads, p.value_dim}, state.options()),
                  at::empty_like(state),
                  {}};
  const int64_t chunks = (p.time + cpu::kStateChunk - 1) / cpu::kStateChunk;
  if (with_gradient)
    outputs.chunk_states =
        at::empty({p.batch, chunks, p.heads, p.key_dim, p.value_dim}, state.options());
  p.out = data(outputs.out);
  p.final_state = data(outputs.final_state);
  p.chunk_states = data(outputs.chunk_states);
  launch(p);
  return outputs;
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Recurrence : torch::autograd::Function<Recurrence> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const OptionalTensor& k,
                               const OptionalTensor& v, const OptionalTensor& decay,
                               const OptionalTensor& a, const OptionalTensor& b,
                               const OptionalTensor& c, const OptionalTensor& e,
                               const OptionalTensor& u, const at::Tensor& state, int64_t low) {
    const MatrixRecurrence s{.transition = Transition(low),
                             .q = q,
                             .k = or_undefined(k),
                             .v = or_undefined(v),
                             .a = or_undefined(a),
                             .b = or_undefined(b),
                             .c = or_undefined(c),
                             .e = or_undefined(e),
                             .u = or_undefined(u),
                             .decay = or_undefined(decay)};
    const Outputs outputs = run(s, state, true);
    ctx->save_for_backward(
        {q, s.k, s.v, s.decay, s.a, s.b, s.c, s.e, s.u, state, outputs.chunk_states});
    ctx->saved_data["transition"] = low;
    ctx->set_materialize_grads(false);
    return {outputs.out, outputs.final_state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const MatrixRecurrence s{.transition = Transition(ctx->saved_data["transition"].toInt()),
                             .q = saved[0],
                             .k = saved[1],
                             .v = saved[2],
                             .a = saved[4],
                             .b = saved[5],
                             .c = saved[6],
                             .e = saved[7],
                             .u = saved[8],
                             .decay = saved[3]};
    const at::Tensor& state = saved[9];
    MatrixRecurrenceBackward work{describe(s, state)};
    const MatrixRecurrenceForward& p = work.forward;
    auto by_head = [&](const at::Tensor& x) {
      return x.defined() ? at::empty({p.batch, p.time, p.heads, x.size(3)}, state.options())
                         : at::Tensor();
    };
    const at::Tensor dq = by_head(s.q);
    const at::Tensor dk = by_head(s.k);
    const at::Tensor dv = by_head(s.v);
    const at::Tensor ddecay = by_head(s.decay);
    const at::Tensor da = by_head(s.a);
    const at::Tensor db = by_head(s.b);
    const at::Tensor dc = by_head(s.c);
    const at::Tensor de = by_head(s.e);
    const at::Tensor du = s.u.defined() ? at::empty_like(s.u) : at::Tensor();
    const at::Tensor dstate = at::empty_like(state);
    const at::Tensor dout =
        gradients[0].defined()
            ? gradients[0].contiguous()
            : at::zeros({p.batch, p.time, p.heads, p.value_dim}, state.options());
    const at::Tensor dfinal = gradients[1].defined() ? gradients[1].contiguous() : at::Tensor();
    work.forward.chunk_states = data(saved[10]);
    work.dout = data(dout);
    work.dfinal_state = data(dfinal);
    work.dq = data(dq);
    work.dk = data(dk);
    work.dv = data(dv);
    work.ddecay = data(ddecay);
    work.da = data(da);
    work.db = data(db);
    work.dc = data(dc);
    work.de = data(de);
    work.du = data(du);
    work.dinitial_state = data(dstate);
    launch(work);
    return {sum_of_sharers(dq, s.q),
            sum_of_sharers(dk, s.k),
            sum_of_sharers(dv, s.v),
            ddecay,
            sum_of_sharers(da, s.a),
            sum_of_sharers(db, s.b),
            sum_of_sharers(dc, s.c),
            sum_of_sharers(de, s.e),
            du,
            dstate,
            at::Tensor()};
  }
};

std::tuple<at::Tensor, at::Tensor> by_kernel(MatrixRecurrence s, const at::Tensor& initial_state) {
  const auto dtype = initial_state.scalar_type();
  for (at::Tensor* x : {&s.q, &s.k, &s.v, &s.decay, &s.a, &s.b, &s.c, &s.e})
    *x = sequence(optional(*x), dtype);
  s.u = parameter(optional(s.u), dtype);
  const at::Tensor state = initial_state.contiguous();
  if (!wants_gradient({s.q, s.k, s.v, s.decay, s.a, s.b, s.c, s.e, s.u, state})) {
    const Outputs outputs = run(s, state, false);
    return {outputs.out, outputs.final_state};
  }
  const variable_list out = Recurrence::apply(
      s.q, optional(s.k), optional(s.v), optional(s.decay), optional(s.a), optional(s.b),
      optional(s.c), optional(s.e), optional(s.u), state, int64_t(s.transition));
  return {out[0], out[1]};
}

// `run` of the expanded steps, and what passes the state by.
std::tuple<at::Tensor, at::Tensor> with_skip(MatrixRecurrence s, const at::Tensor& state,
                                             auto&& run) {
  const auto real = state.scalar_type();
  if (!s.skip.defined()) return run(expanded(s, real), state);
  s.v = s.v.to(real);  // once: the gradients of both its uses are added before they are rounded
  const auto [out, last] = run(expanded(s, real), state);
  return {out + s.skip.to(real).unsqueeze(-1) * with_heads(s.v, s.skip.size(0)), last};
}

}  // namespace

HeadView heads(const at::Tensor& x) {
  return x.defined() ? HeadView{view(x), x.size(2)} : HeadView{};
}

at::Tensor sum_of_sharers(const at::Tensor& gradient, const at::Tensor& input) {
  if (!gradient.defined() || gradient.size(2) == input.size(2)) return gradient;
  return gradient.unflatten(2, {input.size(2), -1}).sum(3);
}

MatrixRecurrence expanded(const MatrixRecurrence& steps, at::ScalarType real) {
  MatrixRecurrence s = steps;
  for (at::Tensor* x :
       {&s.q, &s.k, &s.v, &s.log_decay, &s.a, &s.b, &s.c, &s.e, &s.u, &s.beta, &s.rate, &s.decay})
    if (x->defined()) *x = x->to(real);
  if (s.rate.defined()) s.v = s.rate * with_heads(s.v, s.rate.size(2));
  s.rate = s.skip = at::Tensor();
  if (s.scale != 1) {
    s.q = s.q * s.scale;
    s.scale = 1;
  }
  if (s.log_decay.defined()) {
    s.decay = at::exp(s.log_decay);
    s.log_decay = at::Tensor();
  }
  if (!s.beta.defined()) return s;
  s.transition = Transition::rank_one;
  s.b = with_heads(s.k, s.beta.size(2));
  s.c = s.beta * with_heads(s.v, s.beta.size(2));
  s.a = -s.beta * s.b;
  if (s.decay.defined()) s.a = s.a * s.decay;  // the rule reads the state after its decay
  s.k = s.v = s.beta = at::Tensor();
  return s;
}

std::tuple<at::Tensor, at::Tensor> recurrence(const Prepare& prepare,
                                              const std::vector<at::Tensor>& arguments,
                                              const at::Tensor& initial_state, int64_t time,
                                              int64_t chunk_size) {
  if (initial_state.is_meta()) {
    const int64_t batch = initial_state.size(0);
    const int64_t heads = initial_state.size(1);
    const int64_t values = initial_state.size(3);
    const auto options = initial_state.options();
    return {at::empty({batch, time, heads, values}, options),
            at::empty(initial_state.sizes(), options)};
  }
  if (initial_state.is_cpu()) return with_skip(prepare(arguments), initial_state, by_kernel);
  if (const MatrixRecurrence steps = prepare(arguments); on_tensor_cores(steps, initial_state))
    return by_tensor_cores(steps, initial_state);
  const Piece piece = [=](const std::vector<at::Tensor>& part, const at::Tensor& state) {
    return with_skip(prepare(part), state,
                     [&](const MatrixRecurrence& s, const at::Tensor& before) {
                       return chunked(s, before, chunk_size);
                     });
  };
  return scan_with_recompute(piece, arguments, initial_state, time, segment_length(initial_state));
}

bool register_matrix_recurrence(const std::string& op, int cuda_numerics, int cpu_numerics,
                                const std::string& key_sizes) {
  const std::string composed = "composed of batched products";
  const std::string kernel =
      fmt::format("cuda kernel sm_90a or compute_80 for bfloat16 and key sizes {}; else {}",
                  key_sizes, composed);
  return register_paths(op, cpu_kernel_path(), kCudaKernels ? kernel : composed, cuda_numerics,
                        cpu_numerics);
}

}  // namespace assay::ops
