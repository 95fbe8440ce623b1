// Times of the CUDA kernels of top1_element, and their floors, on random queries and keys whose
// scores spread as those of unit vectors at scale 10 do. Each time is the median of 30 calls. The
// floor is the longest of three times:
// - every operand is moved once, at the bandwidth of a copy that is measured here;
// - the products of the causal half (2 · D per score each: 2 forward, 4 backward), at the peak of
//   the tensor cores;
// - one exponential per score and pass over them, at the 16 per clock of an SM's special-function
//   units.
#include "cuda_bench.h"
#include "ops/attention/top1_element/kernel.h"

namespace {

using namespace assay::ops;

void attention(const Machine& machine, int64_t B, int64_t T, int64_t H, int64_t Hk, int64_t D) {
  Buffers buffers;
  const auto queries = [&] { return buffers.sequence(B, T, H * D); };
  const auto keys = [&] { return buffers.sequence(B, T, Hk * D); };
  Top1ElementForward p{.dtype = DType::bf16,
                       .batch = B,
                       .time = T,
                       .past = 0,
                       .heads = H,
                       .kv_heads = Hk,
                       .head_dim = D,
                       .scale = 10 / double(D)};
  p.q = queries();
  p.k = keys();
  p.v = keys();
  p.out = queries();
  p.logsumexp = buffers.raw(B * H * T * 4);
  p.soft = buffers.raw(B * H * T * D * 4);
  p.index = static_cast<int64_t*>(buffers.raw(B * H * T * 8));
  const Top1ElementBackward q{p, queries(), queries(), keys(), keys()};
  void* forward = buffers.raw(cuda::workspace_bytes(p));
  void* backward = buffers.raw(cuda::workspace_bytes(q));
  std::printf("top1_element bf16, B %ld, T %ld, H %ld / %ld, D %ld: workspace %.0f + %.0f MB\n",
              long(B), long(T), long(H), long(Hk), long(D), cuda::workspace_bytes(p) * 1e-6,
              cuda::workspace_bytes(q) * 1e-6);
  const double scores = 0.5 * B * H * T * double(T);
  const double numbers = double(B) * T * (H + Hk) * D;
  const auto floor = [&](double bytes, int products, int exponentials) {
    return machine.floor_ms(bytes, products * 2 * scores * D, exponentials * scores);
  };
  const double forward_floor = floor(6 * numbers, 2, 1);
  const double backward_floor = floor(10 * numbers, 4, 1);
  Top1ElementForward choice = p;
  choice.logsumexp = choice.soft = nullptr;
  row("forward without gradient", median_ms([&] { cuda::top1_element(choice, forward, nullptr); }),
      floor(4 * numbers, 1, 0));
  row("forward", median_ms([&] { cuda::top1_element(p, forward, nullptr); }), forward_floor);
  row("forward + backward", median_ms([&] {
        cuda::top1_element(p, forward, nullptr);
        cuda::top1_element(q, backward, nullptr);
      }),
      forward_floor + backward_floor);
  must(cudaDeviceSynchronize());
}

}  // namespace

int main() {
  const Machine machine;
  attention(machine, 1, 102400, 12, 12, 64);
  attention(machine, 16, 2048, 12, 12, 64);
  attention(machine, 1, 16384, 16, 4, 128);
  attention(machine, 1, 16384, 16, 16, 96);
}
