// Times of the CUDA kernels of window_attention, and their floors, on random queries and keys whose
// scores spread as those of unit vectors at scale 10 do. Each time is the median of 30 calls. The
// floor is the longest of three times:
// - every operand is moved once, at the bandwidth of a copy that is measured here;
// - the products of the scores in the window (2 · D per score each: 2 forward, 5 backward), at the
//   peak of the tensor cores;
// - one exponential per score and direction, at the 16 per clock of an SM's special-function units.
#include "cuda_bench.h"
#include "ops/attention/window_attention/kernel.h"

namespace {

using namespace assay::ops;

void attention(const Machine& machine, int64_t B, int64_t T, int64_t H, int64_t Hkv, int64_t D,
               int64_t window) {
  Buffers buffers;
  const auto queries = [&] { return buffers.sequence(B, T, H * D); };
  const auto keys = [&] { return buffers.sequence(B, T, Hkv * D); };
  WindowAttentionForward p{DType::bf16, B, T, T, H, Hkv, D, std::min(window, T), 10 / double(D)};
  p.q = queries();
  p.k = keys();
  p.v = keys();
  p.out = queries();
  p.logsumexp = buffers.raw(B * H * T * 4);
  const WindowAttentionBackward g{p, queries(), queries(), keys(), keys(), nullptr};
  void* forward = buffers.raw(cuda::workspace_bytes(p));
  void* backward = buffers.raw(cuda::workspace_bytes(g));
  std::printf("window_attention bf16, B %ld, T %ld, H %ld / %ld, D %ld, window %ld\n", long(B),
              long(T), long(H), long(Hkv), long(D), long(p.window));
  const double W = double(p.window);
  const double scores = double(B) * H * (W * T - W * (W - 1) / 2);
  const double numbers = double(B) * T * (H + Hkv) * D;
  const auto floor = [&](double bytes, int products) {
    return machine.floor_ms(bytes, products * 2 * scores * D, scores);
  };
  const double forward_ms = median_ms([&] { cuda::window_attention(p, forward, nullptr); });
  const double backward_ms = median_ms([&] { cuda::window_attention(g, backward, nullptr); });
  row("forward", forward_ms, floor(4 * numbers, 2));
  row("backward", backward_ms, floor(8 * numbers, 5));
  row("forward + backward", forward_ms + backward_ms,
      floor(4 * numbers, 2) + floor(8 * numbers, 5));
  must(cudaDeviceSynchronize());
}

}  // namespace

int main() {
  const Machine machine;
  constexpr int64_t kAll = int64_t{1} << 40;
  attention(machine, 32, 2048, 12, 12, 64, kAll);
  attention(machine, 1, 102400, 12, 12, 64, kAll);
  attention(machine, 1, 102400, 12, 12, 64, 256);
  attention(machine, 32, 2048, 12, 12, 64, 256);
  attention(machine, 8, 2048, 16, 16, 128, kAll);
  attention(machine, 8, 2048, 16, 16, 96, kAll);
}
