#include <torch/torch.h>

#include "ops/register.h"
#include "ops/tensors.h"
#include "ops/top1_chunk/top1_chunk.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "top1_certified";
constexpr int64_t kBlock = 512;  // queries whose bounds are in memory at once
// of the largest score: more than any kernel's rounding moves it by
constexpr double kRounding = 1e-3;

struct Chunks {
  at::Tensor mean, radius;  // [B, H, chunks, D], [B, H, 1, chunks]
};

Chunks chunks_of(const at::Tensor& k, int64_t chunk_size, int64_t group) {
  const at::Tensor keys = k.unflatten(1, {k.size(1) / chunk_size, chunk_size}),
                   mean = keys.mean(2, true);
  const at::Tensor radius = (keys - mean).norm(2, -1).amax(2);  // [B, chunks, Hk]
  return {mean.squeeze(2).transpose(1, 2).repeat_interleave(group, 1),
          radius.transpose(1, 2).repeat_interleave(group, 1).unsqueeze(2)};
}

// q [B, H, t, D], selected [B, H, t, top_k], own [t, 1].
at::Tensor certified_block(const at::Tensor& q, const at::Tensor& selected, const at::Tensor& own,
                           const Chunks& chunks, double scale, int64_t shortlist) {
  const int64_t count = chunks.mean.size(2);
  const at::Tensor first = scale * q.matmul(chunks.mean.mT()),
                   reach = scale * q.norm(2, -1, true) * chunks.radius;
  const at::Tensor none = at::arange(count, own.options()) >= own;
  const at::Tensor bound = (first + 0.5 * reach.square()).masked_fill(none, -INFINITY);
  // none: a column of its own
  const at::Tensor index = at::where((selected < 0) | (selected >= own), count, selected);
  const at::Tensor worst = at::constant_pad_nd(first, {0, 1}, -INFINITY).gather(-1, index).amin(-1);
  const at::Tensor other =
      at::constant_pad_nd(bound, {0, 1}, -INFINITY).scatter(-1, index, -INFINITY).amax(-1);
  return (own <= shortlist).squeeze(1) |
         (other + kRounding * (1 + first.masked_fill(none, 0).abs().amax(-1)) <= worst);
}

}  // namespace

at::Tensor top1_certified(const at::Tensor& q, const at::Tensor& k, const at::Tensor& selected,
                          int64_t chunk_size, double scale, int64_t shortlist) {
  check_attention(kOp, q, k, k);
  TORCH_CHECK_VALUE(chunk_size >= 1, kOp, ": chunk_size is ", chunk_size, ", expected 1 or more");
  check_dims(kOp, "selected", selected, 4, "[B, H, T, top_k]");
  check_shape(kOp, "selected", selected, {q.size(0), q.size(2), q.size(1), selected.size(3)},
              "[B, H, T, top_k]");
  TORCH_CHECK_VALUE(selected.scalar_type() == at::kLong && selected.device() == q.device(), kOp,
                    ": selected holds ", selected.scalar_type(), " on ", selected.device(),
                    ", expected Long on ", q.device());
  if (q.is_meta())
    return at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kBool));
  const at::NoGradGuard no_grad;
  const int64_t time = q.size(1), size = k.size(1), full = size / chunk_size;
  const auto real = real_dtype(sequence_dtype({q, k}));
  const at::Tensor own =
      at::arange(size - time, size, selected.options()).floor_divide(chunk_size).unsqueeze(1);
  if (full == 0) return at::ones({q.size(0), q.size(2), time}, q.options().dtype(at::kBool));
  const Chunks chunks =
      chunks_of(k.slice(1, 0, full * chunk_size).to(real), chunk_size, q.size(2) / k.size(2));
  std::vector<at::Tensor> out;
  for (int64_t begin = 0; begin < time; begin += kBlock) {
    const int64_t end = std::min(time, begin + kBlock);
    out.push_back(certified_block(q.slice(1, begin, end).to(real).transpose(1, 2),
                                  selected.slice(2, begin, end), own.slice(0, begin, end), chunks,
                                  scale, shortlist));
  }
  return at::cat(out, 2);
}

TORCH_LIBRARY_FRAGMENT(assay, m) {
  register_operator(
      m,
      "top1_certified(Tensor q, Tensor k, Tensor selected, int chunk_size, float scale, "
      "int shortlist=16) -> Tensor certified",
      "the choices of top1_chunk's shortlist that a bound proves equal to the exact choices",
      top1_certified);
}

}  // namespace assay::ops
