// Few queries with a long past: one block per query and head. Scores of all candidates, of which
// the best are kept; then the keys and the values of the chunks read. Nothing is read twice.
#include <algorithm>

#include "ops/attention/top1_chunk/cuda_passes.cuh"
#include "ops/cuda/attention.cuh"
#include "ops/cuda/math.cuh"
#include "ops/cuda/reduce.cuh"

namespace assay::ops::cuda {
namespace top1 {
namespace {

// threads and warps of a block, at most; fewer where blocks are many
constexpr int kMaxThreads = 256;
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr int kMaxKept = 64;     // largest top_k
constexpr int kMaxRead = 16384;  // keys of a query
// shared memory of a block that does not hold scores, at most
constexpr size_t kOtherBytes = 35 << 10;

// Rows of D numbers of type T, each read by kLanes neighbouring lanes, 16 bytes at a time.
template <class T, int D>
struct Rows {
  using R = Real<T>;
  // groups of lanes a warp
  static constexpr int kWidth = 16 / sizeof(T);
  static constexpr int kVectors = D / kWidth;
  static constexpr int kLanes = kVectors % 8 ? 4 : 8;
  static constexpr int kEach = kVectors / kLanes;
  static constexpr int kGroups = 32 / kLanes;
  using Vector = Vec<T, kWidth>;
  struct Row {
    Vector at[kEach];
  };
  R q[kEach][kWidth];  // the lane's part of the query

  __device__ static int lane() { return threadIdx.x % kLanes; }
  __device__ static int group() { return threadIdx.x % 32 / kLanes; }
  __device__ static int offset(int i) { return (i * kLanes + lane()) * kWidth; }
  __device__ explicit Rows(const R* query) {
    for (int i = 0; i < kEach; ++i)
      for (int e = 0; e < kWidth; ++e) q[i][e] = query[offset(i) + e];
  }
  __device__ static Row load(const T* row) {
    Row x;
#pragma unroll
    for (int i = 0; i < kEach; ++i) x.at[i] = *reinterpret_cast<const Vector*>(row + offset(i));
    return x;
  }
  // In all lanes of the group.
  __device__ R dot(const Row& x) const {
    R sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum += q[i][e] * to_compute(x.at[i].at[e]);
    return group_reduce<kLanes>(sum, Plus{});
  }
  // Σ |q x| of the lane's part.
  __device__ R bound(const Row& x) const {
    R sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum += fabs(q[i][e] * to_compute(x.at[i].at[e]));
    return sum;
  }
};

// f(i, row i) for i = first, first + step, … below `count`, 128 bytes of a lane under way at once;
// row(i) points to row i. All lanes of a warp go along, with i ≥ count when theirs is done.
template <class Reader, class At, class F>
__device__ void each_row(int first, int step, int count, const At& row, const F& f) {
  constexpr int kAtOnce = Reader::kEach < 4 ? 8 / Reader::kEach : 2;
  for (int base = 0; base < count;) {
    const auto some = [&](auto rows) {
      constexpr int kRows = decltype(rows)::value;
      typename Reader::Row x[kRows];
#pragma unroll
      for (int u = 0; u < kRows; ++u)
        x[u] = Reader::load(row(min(base + first + u * step, count - 1)));
#pragma unroll
      for (int u = 0; u < kRows; ++u) f(base + first + u * step, x[u]);
      base += kRows * step;
    };
    if (count - base > 2 * step) some(std::integral_constant<int, kAtOnce>{});
    else some(std::integral_constant<int, 2>{});
  }
}

template <class R>
struct DecodeSmem {
  R part[kMaxWarps];
  R rest[kMaxWarps];
  int part_id[kMaxWarps];
  int kept[kMaxKept];
  int read[kMaxKept + 1];  // chunks
};

template <class R>
__device__ bool better(R a, int id_a, R b, int id_b) {
  return a > b || (a == b && id_a < id_b);
}

// Σ over the block, or the largest; in all threads.
template <class R, class F>
__device__ R reduce(DecodeSmem<R>& s, R x, const F& f) {
  x = group_reduce<32>(x, f);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.part[threadIdx.x / 32] = x;
  __syncthreads();
  x = s.part[0];
  for (int w = 1; w < blockDim.x / 32; ++w) x = f(x, s.part[w]);
  return x;
}

// kOwnCaches: each row is at a position of its own and has caches of its own.
template <class T, int D, bool kOwnCaches>
struct Step {
  using R = Real<T>;
  using Keys = Rows<T, D>;
  static constexpr int kParts = sizeof(T) == 2 ? 2 : 1;  // parts of a mean
  const Top1ChunkForward& args;
  DecodeSmem<R>& s;
  const R* query;  // [D] in shared memory, times scale · log₂e; approx: times nothing
  int b;
  int kv;
  int chunk;
  int own;
  int last;
  float inverse;         // 1 / chunk
  void* caches[3] = {};  // keys, values and summaries of the block's row

  __device__ void load_caches() {
    const int count = args.selection == Selection::approx ? 3 : 2;
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (i < count) caches[i] = args.caches[b * count + i];
  }
  __device__ View cache(int number, const View& x) const {
    if constexpr (!kOwnCaches) return x;
    __builtin_assume(__isGlobal(caches[number]));  // else its loads are those of generic addresses
    return {caches[number], 0, x.time_stride};
  }
  __device__ View k() const { return cache(0, args.k); }
  __device__ View v() const { return cache(1, args.v); }
  __device__ T* row(const View& x, int64_t time) const {
    return static_cast<T*>(x.data) + b * x.batch_stride + time * x.time_stride + kv * D;
  }
  // Row i of a chunk's summary; −1: what rounding left of row 0.
  __device__ T* summary(int64_t c, int i) const {
    const View summaries = cache(2, args.summaries);
    return static_cast<T*>(summaries.data) + b * summaries.batch_stride +
           c * summaries.time_stride + (kv * kParts + kParts - 1 + i) * D;
  }

  // Rows [first, first + count) of x go to the L2 cache, so that no thread has to wait
  // for them long.
  __device__ void send_for(const View& x, int64_t first, int count) const {
    constexpr int kLines = D * sizeof(T) / 128 + (D * sizeof(T) % 128 != 0);
    for (int i = threadIdx.x; i < count * kLines; i += blockDim.x)
      prefetch_l2(reinterpret_cast<const char*>(row(x, first + i / kLines)) + i % kLines * 128);
  }

  // The scores of the chunks, then those of the keys read, in shared memory.
  __device__ static R* scores() {
    extern __shared__ double memory[];
    return reinterpret_cast<R*>(memory);
  }
  // NaN counts as the best.
  __device__ void put_score(int id, R score) const {
    scores()[id] = isnan(score) ? R(INFINITY) : score;
  }
  // Scores of all chunks from their keys.
  __device__ void score_exactly() const {
    const Keys keys(query);
    for (int id = threadIdx.x / 32; id < own; id += blockDim.x / 32) {
      R top = -INFINITY;
      R sum = 0;
      each_row<Keys>(
          Keys::group(), Keys::kGroups, chunk,
          [&](int j) { return row(k(), int64_t{id} * chunk + j); },
          [&](int j, const typename Keys::Row& x) {
            const R score = keys.dot(x);
            if (j >= chunk) return;
            const R larger = score > top ? score : top;
            sum = sum * (larger > top ? exp2_any(top - larger) : R(1)) + exp2_any(score - larger);
            top = larger;
          });
      const R all = butterfly<Keys::kLanes, 32>(top, Max{});
      sum *= top > -INFINITY ? exp2_any(top - all) : R(sum == sum ? 0 : NAN);
      sum = butterfly<Keys::kLanes, 32>(sum, Plus{});
      if (threadIdx.x % 32 == 0) put_score(id, all + log2(sum));
    }
  }
  // Scores of all chunks from both parts of their means. There is one group of lanes per chunk.
  __device__ void score_by_summary() const {
    const Keys keys(query);
    const int groups = blockDim.x / Keys::kLanes;
    for (int base = 0; base < own; base += groups) {
      const int i = base + threadIdx.x / Keys::kLanes;
      R score = 0;
      each_row<Keys>(
          0, 1, kParts, [&](int r) { return summary(min(i, own - 1), -r); },
          [&](int r, const typename Keys::Row& x) {
            const R y = keys.dot(x);
            if (r < kParts) score += y;
          });
      if (Keys::lane() == 0 && i < own) put_score(i, score);
    }
  }

  // A chunk and its score, and the most that rounding of the means took from a score.
  struct Best {
    R score = -INFINITY;
    R rest = 0;
    int id = INT_MAX;
    __device__ void offer(R x, int i) {
      if (isnan(x)) x = INFINITY;
      if (better(x, i, score, id)) {
        score = x;
        id = i;
      }
    }
  };
  // The best of all warps, in all threads; groups of kFirst lanes agree. s.part, … were read.
  template <int kFirst>
  __device__ Best of_block(Best best) const {
    for (int step = kFirst; step < 32; step *= 2) {
      best.offer(__shfl_xor_sync(~0u, best.score, step), __shfl_xor_sync(~0u, best.id, step));
      best.rest = fmax(best.rest, __shfl_xor_sync(~0u, best.rest, step));
    }
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
      s.part[warp] = best.score;
      s.part_id[warp] = best.id;
      s.rest[warp] = best.rest;
    }
    __syncthreads();
    for (int w = 0; w < blockDim.x / 32; ++w) {
      best.offer(s.part[w], s.part_id[w]);
      best.rest = fmax(best.rest, s.rest[w]);
    }
    return best;
  }
  // The top_k best of them, best first, ties to the lower number, to s.kept; −1: none left.
  __device__ void keep_best() const {
    int kept = -1;  // chunk of rank threadIdx.x
    Best before{INFINITY, 0, -1};
    for (int rank = 0; rank < args.top_k; ++rank) {
      __syncthreads();
      Best best;
      for (int id = threadIdx.x; id < own; id += blockDim.x) {
        if (better(before.score, before.id, scores()[id], id)) best.offer(scores()[id], id);
      }
      before = of_block<1>(best);
      if (threadIdx.x == rank && before.id != INT_MAX) kept = before.id;
    }
    __syncthreads();
    if (threadIdx.x < args.top_k) s.kept[threadIdx.x] = kept;
    __syncthreads();
  }
  // The best by the high parts of the means, whose scores are kept. `rest` bounds the sum that the
  // low parts, each number 2^−8 of the high one or less, can add. Each group of lanes prefetches
  // the low part of its best chunk.
  __device__ Best best_by_high_parts() const {
    const Keys rows(query);
    Best best;
    R largest = 0;
    each_row<Keys>(
        threadIdx.x / Keys::kLanes, blockDim.x / Keys::kLanes, own,
        [&](int i) { return summary(i, 0); },
        [&](int i, const typename Keys::Row& x) {
          const R score = rows.dot(x);
          largest = fmax(largest, rows.bound(x));
          if (i >= own) return;
          best.offer(score, i);
          if (Keys::lane() == 0) put_score(i, score);
        });
    if (kParts == 2) {
      if (best.id != INT_MAX && Keys::lane() == 0) prefetch_l2(summary(best.id, -1));
      best.rest = group_reduce<Keys::kLanes>(largest, Plus{}) * R(1.01 / 256);
    }
    return of_block<Keys::kLanes>(best);
  }
  // The chunk of the largest mean score, to s.kept[0]. Low parts are read only of those that they
  // may make the best.
  __device__ void choose_one_by_mean() const {
    const Keys rows(query);
    const auto whole = [&](int id) {
      const R high = rows.dot(Keys::load(summary(id, 0)));
      return kParts == 1 ? high : high + rows.dot(Keys::load(summary(id, -1)));
    };
    Best best = best_by_high_parts();
    const R least = best.score - 2 * best.rest;
    const auto near = [&](int i) { return i < own && !(scores()[i] < least) && i != best.id; };
    bool any = false;
    for (int i = threadIdx.x; i < own; i += blockDim.x) any = any || near(i);
    if (__syncthreads_or(any)) {
      Best again;
      again.offer(whole(best.id), best.id);
      for (int base = threadIdx.x / 32 * 32; base < own; base += blockDim.x)
        for (unsigned left = __ballot_sync(~0u, near(base + threadIdx.x % 32)); left;
             left &= left - 1) {
          const int id = base + __ffs(left) - 1;
          again.offer(whole(id), id);
        }
      best = of_block<Keys::kLanes>(again);
    }
    if (threadIdx.x == 0) s.kept[0] = best.id;
  }
  // The chunks read in addition to its own, to s.kept.
  __device__ void choose() const {
    const bool exact = args.selection == Selection::exact;
    if (own == 0) return;
    if (!exact && args.top_k == 1) return choose_one_by_mean();
    if (exact) score_exactly();
    else score_by_summary();
    keep_best();
  }

  // The summary of the own chunk, which is full: its mean, in the caches.
  __device__ void summarise(R (*partial)[D]) const {
    const int groups = blockDim.x / D;
    const int group = threadIdx.x / D;
    const int d = threadIdx.x % D;
    __syncthreads();
    if (group < groups) {
      R sum = 0;
#pragma unroll 8
      for (int j = group; j < chunk; j += groups)
        sum += to_compute(row(k(), int64_t{own} * chunk + j)[d]);
      partial[group][d] = sum;
    }
    __syncthreads();
    if (group > 0) return;
    R mean = 0;
    for (int g = 0; g < groups; ++g) mean += partial[g][d];
    mean /= R(chunk);
    const T high = from_compute<T>(mean);
    summary(own, 0)[d] = high;
    if (kParts == 2) summary(own, -1)[d] = from_compute<T>(mean - to_compute(high));
  }

  // Number i of the keys read is at position:
  __device__ int64_t position(int i) const {
    const int number = int((float(i) + 0.5f) * inverse);  // exact for kMaxRead keys
    return int64_t(s.read[number] - number) * chunk + i;
  }
};

template <class T, int D, bool kOwnCaches>
__global__ void __launch_bounds__(kMaxThreads, sizeof(T) == 2 ? 3 : 1)
    step_kernel(Top1ChunkForward args) {
  using R = Real<T>;
  using Keys = Rows<T, D>;
  __shared__ DecodeSmem<R> s;
  __shared__ R query[D];
  __shared__ R gathered[kMaxWarps][D];
  R* logits = Step<T, D, kOwnCaches>::scores();
  const int heads = int(args.heads);
  const int h = blockIdx.x % heads;
  const int t = blockIdx.x / heads % int(args.time);
  const int b = blockIdx.x / heads / int(args.time);
  const int kv = h / (heads / int(args.kv_heads));
  const int chunk = int(args.chunk_size);
  const int row = (b * heads + h) * int(args.time) + t;
  const int64_t last = kOwnCaches ? args.positions[b] : args.past + t;
  const R scale = R(args.scale * kLog2eDouble);
  const bool by_mean = args.selection == Selection::approx && !args.forced;
  const auto out_row = [&] {
    return static_cast<T*>(args.out.data) + b * args.out.batch_stride + t * args.out.time_stride +
           h * D;
  };
  if (kOwnCaches && last < 0) {
    if (threadIdx.x < D) out_row()[threadIdx.x] = from_compute<T>(R(0));
    return;
  }
  Step<T, D, kOwnCaches> step{
      args, s, query, b, kv, chunk, int(last / chunk), int(last % chunk), 1 / float(chunk)};
  if constexpr (kOwnCaches) step.load_caches();
  // Heads with the same keys write the same.
  if (kOwnCaches && threadIdx.x < D) {
    step.row(step.k(), last)[threadIdx.x] = step.row(args.new_k, 0)[threadIdx.x];
    step.row(step.v(), last)[threadIdx.x] = step.row(args.new_v, 0)[threadIdx.x];
  }
  if (threadIdx.x < D) {
    const T* q = static_cast<const T*>(args.q.data) + b * args.q.batch_stride +
                 t * args.q.time_stride + h * D;
    query[threadIdx.x] = to_compute(q[threadIdx.x]) * (by_mean ? R(1) : scale);
  }
  step.send_for(step.k(), last / chunk * chunk, step.last + 1);
  step.send_for(step.v(), last / chunk * chunk, step.last + 1);
  if (threadIdx.x < args.top_k)
    s.kept[threadIdx.x] = args.forced ? int(args.selected[row * args.top_k + threadIdx.x]) : -1;
  __syncthreads();
  if (!args.forced) step.choose();
  __syncthreads();
  // The chunks that count, without gaps, and its own.
  int chunks = 0;
  for (int i = 0; i < args.top_k; ++i)
    if (valid_choice(s.kept[i], step.own) >= 0) {
      if (threadIdx.x == 0) s.read[chunks] = s.kept[i];
      step.send_for(step.v(), int64_t(s.kept[i]) * chunk, chunk);
      ++chunks;
    }
  if (!args.forced && !kOwnCaches && threadIdx.x < args.top_k)
    args.selected[row * args.top_k + threadIdx.x] = s.kept[threadIdx.x];
  if (threadIdx.x == 0) s.read[chunks] = step.own;
  if (by_mean && threadIdx.x < D) query[threadIdx.x] *= scale;
  __syncthreads();
  const int count = chunks * chunk + step.last + 1;
  const int group = threadIdx.x / Keys::kLanes;
  const int groups = blockDim.x / Keys::kLanes;
  {
    const Keys keys(query);
    each_row<Keys>(
        group, groups, count, [&](int i) { return step.row(step.k(), step.position(i)); },
        [&](int i, const typename Keys::Row& x) {
          const R score = keys.dot(x);
          if (Keys::lane() == 0 && i < count) logits[i] = score;
        });
  }
  __syncthreads();
  R top = -INFINITY;
  R sum = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) top = fmax(top, logits[i]);
  top = reduce(s, top, Max{});
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    sum += logits[i] = exp2_any(logits[i] - top);
  sum = reduce(s, sum, Plus{});
  R out[Keys::kEach][Keys::kWidth] = {};
  each_row<Keys>(
      group, groups, count, [&](int i) { return step.row(step.v(), step.position(i)); },
      [&](int i, const typename Keys::Row& x) {
        const R weight = i < count ? logits[i] : R(0);
#pragma unroll
        for (int n = 0; n < Keys::kEach; ++n)
#pragma unroll
          for (int e = 0; e < Keys::kWidth; ++e)
            out[n][e] += i < count ? weight * to_compute(x.at[n].at[e]) : R(0);
      });
#pragma unroll
  for (int n = 0; n < Keys::kEach; ++n)
#pragma unroll
    for (int e = 0; e < Keys::kWidth; ++e) {
      out[n][e] = butterfly<Keys::kLanes, 32>(out[n][e], Plus{});
      if (Keys::group() == 0) gathered[threadIdx.x / 32][Keys::offset(n) + e] = out[n][e];
    }
  __syncthreads();
  if (threadIdx.x < D) {
    R total = 0;
    for (int w = 0; w < blockDim.x / 32; ++w) total += gathered[w][threadIdx.x];
    out_row()[threadIdx.x] = from_compute<T>(total / sum);
  }
  if constexpr (kOwnCaches) {
    if (by_mean && step.last + 1 == chunk && h % (heads / int(args.kv_heads)) == 0)
      step.summarise(gathered);
  } else if (threadIdx.x == 0) {
    static_cast<R*>(args.logsumexp)[row] = (top + log2(sum)) * R(kLn2Double);
  }
}

}  // namespace
}  // namespace top1

// Bytes for the scores of all chunks, and then for those of the keys read.
static size_t score_bytes(const Top1ChunkForward& args) {
  const int64_t chunks = (args.past + args.time) / args.chunk_size;
  return size_t(std::max(chunks, (args.top_k + 1) * args.chunk_size)) *
         (args.dtype == DType::f64 ? sizeof(double) : sizeof(float));
}

const char* why_no_step(const Top1ChunkForward& args) {
  if (const char* why_not = why_not_head_dim(args.head_dim)) return why_not;
  if (args.top_k > top1::kMaxKept) return "takes a top_k of 64 at most";
  if ((args.top_k + 1) * args.chunk_size > top1::kMaxRead)
    return "reads at most 16,384 keys per query";
  if (score_bytes(args) > max_shared_bytes() - top1::kOtherBytes)
    return "keeps at most 192 KB of scores per query, and 64 KB on GPUs other than Hopper";
  if (args.batch * args.time * args.heads >= int64_t{1} << 31)
    return "takes fewer than 2^31 queries";
  const int64_t element = args.dtype == DType::f64 ? 8 : args.dtype == DType::f32 ? 4 : 2;
  return rows_aligned({args.k, args.v, args.summaries}, element)
             ? nullptr
             : "takes rows that begin at multiples of 16 bytes";
}

void top1_chunk_step(const Top1ChunkForward& args, Stream stream) {
  check("top1_chunk", why_no_step(args));
  const unsigned blocks = unsigned(args.batch * args.time * args.heads);
  const unsigned threads = blocks < 2u * unsigned(sm_count()) ? top1::kMaxThreads : 128;
  with_type(args.dtype, [&]<class T>(T) {
    with_head_dim(args.head_dim, [&](auto d) {
      const auto launch = [&](auto kernel) {
        launch_kernel(kernel, blocks, threads, score_bytes(args), stream, args);
      };
      if (!args.caches) return launch(top1::step_kernel<T, d(), false>);
      if constexpr (sizeof(T) <= 4) launch(top1::step_kernel<T, d(), true>);
    });
  });
}

}  // namespace assay::ops::cuda
