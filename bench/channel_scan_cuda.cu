// Times of the CUDA kernels of channel_scan, all three updates, on random data, and their floors.
// Each time is the median of 30 calls. The floor is the time to move every operand once, at the
// bandwidth of a copy that is measured here.
#include "cuda_bench.h"
#include "ops/recurrence/channel_scan/kernel.h"

namespace {

using namespace assay::ops;

void scan(const Machine& machine, Update update, const char* name, int64_t B, int64_t T, int64_t M,
          int64_t N) {
  Buffers buffers;
  auto real = [&](int64_t count, float low, float high) {
    return buffers.random<float>(count, low, high);
  };
  ChannelScanForward p{.dtype = DType::bf16,
                       .update = update,
                       .batch = B,
                       .time = T,
                       .channels = M,
                       .state_size = N};
  p.delta_softplus = true;
  p.x = buffers.sequence(B, T, M);
  p.delta = buffers.sequence(B, T, M);
  p.z = buffers.sequence(B, T, M);
  p.k = buffers.sequence(B, T, N);
  p.q = buffers.sequence(B, T, N);
  p.y = buffers.sequence(B, T, M);
  p.D = real(M, 0, 1);
  p.delta_bias = real(M, -6, -3);
  if (update == Update::decay) p.rate = {real(B * T * N, -16, -0.5f), T * N, N};
  p.final_state = real(B * M * N, 0, 1);
  p.chunk_states = real(cuda::chunk_states(p), 0, 1);
  ChannelScanBackward q{.forward = p, .dy = buffers.sequence(B, T, M)};
  q.dx = buffers.sequence(B, T, M);
  q.ddelta = buffers.sequence(B, T, M);
  q.dz = buffers.sequence(B, T, M);
  q.dk = real(B * T * N, 0, 1);
  q.dq = real(B * T * N, 0, 1);
  q.dD = real(M, 0, 1);
  q.ddelta_bias = real(M, 0, 1);
  if (update == Update::decay) q.drate = real(B * T * N, 0, 1);
  void* forward = buffers.raw(cuda::workspace_bytes(p));
  void* backward = buffers.raw(cuda::workspace_bytes(q));

  std::printf("channel_scan %s bf16, B %ld, T %ld, Dm %ld, N %ld, chunks of %ld\n", name, long(B),
              long(T), long(M), long(N), long(cuda::chunk_size(p)));
  std::printf("  MB: workspace %.0f + %.0f, states %.0f\n", cuda::workspace_bytes(p) * 1e-6,
              cuda::workspace_bytes(q) * 1e-6, cuda::chunk_states(p) * 4e-6);
  const double elements = double(B) * T * M;
  const double forward_floor = 8 * elements / machine.bytes_per_ms;
  const double backward_floor = 14 * elements / machine.bytes_per_ms;
  const double forward_ms = median_ms([&] { cuda::channel_scan(p, forward, nullptr); });
  const double both_ms = median_ms([&] {
    cuda::channel_scan(p, forward, nullptr);
    cuda::channel_scan(q, backward, nullptr);
  });
  must(cudaDeviceSynchronize());
  row("forward", forward_ms, forward_floor);
  row("forward + backward", both_ms, forward_floor + backward_floor);
}

}  // namespace

int main() {
  const Machine machine;
  for (const auto& [update, name] : {std::pair{Update::diagonal, "diagonal"},
                                     {Update::decay, "decay"},
                                     {Update::exact, "exact"}}) {
    for (auto [B, T, M] : {std::tuple{8, 2048, 1536}, {1, 102400, 1536}, {32, 1024, 1024}})
      scan(machine, update, name, B, T, M, 16);
    scan(machine, update, name, 8, 2048, 1536, 64);
  }
}
