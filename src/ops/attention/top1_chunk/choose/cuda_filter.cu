// The exact choice in two steps. A first kernel sums cheap exponentials, whose error is bounded,
// over the keys of each chunk, and lists the chunks that may be the best. Where more than one may
// be, the pairs of query and chunk get exact scores (cuda_pairs.cu).
//
// The special-function unit computes every other exponential. The others are cheap: 2^x with a
// mantissa that is linear between powers of two, which is between 2^x and 1.0615 2^x. The bits of
// such a number are 2^23 (x + 127), and an addition leaves 2^10 (x + 127) in the low bits of a
// float. So a sum of both kinds has a lower and an upper bound.
#include "ops/attention/top1_chunk/choose/cuda_scores.cuh"
#include "ops/cuda/attention.cuh"
#include "ops/cuda/wgmma.cuh"

namespace assay::ops::cuda::top1 {
namespace {

constexpr int kGroups = kExactGroups;
constexpr int kThreads = kGroups * 128;

// The sum is between `exact` + kLow `cheap` and `exact` + kHigh `cheap`: a cheap exponential is at
// most (1 + f) / 2^f, f = 1 / ln 2 − 1, of the exact one, and rounding x to 2^−10 moves it by
// 2^−11. kSlack is for the rounding of products and sums.
constexpr float kLow = 1 / 1.0621f;
constexpr float kHigh = 1.0006f;
constexpr float kSlack = 1.0003f;

struct SumBounds {
  // partial sums of a lane's two rows
  float exact[2] = {};
  float cheap[2] = {};

  // Adds the exponentials of a lane's scores, every other one exact. `shift`: 2^13.
  template <int N>
  __device__ void add(const float (&s)[N][4], float scale, uint32_t shift) {
    constexpr float kRound = 12288 + 127;  // a float from 2^13 on has a last place of 2^-10
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) {
      const float x = s[i / 4][i % 4];
      if (i % 2 == 0) exact[i % 4 / 2] += ex2_approx(x * scale);
      else cheap[i % 4 / 2] += __uint_as_float(__float_as_uint(fmaf(x, scale, kRound)) * shift);
    }
  }
  // The bounds over all columns: even lanes those of row 0, odd lanes of row 1.
  __device__ float2 finish() const {
    const auto over_quad = [](const float(&x)[2]) {
      const bool odd = threadIdx.x % 2;
      float mine = odd ? x[1] : x[0];
      mine += __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
      return mine + __shfl_xor_sync(~0u, mine, 2);
    };
    const float known = over_quad(exact);
    const float about = over_quad(cheap);
    return {fmaf(about, kLow, known), fmaf(about, kHigh, known) * kSlack};
  }
};

// The chunks that may be the best of a row, in shared memory: upper bounds and numbers. One lane of
// a row offers candidates, so that a list has one writer.
struct Kept {
  static constexpr int kStride = kGroups * kRows;
  static constexpr int kCapacity = 31;
  struct alignas(8) Entry {
    float sum;
    int chunk;
  };
  Entry* entries;  // [kCapacity + 1, rows of the block]
  int next;        // where the row's next one will be; at first, the row
  float best = 0;  // the largest lower bound

  __device__ int count() const { return next / kStride; }
  __device__ Entry& operator[](int i) const { return entries[i * kStride + next % kStride]; }
  // Without a branch, which would delay the whole warpgroup: one of its 64 rows often has a new
  // chunk.
  __device__ void offer(float2 bounds, int chunk, bool candidate) {
    const bool wanted = candidate && bounds.y >= best;
    if (candidate) entries[next] = {bounds.y, chunk};
    best = wanted ? fmaxf(best, bounds.x) : best;
    next += wanted ? kStride : 0;
    if (next >= kCapacity * kStride) drop();
  }
  // Drops those that cannot be the best any more. If none can be dropped, the last one is: there
  // are too many in any case.
  __device__ void drop() {
    int left = 0;
#pragma unroll 1
    for (int i = 0; i < count(); ++i)
      if (const Entry entry = (*this)[i]; entry.sum >= best) (*this)[left++] = entry;
    next = min(left, kCapacity - 1) * kStride + next % kStride;
  }
  // Row `row` of [B, H, T]. The list is empty where one chunk is left, or all queries of the block
  // start again.
  __device__ void write(const Top1ChunkForward& args, const SelectWorkspace& scratch, int64_t row,
                        bool again) const {
    args.selected[row] = count() > 0 ? (*this)[0].chunk : -1;
    const int listed = again || count() == 1 ? 0 : count();
    Vec<uint16_t, kFilterSlots> list;
#pragma unroll
    for (int i = 0; i < kFilterSlots; ++i)
      list[i] = i < listed ? uint16_t((*this)[i].chunk) : kNoChunk;
    *reinterpret_cast<decltype(list)*>(scratch.listed + row * kFilterSlots) = list;
  }
};

template <int D, int kKeys>
struct FilterSmem {
  ScoreSmem<D, kKeys> scores;
  Kept::Entry* kept;
  static constexpr size_t kBytes = ScoreSmem<D, kKeys>::bytes(kGroups) +
                                   (Kept::kCapacity + 1) * Kept::kStride * sizeof(Kept::Entry);
  __device__ FilterSmem()
      : scores(kGroups),
        kept(reinterpret_cast<Kept::Entry*>(scores.pipeline.barriers + 2 * scores.kStages)) {}
};

template <int D, int kKeys>
__global__ void __launch_bounds__(kThreads + 32, 1)
    filter_kernel(Top1ChunkForward args, SelectWorkspace scratch, int tiles) {
  const QueryTile mine(args, kGroups * kRows);
  const FilterSmem<D, kKeys> shared;
  const ScoreSmem<D, kKeys>& stages = shared.scores;
  const int64_t head = int64_t{mine.b} * args.kv_heads + mine.kv;
  const int steps = int(args.chunk_size) / kKeys;
  const int count = mine.candidates * steps;
  __shared__ bool again;
  if (threadIdx.x == 0) again = false;
  score_block<D, kGroups>(
      stages, scratch.columns + head * tiles * kKeys * D, count, args, mine, [&] {
        // in registers: an instruction has one constant
        const float scale = __shfl_sync(~0u, float(args.scale) * kLog2e, 0);
        const uint32_t shift = __shfl_sync(~0u, 1u << 13, 0);
        const float* norms = scratch.key_norm + head * (tiles / steps);
        const bool bounded =
            score_bound<D>(stages.group(), scale, norms, mine.candidates) <= kBound;
        if (!bounded) again = true;
        const bool writes = threadIdx.x % 4 < 2;  // one lane of the quad for each of its two rows
        const int row = QueryTile::row(threadIdx.x % 2);
        const int own = writes ? (mine.first + min(row, mine.count - 1)) / int(args.chunk_size) : 0;
        Kept kept{shared.kept, row};
        SumBounds sum;
        int chunk = 0;
        int step = 0;
        const auto add = [&](const float(&s)[kKeys / 16][4], int, int first) {
          sum.add(s, scale, shift);
          if (first == 0 || ++step < steps) return;
          kept.offer(sum.finish(), chunk, chunk < own);
          sum = {};
          step = 0;
          ++chunk;
        };
        if (bounded) score_tiles<D, kKeys>(stages, count, add);
        else skip_tiles(stages, count);
        kept.drop();
        if (kept.count() > kFilterSlots) again = true;
        named_barrier_sync<kThreads>(warpgroup_barrier(kGroups));
        if (threadIdx.x == 0) scratch.again[blockIdx.x] = again;
        if (writes && row < mine.count) kept.write(args, scratch, mine.rows + row, again);
      });
}

}  // namespace

void filter_chunks(const Top1ChunkForward& args, const SelectWorkspace& scratch, int64_t tiles,
                   Stream stream) {
  with_head_dim(args.head_dim, [&](auto d) {
    with_constant<64, 128>(tile_keys(args), [&](auto keys) {
      launch_kernel(filter_kernel<d(), keys()>, unsigned(query_blocks(args, kGroups)),
                    kThreads + 32, FilterSmem<d(), keys()>::kBytes, stream, args, scratch,
                    int(tiles));
    });
  });
}

}  // namespace assay::ops::cuda::top1
