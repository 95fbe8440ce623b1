#include <torch/torch.h>

#include <algorithm>
#include <bit>

#include "ops/recurrence/matrix_recurrence/matrix_recurrence.h"

namespace assay::ops {
namespace {

// [B, T, ·, D] to [B, n, H, C, D], the last chunk filled up with `filler`.
at::Tensor in_chunks(const at::Tensor& of_groups, int64_t heads, int64_t chunk, double filler = 0) {
  if (!of_groups.defined()) return of_groups;
  const at::Tensor x = with_heads(of_groups, heads);
  const int64_t missing = (chunk - x.size(1) % chunk) % chunk;
  const at::Tensor whole = missing ? at::constant_pad_nd(x, {0, 0, 0, 0, 0, missing}, filler) : x;
  return whole.unflatten(1, {-1, chunk}).transpose(2, 3);
}
at::Tensor from_chunks(const at::Tensor& x, int64_t time) {
  return x.transpose(2, 3).flatten(1, 2).narrow(1, 0, time);
}

// The steps of a chunk against one another. Every factor is a product of decays, so nothing exceeds
// its term of the recurrence and no decay, however strong, is divided by.
struct Decayed {
  // [..., m C, n C] rows (t, i), columns (j, l): row i of t, column l of j; t > j, and `diagonal`
  at::Tensor scores;
  at::Tensor rows;   // [..., C, m, K] times the decays of the steps before it
  at::Tensor cols;   // [..., C, n, K] times the decays of the steps after it
  at::Tensor total;  // [..., K or 1] product of all decays
};

// Two neighbouring blocks at a time become one, until one is left: the right block's rows meet the
// left one's columns across the border between them.
Decayed decayed(at::Tensor rows, at::Tensor cols, const at::Tensor& diagonal,
                const at::Tensor& decay) {
  auto pairs = [](const at::Tensor& x, int64_t dim) {
    return x.unflatten(dim, {-1, 2}).unbind(dim);
  };
  rows = rows.unsqueeze(-3);
  cols = cols.unsqueeze(-3);  // [..., blocks, steps, m, K]
  // [..., blocks, K], [..., blocks, m, n]
  at::Tensor total = decay;
  at::Tensor scores = diagonal;
  while (total.size(-2) > 1) {
    const auto R = pairs(rows, -4);
    const auto C = pairs(cols, -4);
    const auto D = pairs(total, -2);
    const auto A = pairs(scores, -3);
    const at::Tensor cross =
        at::matmul(R[1].flatten(-3, -2), C[0].flatten(-3, -2).transpose(-1, -2));
    scores = at::cat({at::cat({A[0], at::zeros_like(cross)}, -1), at::cat({cross, A[1]}, -1)}, -2);
    rows = at::cat({R[0], R[1] * D[0].unsqueeze(-2).unsqueeze(-2)}, -3);
    cols = at::cat({C[0] * D[1].unsqueeze(-2).unsqueeze(-2), C[1]}, -3);
    total = D[0] * D[1];
  }
  return {scores.squeeze(-3), rows.squeeze(-4), cols.squeeze(-4), total.squeeze(-2)};
}

// The state before each of n chunks [B, n, H, K, V] and after the last: S_{i+1} = total_i S_i +
// turn_i S_i + added_i.
std::pair<at::Tensor, at::Tensor> carry(at::Tensor state, const at::Tensor& total,
                                        const at::Tensor& turn, const at::Tensor& added) {
  std::vector<at::Tensor> before;
  const auto decays = total.unsqueeze(-1).unbind(1);
  const auto additions = added.unbind(1);
  const auto turns = turn.defined() ? turn.unbind(1) : std::vector<at::Tensor>();
  for (size_t i = 0; i < decays.size(); ++i) {
    before.push_back(state);
    at::Tensor next = at::addcmul(additions[i], decays[i], state);
    state = turns.empty() ? next : next + at::matmul(turns[i], state);
  }
  return {at::stack(before, 1), state};
}

at::Tensor row_dot(const at::Tensor& x, const at::Tensor& y) { return (x * y).sum(-1, true); }
at::Tensor transposed(const at::Tensor& x) { return x.transpose(-1, -2); }

}  // namespace

std::tuple<at::Tensor, at::Tensor> chunked(const MatrixRecurrence& steps, const at::Tensor& state,
                                           int64_t chunk_size) {
  const int64_t time = steps.q.size(1);
  const int64_t heads = state.size(1);
  const int64_t chunk = std::min(chunk_size, int64_t(std::bit_ceil(uint64_t(time))));
  const bool writes = steps.k.defined();
  const bool delta = steps.transition == Transition::rank_one;
  auto split = [&](const at::Tensor& x) { return in_chunks(x, heads, chunk); };
  const at::Tensor q = split(steps.q);
  const at::Tensor k = split(steps.k);
  const at::Tensor v = split(steps.v);
  const at::Tensor a = split(steps.a);
  const at::Tensor b = split(steps.b);
  const at::Tensor c = split(steps.c);
  const at::Tensor decay = steps.decay.defined()
                               ? in_chunks(steps.decay, heads, chunk, /*filler=*/1)
                               : at::ones_like(q.narrow(-1, 0, 1));

  // Rows read the state before their step: q reads it through the step's decay, or as it is when
  // u is there.
  std::vector<at::Tensor> rows{steps.u.defined() ? q : q * decay};
  std::vector<at::Tensor> cols;
  std::vector<at::Tensor> diagonal;
  if (writes) {
    cols.push_back(k);
    diagonal.push_back(row_dot(steps.u.defined() ? q * steps.u.unsqueeze(-2) : q, k));
  }
  if (delta) {
    rows.push_back(a);
    cols.push_back(b);
    diagonal.push_back(row_dot(q, b));
  }
  at::Tensor own = at::cat(diagonal, -1).unsqueeze(-2);  // [B, n, H, C, m, n]
  if (delta) own = at::cat({own, at::zeros_like(own)}, -2);
  const Decayed d = decayed(at::stack(rows, -2), at::stack(cols, -2), own, decay);
  auto score = [&](int64_t row, int64_t col) {
    return d.scores.unflatten(-1, {chunk, -1})
        .unflatten(-3, {chunk, -1})
        .select(-1, col)
        .select(-2, row);
  };
  const at::Tensor q_start = d.rows.select(-2, 0);

  if (!delta) {
    const auto [before, after] =
        carry(state, d.total, {}, at::matmul(transposed(d.cols.select(-2, 0)), v));
    return {from_chunks(at::matmul(score(0, 0), v) + at::matmul(q_start, before), time), after};
  }
  // w_t = c_t + S_{t−1}ᵀ a_t solves (I − A_ab) w = c + A_ak v + a_start S: what does not depend on
  // S, and the rest.
  const int64_t last = int64_t(cols.size()) - 1;
  at::Tensor known = c;
  if (writes)
    known = known.defined() ? known + at::matmul(score(1, 0), v) : at::matmul(score(1, 0), v);
  const at::Tensor solved =
      at::linalg_solve_triangular(-score(1, last), at::cat({d.rows.select(-2, 1), known}, -1),
                                  /*upper=*/false, /*left=*/true, /*unitriangular=*/true);
  const at::Tensor read = solved.narrow(-1, 0, a.size(-1));
  const at::Tensor w0 = solved.narrow(-1, a.size(-1), state.size(-1));
  const at::Tensor b_end = d.cols.select(-2, last);
  at::Tensor added = at::matmul(transposed(b_end), w0);
  if (writes) added = added + at::matmul(transposed(d.cols.select(-2, 0)), v);
  const auto [before, after] = carry(state, d.total, at::matmul(transposed(b_end), read), added);
  at::Tensor out =
      at::matmul(score(0, last), w0 + at::matmul(read, before)) + at::matmul(q_start, before);
  if (writes) out = out + at::matmul(score(0, 0), v);
  return {from_chunks(out, time), after};
}

}  // namespace assay::ops
