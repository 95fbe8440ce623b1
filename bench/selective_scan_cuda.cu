// Times of the CUDA kernels of selective_scan and causal_conv1d on random data, and their floors.
// Each time is the median of 30 calls. The floor is the longer of two times:
// - every operand is moved once, at the bandwidth of a copy that is measured here;
// - the B·T·Dm·N exponentials, at the 16 per clock of an SM's special-function units.
#include "cuda_bench.h"
#include "ops/recurrence/causal_conv1d/kernel.h"
#include "ops/recurrence/channel_scan/kernel.h"

namespace {

using namespace assay::ops;

void scan(const Machine& machine, int64_t B, int64_t T, int64_t M, int64_t N) {
  Buffers buffers;
  auto real = [&](int64_t count, float low, float high) {
    return buffers.random<float>(count, low, high);
  };
  ChannelScanForward p{.dtype = DType::bf16,
                       .update = Update::decay,
                       .batch = B,
                       .time = T,
                       .channels = M,
                       .state_size = N,
                       .delta_softplus = true,
                       .rate_of_channels = true};
  p.x = buffers.sequence(B, T, M);
  p.delta = buffers.sequence(B, T, M);
  p.z = buffers.sequence(B, T, M);
  p.k = buffers.sequence(B, T, N);
  p.q = buffers.sequence(B, T, N);
  p.y = buffers.sequence(B, T, M);
  p.rate = {real(M * N, -16, -0.5f)};
  p.D = real(M, 0, 1);
  p.delta_bias = real(M, -6, -3);
  p.final_state = real(B * M * N, 0, 1);
  p.chunk_states = real(cuda::chunk_states(p), 0, 1);
  ChannelScanBackward q{.forward = p, .dy = buffers.sequence(B, T, M)};
  q.dx = buffers.sequence(B, T, M);
  q.ddelta = buffers.sequence(B, T, M);
  q.dz = buffers.sequence(B, T, M);
  q.dk = real(B * T * N, 0, 1);
  q.dq = real(B * T * N, 0, 1);
  q.drate = real(M * N, 0, 1);
  q.dD = real(M, 0, 1);
  q.ddelta_bias = real(M, 0, 1);
  void* forward = buffers.raw(cuda::workspace_bytes(p));
  void* backward = buffers.raw(cuda::workspace_bytes(q));

  std::printf("selective_scan bf16, B %ld, T %ld, Dm %ld, N %ld, chunks of %ld\n", long(B), long(T),
              long(M), long(N), long(cuda::chunk_size(p)));
  std::printf("  MB: workspace %.0f + %.0f, states %.0f\n", cuda::workspace_bytes(p) * 1e-6,
              cuda::workspace_bytes(q) * 1e-6, cuda::chunk_states(p) * 4e-6);
  const double elements = double(B) * T * M;
  const double inputs = double(B) * T * N;
  const double forward_floor = machine.floor_ms(8 * elements + 4 * inputs, 0, elements * N);
  const double backward_floor = machine.floor_ms(14 * elements + 12 * inputs, 0, elements * N);
  const double forward_ms = median_ms([&] { cuda::channel_scan(p, forward, nullptr); });
  const double both_ms = median_ms([&] {
    cuda::channel_scan(p, forward, nullptr);
    cuda::channel_scan(q, backward, nullptr);
  });
  must(cudaDeviceSynchronize());
  row("forward", forward_ms, forward_floor);
  row("forward + backward", both_ms, forward_floor + backward_floor);
}

void conv(const Machine& machine, int64_t B, int64_t T, int64_t M, int64_t K) {
  Buffers buffers;
  CausalConv1dForward p{
      .dtype = DType::bf16, .batch = B, .time = T, .channels = M, .width = K, .silu = true};
  p.x = buffers.sequence(B, T, M);
  p.y = buffers.sequence(B, T, M);
  p.weight = buffers.random<float>(M * K, -1, 1);
  p.bias = buffers.random<float>(M, -1, 1);
  p.final_state = buffers.random<float>(B * M * K, -1, 1);
  CausalConv1dBackward q{.forward = p, .dy = {buffers.sequence(B, T, M)}};
  q.dx = buffers.sequence(B, T, M);
  q.dweight = buffers.random<float>(M * K, -1, 1);
  q.dbias = buffers.random<float>(M, -1, 1);
  void* workspace = buffers.raw(cuda::workspace_bytes(q));
  std::printf("causal_conv1d bf16, B %ld, T %ld, Dm %ld, K %ld\n", long(B), long(T), long(M),
              long(K));
  const double elements = double(B) * T * M;
  row("forward", median_ms([&] { cuda::causal_conv1d(p, nullptr); }),
      4 * elements / machine.bytes_per_ms);
  row("backward", median_ms([&] { cuda::causal_conv1d(q, workspace, nullptr); }),
      6 * elements / machine.bytes_per_ms);
  must(cudaDeviceSynchronize());
}

}  // namespace

int main() {
  const Machine machine;
  for (auto [B, T] : {std::pair{8, 2048}, std::pair{1, 102400}}) {
    scan(machine, B, T, 1536, 16);
    conv(machine, B, T, 1536, 4);
  }
}
