// Times of the CUDA kernels of top1_chunk on random unit vectors, and their floors. Each time is
// the median of 30 calls. The floor is the longest of three times:
// - every operand is moved once, at the bandwidth of a copy that is measured here;
// - the products of the two chunks that a query reads (4 · D and 10 · D per query and key) and of
//   the selection, at the peak of the tensor cores;
// - one exponential per query and key that is read, or (exact) scored, at the 16 per clock of an
//   SM's special-function units.
#include <cstring>

#include "cuda_bench.h"
#include "ops/attention/top1_chunk/kernel.h"

namespace {

using namespace assay::ops;

__global__ void normalise(bf16* x, int64_t rows, int width) {
  const int64_t row = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (row >= rows) return;
  float square = 0;
  for (int i = 0; i < width; ++i)
    square += cuda::to_compute(x[row * width + i]) * cuda::to_compute(x[row * width + i]);
  for (int i = 0; i < width; ++i)
    x[row * width + i] = __float2bfloat16(cuda::to_compute(x[row * width + i]) * rsqrtf(square));
}

View unit(Buffers& buffers, int64_t B, int64_t T, int64_t H, int64_t D) {
  const View x = buffers.sequence(B, T, H * D);
  normalise<<<unsigned(cuda::ceil_div(B * T * H, 256)), 256>>>(static_cast<bf16*>(x.data),
                                                               B * T * H, int(D));
  return x;
}

const char* name_of(Selection selection) {
  return selection == Selection::exact ? "exact" : "approx";
}

void attention(const Machine& machine, Selection selection, int64_t B, int64_t T, int64_t H,
               int64_t D, int64_t C) {
  Buffers buffers;
  Top1ChunkForward p{.dtype = DType::bf16,
                     .batch = B,
                     .time = T,
                     .heads = H,
                     .kv_heads = H,
                     .head_dim = D,
                     .chunk_size = C,
                     .top_k = 1,
                     .scale = 10,
                     .selection = selection};
  p.q = unit(buffers, B, T, H, D);
  p.k = unit(buffers, B, T, H, D);
  p.v = buffers.sequence(B, T, H * D);
  p.out = buffers.sequence(B, T, H * D);
  p.logsumexp = buffers.raw(B * H * T * 4);
  p.selected = static_cast<int64_t*>(buffers.raw(B * H * T * 8));
  Top1ChunkBackward q{.forward = p, .dout = buffers.sequence(B, T, H * D)};
  q.dq = buffers.sequence(B, T, H * D);
  q.dk = buffers.sequence(B, T, H * D);
  q.dv = buffers.sequence(B, T, H * D);
  void* forward = buffers.raw(cuda::workspace_bytes(p));
  void* backward = buffers.raw(cuda::workspace_bytes(q));
  std::printf("top1_chunk %s bf16, B %ld, T %ld, H %ld, D %ld, C %ld: workspace %.0f + %.0f MB\n",
              name_of(selection), long(B), long(T), long(H), long(D), long(C),
              cuda::workspace_bytes(p) * 1e-6, cuda::workspace_bytes(q) * 1e-6);
  const double numbers = double(B) * T * H * D;
  const double read = 1.5 * B * T * H * C;
  const double pairs = 0.5 * B * H * T * (T / C - 1);  // pairs of a query and a candidate
  const bool exact = selection == Selection::exact;
  const double scores = exact ? pairs * C : pairs;
  const double forward_floor =
      machine.floor_ms(8 * numbers, (4 * read + 2 * scores) * D, exact ? read + scores : read);
  const double backward_floor = machine.floor_ms(16 * numbers, 10 * read * D, read);
  const double forward_ms = median_ms([&] { cuda::top1_chunk(p, forward, nullptr); });
  p.forced = true;
  const double forced_ms = median_ms([&] { cuda::top1_chunk(p, forward, nullptr); });
  p.forced = false;
  const double both_ms = median_ms([&] {
    cuda::top1_chunk(p, forward, nullptr);
    cuda::top1_chunk(q, backward, nullptr);
  });
  must(cudaDeviceSynchronize());
  row("forward, selection given", forced_ms, machine.floor_ms(8 * numbers, 4 * read * D, read));
  row("forward", forward_ms, forward_floor);
  row("forward + backward", both_ms, forward_floor + backward_floor);
}

// The rounding error of each chunk's mean and the rounded mean: rows 0 and 1 of its summary. There
// is one block per chunk.
__global__ void mean_parts(View k, View summaries, int chunk, int heads, int width) {
  const int chunks = int(summaries.batch_stride / summaries.time_stride);
  const int b = blockIdx.x / chunks;
  const int c = blockIdx.x % chunks;
  for (int i = threadIdx.x; i < heads * width; i += blockDim.x) {
    const bf16* from = static_cast<const bf16*>(k.data) + b * k.batch_stride +
                       int64_t{c} * chunk * k.time_stride + i;
    float mean = 0;
    for (int j = 0; j < chunk; ++j)
      mean += cuda::to_compute(from[j * k.time_stride]) / float(chunk);
    bf16* to = static_cast<bf16*>(summaries.data) + b * summaries.batch_stride +
               c * summaries.time_stride + i / width * 2 * width + i % width;
    const bf16 high = __float2bfloat16(mean);
    to[0] = __float2bfloat16(mean - cuda::to_compute(high));
    to[width] = high;
  }
}

// One token after a cache of T, of two layers in turn. The floor: what is read, at the bandwidth
// of a copy.
void step(const Machine& machine, Selection selection, int64_t B, int64_t T, int64_t H, int64_t D,
          int64_t C) {
  Buffers buffers;
  Top1ChunkForward layers[2];
  for (Top1ChunkForward& p : layers) {
    p = {.dtype = DType::bf16,
         .batch = B,
         .time = 1,
         .heads = H,
         .kv_heads = H,
         .head_dim = D,
         .chunk_size = C,
         .top_k = 1,
         .scale = 10,
         .selection = selection,
         .past = T - 1};
    p.q = unit(buffers, B, 1, H, D);
    p.k = unit(buffers, B, T, H, D);
    p.v = buffers.sequence(B, T, H * D);
    const int64_t row = H * 2 * D;
    p.summaries = {buffers.random<bf16>(B * (T / C) * row, -0.1f, 0.1f), T / C * row, row};
    mean_parts<<<unsigned(B * (T / C)), 256>>>(p.k, p.summaries, int(C), int(H), int(D));
    p.out = buffers.sequence(B, 1, H * D);
    p.logsumexp = buffers.raw(B * H * 4);
    p.selected = static_cast<int64_t*>(buffers.raw(B * H * 8));
  }
  const double keys = double((T - 1) % C + 1 + C);
  const double chosen = 2.0 * double(selection == Selection::exact ? T : T / C);
  int turn = 0;
  const double ms = median_ms([&] { cuda::top1_chunk_step(layers[turn++ % 2], nullptr); });
  must(cudaDeviceSynchronize());
  std::printf("top1_chunk %s bf16, one step: B %ld, T %ld, H %ld, D %ld, C %ld\n",
              name_of(selection), long(B), long(T), long(H), long(D), long(C));
  row("step", ms, double(B) * H * D * (keys * 4 + chosen) / machine.bytes_per_ms);
}

}  // namespace

// Arguments: [approx|exact|short|step …]; all by default.
int main(int argc, char** argv) {
  const Machine machine;
  auto wanted = [&](const char* name) {
    return argc < 2 ||
           std::any_of(argv + 1, argv + argc, [&](const char* x) { return !std::strcmp(x, name); });
  };
  if (wanted("approx")) attention(machine, Selection::approx, 1, 102400, 12, 64, 128);
  if (wanted("exact")) attention(machine, Selection::exact, 1, 102400, 12, 64, 128);
  if (wanted("step"))
    for (const Selection selection : {Selection::approx, Selection::exact}) {
      step(machine, selection, 64, 50000, 12, 64, 128);
      step(machine, selection, 1, 50000, 12, 64, 128);
    }
  if (wanted("short")) {
    attention(machine, Selection::approx, 16, 2048, 12, 64, 128);
    attention(machine, Selection::exact, 16, 2048, 12, 64, 128);
    attention(machine, Selection::approx, 4, 16384, 16, 128, 128);
  }
}
