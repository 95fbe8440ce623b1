// Times of the CUDA kernels of top1_chunk beside their floor, on random unit vectors, medians of 30 calls. The floor is
// the longest of three times: every operand moved once, at the bandwidth of a copy measured here; the products of the
// two chunks that a query reads (4 and 10 · D a query and key) and of the selection, at the peak of the tensor cores;
// one exponential a query and key read, or (exact) scored, at the 16 a clock of a multiprocessor's special-function
// units.
#include <cstring>

#include "cuda_bench.h"
#include "ops/top1_chunk/kernel.h"

namespace {

using namespace assay::ops;

__global__ void normalise(bf16* x, int64_t rows, int width) {
  const int64_t row = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (row >= rows) return;
  float square = 0;
  for (int i = 0; i < width; ++i) square += cuda::real(x[row * width + i]) * cuda::real(x[row * width + i]);
  for (int i = 0; i < width; ++i)
    x[row * width + i] = __float2bfloat16(cuda::real(x[row * width + i]) * rsqrtf(square));
}

View unit(Buffers& buffers, int64_t B, int64_t T, int64_t H, int64_t D) {
  const View x = buffers.sequence(B, T, H * D);
  normalise<<<unsigned(cuda::ceil_div(B * T * H, 256)), 256>>>(static_cast<bf16*>(x.data), B * T * H, int(D));
  return x;
}

void attention(const Machine& machine, Selection selection, int64_t B, int64_t T, int64_t H, int64_t D, int64_t C) {
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
  p.q = unit(buffers, B, T, H, D), p.k = unit(buffers, B, T, H, D), p.v = buffers.sequence(B, T, H * D);
  p.out = buffers.sequence(B, T, H * D), p.logsumexp = buffers.raw(B * H * T * 4);
  p.selected = static_cast<int64_t*>(buffers.raw(B * H * T * 8));
  Top1ChunkBackward q{.forward = p, .dout = buffers.sequence(B, T, H * D)};
  q.dq = buffers.sequence(B, T, H * D), q.dk = buffers.sequence(B, T, H * D), q.dv = buffers.sequence(B, T, H * D);
  void *forward = buffers.raw(cuda::workspace_bytes(p)), *backward = buffers.raw(cuda::workspace_bytes(q));
  const char* name = selection == Selection::exact ? "exact" : selection == Selection::approx ? "approx" : "shortlist";
  std::printf("top1_chunk %s bf16, B %ld, T %ld, H %ld, D %ld, C %ld: workspace %.0f + %.0f MB\n", name, long(B),
              long(T), long(H), long(D), long(C), cuda::workspace_bytes(p) * 1e-6, cuda::workspace_bytes(q) * 1e-6);
  const double numbers = double(B) * T * H * D, read = 1.5 * B * T * H * C;
  const double scored = selection == Selection::exact ? 0.5 * B * H * T * (T - C) : 0;
  const double scores = selection == Selection::exact ? scored : 0.5 * B * H * T * (T / C - 1);
  auto floor = [&](double bytes, double flops, double exponentials) {
    return std::max(
        {bytes / machine.bytes_per_ms, flops / machine.bf16_flops_per_ms, exponentials / machine.exponentials_per_ms});
  };
  const double forward_floor = floor(8 * numbers, (4 * read + 2 * scores) * D, read + scored);
  const double backward_floor = floor(16 * numbers, 10 * read * D, read);
  const double forward_ms = median_ms([&] { cuda::top1_chunk(p, forward, nullptr); });
  p.forced = true;
  const double forced_ms = median_ms([&] { cuda::top1_chunk(p, forward, nullptr); });
  p.forced = false;
  const double both_ms = median_ms([&] {
    cuda::top1_chunk(p, forward, nullptr);
    cuda::top1_chunk(q, backward, nullptr);
  });
  must(cudaDeviceSynchronize());
  row("forward, selection given", forced_ms, floor(8 * numbers, 4 * read * D, read));
  row("forward", forward_ms, forward_floor);
  row("forward + backward", both_ms, forward_floor + backward_floor);
}

}  // namespace

// Arguments: [approx|exact …]; all by default.
int main(int argc, char** argv) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return std::puts("no GPU is seen: nothing was timed"), 0;
  const Machine machine;
  auto wanted = [&](const char* name) {
    return argc < 2 || std::any_of(argv + 1, argv + argc, [&](const char* x) { return !std::strcmp(x, name); });
  };
  if (wanted("approx")) attention(machine, Selection::approx, 1, 102400, 12, 64, 128);
  if (wanted("exact")) attention(machine, Selection::exact, 1, 102400, 12, 64, 128);
  if (wanted("short")) {
    attention(machine, Selection::approx, 16, 2048, 12, 64, 128);
    attention(machine, Selection::exact, 16, 2048, 12, 64, 128);
    attention(machine, Selection::approx, 4, 16384, 16, 128, 128);
  }
}
