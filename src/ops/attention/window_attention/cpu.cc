// Window attention on the CPU. A task holds a block of queries, transposed, and meets the keys tile
// by tile. Scores lie as [keys, queries]: lanes are queries, so maxima and sums over keys need no
// sums across lanes, and only the queries are ever transposed. A single query, as in generation, is
// not worth a tile: there lanes are the numbers of a head.
//   forward   Sᵀ = K Qᵀ,  m, ℓ by the online softmax,  O += P V
//   backward  Pᵀ = exp(Sᵀ − logsumexp),  dPᵀ = V dOᵀ,  dSᵀ = Pᵀ ⊙ (dPᵀ − rowsum(dO ⊙ O)),
//             dV += Pᵀ dO,  dK += scale dSᵀ Q,  dQ += scale dS K
// Exponents are to the base 2; scores are scaled accordingly.
#include "ops/attention/window_attention/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/window_attention/cpu.cc"
#include "ops/cpu/highway.h"
//
#include <cmath>
#include <limits>
#include <utility>

#include "ops/attention/window_attention/cpu-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {
constexpr int64_t kGroup = 16;  // queries or keys, where a tile has pairs that are not seen
// scratch areas; tasks are dealt to them in turn, long and short ones alike
constexpr int64_t kSlots = 64;

// f(j, low, high) for each key j of the tile: the queries of the block that see it are [low, high)
// ⊆ [0, width).
template <class F>
HWY_INLINE void for_each_key(const WindowAttentionForward& p, const Block& b, int64_t key,
                             int64_t keys, int64_t width, F f) {
  for (int64_t j = 0; j < keys; ++j) {
    const int64_t ahead = key + j - b.position;  // positions past the first query
    f(j, std::clamp<int64_t>(ahead, 0, width),
      p.window >= p.keys ? width : std::clamp<int64_t>(ahead + p.window, 0, width));
  }
}

// Whether each query of the block is at or after each key of the tile.
bool is_before(const Block& b, int64_t key, int64_t keys) { return key + keys - 1 <= b.position; }

// f(j, count, first) for groups of keys [j, j + count) of the tile: queries before `first`, which
// is a multiple of the lanes, see none of them.
template <class F>
HWY_INLINE void for_key_groups(const Block& b, int64_t key, int64_t keys, F f) {
  if (is_before(b, key, keys)) return f(0, keys, 0);
  for (int64_t j = 0; j < keys; j += kGroup)
    f(j, std::min(kGroup, keys - j),
      std::clamp<int64_t>(key + j - b.position, 0, b.rows - 1) / kGroup * kGroup);
}
// f(i, count, seen) for groups of queries [i, i + count) of the block: they see at most the first
// `seen` keys of the tile.
template <class F>
HWY_INLINE void for_query_groups(const Block& b, int64_t key, int64_t keys, F f) {
  if (is_before(b, key, keys)) return f(0, b.rows, keys);
  for (int64_t i = 0; i < b.rows; i += kGroup) {
    const int64_t count = std::min(kGroup, b.rows - i);
    f(i, count, std::clamp<int64_t>(b.position + i + count - key, 0, keys));
  }
}

// to [keys, width] = left · columns, where a query sees a key; elsewhere some numbers are not
// written.
template <class Kind, class R>
void multiply_columns(const WindowAttentionForward& p, const Block& b, int64_t key, int64_t keys,
                      int64_t width, Left<R> left, const R* columns, R* to) {
  for_key_groups(b, key, keys, [&](int64_t j, int64_t count, int64_t first) HWY_ATTR {
    matmul<R, Kind>(count, width - first, p.head_dim / Kind::kPerWord,
                    {left.data + j * left.row, left.row, left.column}, columns + first, kBlock,
                    to + j * kBlock + first, kBlock, false);
  });
}
// to [rows, dim] += the product of `weights` [keys, rows], transposed, and `right` [keys, dim].
// Both are in words of neighbouring keys. The weight of a key past those that a query sees is 0.
template <class Kind, class R>
void add_of_keys(const Block& b, int64_t key, int64_t keys, const R* weights, const R* right,
                 int64_t dim, R* to) {
  for_query_groups(b, key, keys, [&](int64_t i, int64_t count, int64_t seen) HWY_ATTR {
    const int64_t words = (seen + Kind::kPerWord - 1) / Kind::kPerWord;
    matmul<R, Kind>(count, dim, words, {weights + i, 1, kBlock}, right, dim, to + i * dim, dim,
                    true);
  });
}

// The sums of log decays of a head at a position and after it, `heads` apart; null without decays.
template <class R>
const R* decay_sums(const WindowAttentionForward& p, const Block& b, int64_t position) {
  if (!p.decay_sums) return nullptr;
  return static_cast<const R*>(p.decay_sums) + (b.batch * p.keys + position) * p.heads + b.head;
}

// Scores of a tile to the base 2, [keys, width], masked ones left as they come.
template <class Kind, class R>
HWY_NOINLINE void scores(const WindowAttentionForward& p, const Block& b, int64_t key, int64_t keys,
                         int64_t width, Left<R> k, const Scratch<R>& s) {
  multiply_columns<Kind>(p, b, key, keys, width, k, s.q_columns, s.p);
  const Vec<R> scale = set<R>(p.scale * kLog2E);
  const Vec<R> slope =
      set<R>(p.alibi_slopes ? static_cast<const R*>(p.alibi_slopes)[b.head] * kLog2E : 0);
  const R* of_queries = decay_sums<R>(p, b, b.position);
  const R* of_keys = decay_sums<R>(p, b, key);
  if (of_keys) std::fill(s.log_decays, s.log_decays + kBlock, R(0));
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t i = 0; of_keys && i < b.rows; ++i)
      s.log_decays[i] = R((of_queries[i * p.heads] - of_keys[j * p.heads]) * kLog2E);
    for (int64_t i = 0; i < width; i += kLanes<R>) {
      R* at = s.p + j * kBlock + i;
      Vec<R> score = hn::Mul(load(at), scale);
      if (p.alibi_slopes)
        score = hn::NegMulAdd(slope, hn::Iota(Lanes<R>(), R(b.position + i - key - j)), score);
      if (of_keys) score = hn::Add(score, load(s.log_decays + i));
      store<R>(score, at);
    }
  }
}

template <class R>
HWY_NOINLINE void online_softmax(const WindowAttentionForward& p, const Block& b, int64_t key,
                                 int64_t keys, int64_t width, const Scratch<R>& s) {
  constexpr R kNone = -std::numeric_limits<R>::infinity();
  for_each_key(p, b, key, keys, width, [&](int64_t j, int64_t low, int64_t high) {
    R* row = s.p + j * kBlock;
    std::fill(row, row + low, kNone);
    std::fill(row + std::max(low, high), row + width, kNone);
  });
  for (int64_t i = 0; i < width; i += kLanes<R>) {
    Vec<R> most = load(s.max + i);
    for (int64_t j = 0; j < keys; ++j) most = hn::Max(most, load(s.p + j * kBlock + i));
    const Vec<R> rescale = exp2(hn::Sub(load(s.max + i), most));
    Vec<R> sum = hn::Mul(load(s.sum + i), rescale);
    for (int64_t j = 0; j < keys; ++j) {
      R* at = s.p + j * kBlock + i;
      const Vec<R> score = load(at);
      const Vec<R> weight =
          hn::IfThenElseZero(hn::Ne(score, set<R>(kNone)), exp2(hn::Sub(score, most)));
      sum = hn::Add(sum, weight);
      store<R>(weight, at);
    }
    store<R>(most, s.max + i);
    store<R>(sum, s.sum + i);
    store<R>(rescale, s.rescale + i);
  }
}

// x [keys, width] rounded to bfloat16, as words of neighbouring keys; a key past the last is 0.
[[maybe_unused]] inline void round_pairs_of_keys(int64_t keys, int64_t width, const float* x,
                                                 float* words) {
  const hn::RebindToUnsigned<Lanes<float>> d32;
  for (int64_t j = 0; j < keys; j += 2)
    for (int64_t i = 0; i < width; i += kLanes<float>) {
      const float* at = x + j * kBlock + i;
      const auto low = bf16_bits(load(at));
      const auto high = j + 1 < keys ? bf16_bits(load(at + kBlock)) : hn::Zero(d32);
      store<float>(hn::BitCast(Lanes<float>(), hn::Or(low, hn::ShiftLeft<16>(high))),
                   words + j / 2 * kBlock + i);
    }
}
// x [keys, width] rounded to bfloat16, as words of neighbouring queries.
[[maybe_unused]] inline void round_pairs_of_queries(int64_t keys, int64_t width, const float* x,
                                                    float* words) {
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t i = 0; i < width; i += kLanes<float>)
      store_as_bf16(load(x + j * kBlock + i),
                    reinterpret_cast<uint16_t*>(words + j * kBlock / 2) + i);
}

template <class R>
HWY_NOINLINE void scale_rows(int64_t rows, int64_t dim, const R* factors, R* to) {
  for (int64_t i = 0; i < rows; ++i) {
    const Vec<R> factor = set<R>(factors[i]);
    for (int64_t d = 0; d < dim; d += kLanes<R>)
      store<R>(hn::Mul(load(to + i * dim + d), factor), to + i * dim + d);
  }
}

template <class Kind, class R>
void forward_block(const WindowAttentionForward& p, const Block& b, const Scratch<R>& s) {
  const int64_t width = padded<R>(b.rows);
  read_columns<Kind>(p, p.q, b, s.row, s.q_columns);
  std::fill(s.out, s.out + kBlock * s.dim, R(0));
  std::fill(s.max, s.max + kBlock, std::numeric_limits<R>::lowest() / 2);
  std::fill(s.sum, s.sum + kBlock, R(0));
  for (int64_t key = b.key_begin; key < b.key_end; key += kBlock) {
    const int64_t keys = std::min(kBlock, b.key_end - key);
    scores<Kind>(p, b, key, keys, width, left_of_tile<Kind>(p, p.k, b, key, keys, s.dim, s.k), s);
    online_softmax(p, b, key, keys, width, s);
    scale_rows(b.rows, s.dim, s.rescale, s.out);
    read_block<Kind>(p, p.v, b.batch, b.kv_head, key, keys, s.dim, s.v);
    if constexpr (Kind::kPerWord == 2) round_pairs_of_keys(keys, width, s.p, s.of_keys);
    add_of_keys<Kind>(b, key, keys, Kind::kPerWord == 2 ? s.of_keys : s.p, s.v, s.dim, s.out);
  }
  for (int64_t i = 0; i < b.rows; ++i) s.rescale[i] = 1 / s.sum[i];
  scale_rows(b.rows, s.dim, s.rescale, s.out);
  write_block(p, p.out, b, s.dim, s.out);
  if (!p.logsumexp) return;
  R* logsumexp = static_cast<R*>(p.logsumexp) + (b.batch * p.heads + b.head) * p.time + b.first;
  for (int64_t i = 0; i < b.rows; ++i) logsumexp[i] = R((s.max[i] + std::log2(s.sum[i])) / kLog2E);
}

// Rows of one head in memory, each of `dim` numbers W. The kernels read `padded` numbers, so
// shorter rows are copied to the buffer [4, padded] and end with zeros.
template <class W>
struct HeadRows {
  const W* first;
  int64_t stride;
  int64_t count;
  int64_t dim;
  int64_t padded;
  W* buffer;
};
template <class W, class R>
HeadRows<W> head_rows(const WindowAttentionForward& p, const View& view, const Block& b,
                      int64_t key, int64_t keys, int64_t padded, R* buffer) {
  const std::byte* first = element(view, p.dtype, b.batch, key, b.kv_head * p.head_dim);
  return {reinterpret_cast<const W*>(first), view.time_stride, keys, p.head_dim, padded,
          reinterpret_cast<W*>(buffer)};
}
// The rows `first` to first + 3, or the last one again.
template <class W>
struct FourRows {
  const W* row[4];
  HWY_INLINE FourRows(const HeadRows<W>& rows, int64_t first) {
    for (int64_t i = 0; i < 4; ++i) {
      row[i] = rows.first + std::min(first + i, rows.count - 1) * rows.stride;
      prefetch_row<0>(reinterpret_cast<const std::byte*>(row[i] + kRowsAhead * rows.stride),
                      rows.dim * int64_t(sizeof(W)));
      if (rows.dim != rows.padded) copy(rows, i);
    }
  }
  HWY_NOINLINE void copy(const HeadRows<W>& rows, int64_t i) {
    W* to = rows.buffer + i * rows.padded;
    std::fill(std::copy(row[i], row[i] + rows.dim, to), to + rows.padded, W(0));
    row[i] = to;
  }
};
// Scores of the keys for the query in s.row, which is scaled, into s.p.
template <class R, class W>
HWY_NOINLINE void token_scores(const HeadRows<W>& keys, const Scratch<R>& s) {
  for (int64_t j = 0; j < keys.count; j += 4) {
    const FourRows<W> k(keys, j);
    Vec<R> dots[4] = {set<R>(0), set<R>(0), set<R>(0), set<R>(0)};
    for (int64_t d = 0; d < s.dim; d += kLanes<R>) {
      const Vec<R> q = load(s.row + d);
      for (int64_t i = 0; i < 4; ++i) dots[i] = hn::MulAdd(load_wide(k.row[i] + d), q, dots[i]);
    }
    sums(dots, s.p + j);
  }
}

// Turns scores into weights 2^(score − most), where `most` is the largest one or its old value;
// returns their sum. Zeros follow them up to a multiple of 4 or of a vector.
template <class R>
HWY_NOINLINE R token_weights(int64_t keys, R* p, R& most) {
  const Lanes<R> d;
  const auto is_key = [&](int64_t j) HWY_ATTR { return hn::FirstN(d, size_t(keys - j)); };
  std::fill(p + keys, p + std::max(padded<R>(keys), (keys + 3) / 4 * 4), R(0));
  Vec<R> largest = hn::Set(d, most);
  Vec<R> total = set<R>(0);
  for (int64_t j = 0; j < keys; j += kLanes<R>)
    largest = hn::IfThenElse(is_key(j), hn::Max(largest, load(p + j)), largest);
  largest = hn::MaxOfLanes(d, largest);
  most = hn::GetLane(largest);
  for (int64_t j = 0; j < keys; j += kLanes<R>) {
    const Vec<R> weight = hn::IfThenElseZero(is_key(j), exp2(hn::Sub(load(p + j), largest)));
    total = hn::Add(total, weight);
    store<R>(weight, p + j);
  }
  return sum<R>(total);
}

template <class R, class W>
HWY_NOINLINE void add_token_values(const HeadRows<W>& values, const Scratch<R>& s) {
  for (int64_t j = 0; j < values.count; j += 4) {
    const FourRows<W> v(values, j);
    Vec<R> weights[4];
    for (int64_t i = 0; i < 4; ++i) weights[i] = set<R>(s.p[j + i]);
    for (int64_t d = 0; d < s.dim; d += kLanes<R>) {
      Vec<R> out = load(s.out + d);
      for (int64_t i = 0; i < 4; ++i) out = hn::MulAdd(weights[i], load_wide(v.row[i] + d), out);
      store<R>(out, s.out + d);
    }
  }
}

// The only query of a head. Keys and values are read once, where they lie.
template <class R, class W>
void forward_token(const WindowAttentionForward& p, const Block& b, const Scratch<R>& s) {
  constexpr int64_t kScores = kBlock * kBlock;  // room in s.p
  const R slope = p.alibi_slopes ? static_cast<const R*>(p.alibi_slopes)[b.head] * R(kLog2E) : R(0);
  read_row(element(p.q, p.dtype, b.batch, 0, b.head * p.head_dim), p.dtype, p.head_dim, s.dim,
           s.row);
  const R scale[1] = {R(p.scale * kLog2E)};
  scale_rows(1, s.dim, scale, s.row);
  std::fill(s.out, s.out + s.dim, R(0));
  R most = std::numeric_limits<R>::lowest() / 2;
  R total = 0;
  for (int64_t key = b.key_begin; key < b.key_end; key += kScores) {
    const int64_t keys = std::min(kScores, b.key_end - key);
    token_scores<R>(head_rows<W>(p, p.k, b, key, keys, s.dim, s.k), s);
    for (int64_t j = 0; slope != 0 && j < keys; ++j) s.p[j] -= slope * R(b.position - key - j);
    const R* sums = decay_sums<R>(p, b, key);
    for (int64_t j = 0; sums && j < keys; ++j)
      s.p[j] += R((*decay_sums<R>(p, b, b.position) - sums[j * p.heads]) * kLog2E);
    const R before = most;
    const R sum = token_weights(keys, s.p, most);
    const R rescale[1] = {std::exp2(before - most)};
    total = total * rescale[0] + sum;
    scale_rows(1, s.dim, rescale, s.out);
    add_token_values<R>(head_rows<W>(p, p.v, b, key, keys, s.dim, s.v), s);
  }
  const R rescale[1] = {1 / total};
  scale_rows(1, s.dim, rescale, s.out);
  write_block(p, p.out, b, s.dim, s.out);
  if (p.logsumexp)
    static_cast<R*>(p.logsumexp)[b.batch * p.heads + b.head] =
        R((most + std::log2(total)) / kLog2E);
}

void forward_token(const WindowAttentionForward& p, const Block& b, const Scratch<float>& s) {
  p.dtype == DType::bf16 ? forward_token<float, uint16_t>(p, b, s)
                         : forward_token<float, float>(p, b, s);
}
void forward_token(const WindowAttentionForward& p, const Block& b, const Scratch<double>& s) {
  forward_token<double, double>(p, b, s);
}

// Reads the inputs of the backward for the block's queries. s.max: logsumexp to the base 2; s.sum:
// rowsum(dO ⊙ O).
template <class Kind, class R>
void read_queries(const WindowAttentionBackward& bwd, const Block& b, const Scratch<R>& s) {
  const WindowAttentionForward& p = bwd.forward;
  read_columns<Kind>(p, p.q, b, s.row, s.q_columns);
  read_columns<Kind>(p, bwd.dout, b, s.row, s.dout_columns);
  read_block<OfNumbers<R>>(p, bwd.dout, b.batch, b.head, b.first, b.rows, s.dim, s.dout);
  read_block<OfNumbers<R>>(p, p.out, b.batch, b.head, b.first, b.rows, s.dim, s.out);
  const R* logsumexp =
      static_cast<const R*>(p.logsumexp) + (b.batch * p.heads + b.head) * p.time + b.first;
  std::fill(s.max, s.max + kBlock, R(0));
  std::fill(s.sum, s.sum + kBlock, R(0));
  for (int64_t i = 0; i < b.rows; ++i) {
    s.max[i] = R(logsumexp[i] * kLog2E);
    for (int64_t d = 0; d < p.head_dim; ++d)
      s.sum[i] += s.dout[i * s.dim + d] * s.out[i * s.dim + d];
  }
  read_block<Kind>(p, p.q, b.batch, b.head, b.first, b.rows, s.dim, s.q);
  if (Kind::kPerWord == 2)
    read_block<Kind>(p, bwd.dout, b.batch, b.head, b.first, b.rows, s.dim, s.dout);
}

// Weights and the gradients of the scores of a tile, [keys, width]; both zero where
// nothing is seen.
template <class Kind, class R>
HWY_NOINLINE void score_gradients(const WindowAttentionForward& p, const Block& b, int64_t key,
                                  int64_t keys, int64_t width, Left<R> v, const Scratch<R>& s) {
  multiply_columns<Kind>(p, b, key, keys, width, v, s.dout_columns, s.ds);
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t i = 0; i < width; i += kLanes<R>) {
      const int64_t at = j * kBlock + i;
      const Vec<R> weight = exp2(hn::Sub(load(s.p + at), load(s.max + i)));
      store<R>(weight, s.p + at);
      store<R>(hn::Mul(weight, hn::Sub(load(s.ds + at), load(s.sum + i))), s.ds + at);
    }
  for_each_key(p, b, key, keys, width, [&](int64_t j, int64_t low, int64_t high) {
    for (R* row : {s.p + j * kBlock, s.ds + j * kBlock}) {
      std::fill(row, row + low, R(0));
      std::fill(row + std::max(low, high), row + width, R(0));
    }
  });
}

// −Σ dS (p − j) over a tile.
template <class R>
double slope_gradient(const Block& b, int64_t key, int64_t keys, const R* ds) {
  double sum = 0;
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t i = 0; i < b.rows; ++i)
      sum -= double(ds[j * kBlock + i]) * double(b.position + i - key - j);
  return sum;
}

// Adds Σ dS over keys at the position of a query, and −Σ dS over queries at that of a key. The
// first sum is 0 but for the rounding of O.
template <class R>
void add_decay_gradients(const WindowAttentionBackward& bwd, const Block& b, int64_t key,
                         int64_t keys, const R* ds) {
  const WindowAttentionForward& p = bwd.forward;
  R* sums = static_cast<R*>(bwd.ddecay_sums) + b.batch * p.keys * p.heads + b.head;
  R of_queries[kBlock] = {};
  for (int64_t j = 0; j < keys; ++j) {
    R of_key = 0;
    for (int64_t i = 0; i < b.rows; ++i) {
      of_key += ds[j * kBlock + i];
      of_queries[i] += ds[j * kBlock + i];
    }
    sums[(key + j) * p.heads] -= of_key;
  }
  for (int64_t i = 0; i < b.rows; ++i) sums[(b.position + i) * p.heads] += of_queries[i];
}

// Adds left · right, [keys, rows] · [rows, D], to the rows of a contiguous gradient [B, S, Hkv, D];
// both are in words of neighbouring queries.
template <class Kind, class R>
void add_product(const WindowAttentionForward& p, const Block& b, int64_t key, int64_t keys,
                 const R* left, const R* right, const Scratch<R>& s, void* to) {
  const int64_t stride = p.kv_heads * p.head_dim;
  R* rows = static_cast<R*>(to) + (b.batch * p.keys + key) * stride + b.kv_head * p.head_dim;
  const bool in_place =
      s.dim == p.head_dim && reinterpret_cast<uintptr_t>(to) % (kLanes<R> * sizeof(R)) == 0;
  for_key_groups(b, key, keys, [&](int64_t j, int64_t count, int64_t first) HWY_ATTR {
    constexpr int64_t kPer = Kind::kPerWord;
    constexpr int64_t kRow = kBlock / kPer;
    matmul<R, Kind>(count, s.dim, (b.rows - first + kPer - 1) / kPer,
                    {left + j * kRow + first / kPer, kRow, 1}, right + first / kPer * s.dim, s.dim,
                    in_place ? rows + j * stride : s.product + j * s.dim, in_place ? stride : s.dim,
                    in_place);
  });
  for (int64_t j = 0; !in_place && j < keys; ++j)
    for (int64_t d = 0; d < p.head_dim; ++d) rows[j * stride + d] += s.product[j * s.dim + d];
}

// → the gradient of the slope.
template <class Kind, class R>
double backward_block(const WindowAttentionBackward& bwd, const Block& b, const Scratch<R>& s) {
  const WindowAttentionForward& p = bwd.forward;
  const int64_t width = padded<R>(b.rows);
  double dslope = 0;
  constexpr bool pairs = Kind::kPerWord == 2;
  const R* p_of_queries = pairs ? s.p_of_queries : s.p;
  const R* ds_of_queries = pairs ? s.ds_of_queries : s.ds;
  const R* ds_of_keys = pairs ? s.of_keys : s.ds;
  read_queries<Kind>(bwd, b, s);
  std::fill(s.dq, s.dq + kBlock * s.dim, R(0));
  for (int64_t key = b.key_begin; key < b.key_end; key += kBlock) {
    const int64_t keys = std::min(kBlock, b.key_end - key);
    read_block<Kind>(p, p.k, b.batch, b.kv_head, key, keys, s.dim, s.k);
    const Left<R> k =
        pairs ? left_of_tile<Kind>(p, p.k, b, key, keys, s.dim, s.k) : Left<R>{s.k, s.dim, 1};
    scores<Kind>(p, b, key, keys, width, k, s);
    score_gradients<Kind>(p, b, key, keys, width,
                          left_of_tile<Kind>(p, p.v, b, key, keys, s.dim, s.v), s);
    if constexpr (pairs) {
      round_pairs_of_queries(keys, width, s.p, s.p_of_queries);
      round_pairs_of_queries(keys, width, s.ds, s.ds_of_queries);
      round_pairs_of_keys(keys, width, s.ds, s.of_keys);
    }
    if (bwd.dalibi_slopes) dslope += slope_gradient(b, key, keys, s.ds);
    if (bwd.ddecay_sums) add_decay_gradients(bwd, b, key, keys, s.ds);
    add_product<Kind>(p, b, key, keys, p_of_queries, s.dout, s, bwd.dv.data);
    add_product<Kind>(p, b, key, keys, ds_of_queries, s.q, s, bwd.dk.data);
    add_of_keys<Kind>(b, key, keys, ds_of_keys, s.k, s.dim, s.dq);
  }
  std::fill(s.rescale, s.rescale + kBlock, R(p.scale));
  scale_rows(b.rows, s.dim, s.rescale, s.dq);
  write_block(p, bwd.dq, b, s.dim, s.dq);
  return dslope;
}

// Every query that reads one head of k and v; `dslopes` [H] of this sequence.
template <class Kind, class R>
void backward_head(const WindowAttentionBackward& bwd, int64_t batch, int64_t kv_head,
                   const Scratch<R>& s, double* dslopes) {
  const WindowAttentionForward& p = bwd.forward;
  const auto row_of = [&](void* gradient, int64_t key) {
    return static_cast<R*>(gradient) + ((batch * p.keys + key) * p.kv_heads + kv_head) * p.head_dim;
  };
  for (void* gradient : {bwd.dk.data, bwd.dv.data})
    for (int64_t j = 0; j < p.keys; ++j) std::fill_n(row_of(gradient, j), p.head_dim, R(0));
  const int64_t group = p.heads / p.kv_heads;
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    dslopes[head] = 0;
    for (int64_t j = 0; bwd.ddecay_sums && j < p.keys; ++j)
      static_cast<R*>(bwd.ddecay_sums)[(batch * p.keys + j) * p.heads + head] = 0;
    for (int64_t i = 0; i < num_blocks(p); ++i)
      dslopes[head] += backward_block<Kind>(bwd, block_at(p, batch, head, i), s);
  }
  for (int64_t j = 0; j < p.keys; ++j)
    for (int64_t d = 0; d < p.head_dim; ++d) row_of(bwd.dk.data, j)[d] *= R(p.scale);
}

template <class Kind, class R>
void forward(const WindowAttentionForward& p, void* workspace, const ParallelFor& parallel) {
  const int64_t blocks = num_blocks(p);
  const int64_t tasks = p.batch * p.heads * blocks;
  const int64_t slots = std::min(tasks, kSlots);
  WorkspaceArena carve(workspace);
  const auto scratch = take_scratches<R>(p, false, slots, carve);
  parallel(slots, 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    [[maybe_unused]] const StateOf<Kind> state;
    for (int64_t slot = begin; slot < end; ++slot)
      for (int64_t task = slot; task < tasks; task += slots) {
        const Block b =
            block_at(p, task / blocks / p.heads, task / blocks % p.heads, task % blocks);
        const Scratch<R>& s = scratch[size_t(slot)];
        if (p.time > 1) forward_block<Kind>(p, b, s);
        else forward_token(p, b, s);
      }
  });
}

template <class Kind, class R>
void backward(const WindowAttentionBackward& bwd, void* workspace, const ParallelFor& parallel) {
  const WindowAttentionForward& p = bwd.forward;
  const int64_t tasks = p.batch * p.kv_heads;
  const int64_t slots = std::min(tasks, kSlots);
  WorkspaceArena carve(workspace);
  const auto scratch = take_scratches<R>(p, true, slots, carve);
  double* dslopes = carve.take<double>(p.batch * p.heads);
  parallel(slots, 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    [[maybe_unused]] const StateOf<Kind> state;
    for (int64_t slot = begin; slot < end; ++slot)
      for (int64_t task = slot; task < tasks; task += slots)
        backward_head<Kind>(bwd, task / p.kv_heads, task % p.kv_heads, scratch[size_t(slot)],
                            dslopes + task / p.kv_heads * p.heads);
  });
  for (int64_t head = 0; bwd.dalibi_slopes && head < p.heads; ++head) {
    double sum = 0;
    for (int64_t batch = 0; batch < p.batch; ++batch) sum += dslopes[batch * p.heads + head];
    static_cast<R*>(bwd.dalibi_slopes)[head] = R(sum);
  }
}

template <class R>
size_t bytes(const WindowAttentionForward& p, bool backward) {
  WorkspaceArena count;
  const int64_t tasks = backward ? p.batch * p.kv_heads : p.batch * p.heads * num_blocks(p);
  take_scratches<R>(p, backward, std::min(tasks, kSlots), count);
  if (backward) count.take<double>(p.batch * p.heads);
  return count.used();
}

size_t attention_bytes(const WindowAttentionForward& p, bool backward) {
  return p.dtype == DType::f64 ? bytes<double>(p, backward) : bytes<float>(p, backward);
}
// f(kind, number) with the words and the numbers of the arithmetic. Products of pairs in bfloat16
// read words of 4 bytes where they are, and round weights and gradients of scores to bfloat16.
template <class F>
void with_kind_of(const WindowAttentionForward& p, std::initializer_list<View> read, F f) {
  if (p.dtype == DType::f64) return f(OfNumbers<double>(), double());
#if HWY_TARGET <= HWY_AVX3
  const bool whole_words = p.head_dim % 2 == 0 && std::ranges::all_of(read, [](const View& view) {
                             return view.time_stride % 2 == 0 && view.batch_stride % 2 == 0 &&
                                    reinterpret_cast<uintptr_t>(view.data) % 4 == 0;
                           });
  if (p.dtype == DType::bf16 && whole_words && has_bf16_products())
    return cpu::has_tiles() ? f(OfBf16Tiles(), float()) : f(OfBf16Pairs(), float());
#endif
  f(OfNumbers<float>(), float());
}
void attention_forward(const WindowAttentionForward& p, void* workspace,
                       const ParallelFor& parallel) {
  with_kind_of(p, {p.q, p.k, p.v}, [&](auto kind, auto number) {
    forward<decltype(kind), decltype(number)>(p, workspace, parallel);
  });
}
void attention_backward(const WindowAttentionBackward& bwd, void* workspace,
                        const ParallelFor& parallel) {
  const WindowAttentionForward& p = bwd.forward;
  with_kind_of(p, {p.q, p.k, p.v, bwd.dout}, [&](auto kind, auto number) {
    backward<decltype(kind), decltype(number)>(bwd, workspace, parallel);
  });
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
HWY_EXPORT(attention_bytes);
size_t workspace_bytes(const WindowAttentionForward& p) {
  return HWY_DYNAMIC_DISPATCH(attention_bytes)(p, false);
}
size_t workspace_bytes(const WindowAttentionBackward& bwd) {
  return HWY_DYNAMIC_DISPATCH(attention_bytes)(bwd.forward, true);
}
ASSAY_CPU_WORKSPACE_KERNEL(window_attention, attention_forward, WindowAttentionForward)
ASSAY_CPU_WORKSPACE_KERNEL(window_attention, attention_backward, WindowAttentionBackward)
}  // namespace assay::ops::cpu
#endif
