// The gradients that the head and the cross-entropy compute in parts.
#include "nn/lm_loss.h"

#include <torch/torch.h>

#include "ops/dense/cross_entropy/cross_entropy.h"
#include "ops/dense/linear/linear.h"
#include "testing.h"

namespace assay::nn {
namespace {

// A vocabulary that allows 64 rows of logits at a time, so that 150 rows are three parts.
constexpr int64_t kVocabulary = 70'001;
constexpr int64_t kWidth = 7;
constexpr int64_t kRows = 150;
constexpr int64_t kPart = 64;

// In bf16, nothing but the logits and their gradients is rounded to bf16.
TEST(LmLoss, WeightGradientOfBfloat16IsSummedInFloat32) {
  for (const bool transposed : {false, true}) {
    const at::Tensor hidden = at::randn({kRows, kWidth}, generator("hidden")).to(at::kBFloat16);
    at::Tensor weight = at::randn({kVocabulary, kWidth}, generator("weight"));
    if (transposed) weight = weight.t().contiguous().t();
    weight.requires_grad_();
    const at::Tensor targets = random_tokens(1, kRows, kVocabulary, "targets").flatten();
    lm_loss(hidden, weight, targets).backward();

    const at::NoGradGuard no_grad;
    const at::Tensor narrow = weight.to(at::kBFloat16);
    at::Tensor wanted = at::zeros({kVocabulary, kWidth}, at::kDouble);
    for (int64_t begin = 0; begin < kRows; begin += kPart) {
      const int64_t end = std::min(begin + kPart, kRows);
      const at::Tensor h = hidden.slice(0, begin, end);
      const at::Tensor logits = ops::product(h, narrow);
      ops::cross_entropy_(logits, targets.slice(0, begin, end), 1.0 / kRows);
      wanted.add_(at::mm(logits.t().to(at::kDouble), h.to(at::kDouble)));
    }
    const at::Tensor error = (weight.grad() - wanted).abs();
    EXPECT_LE(error.max().item<double>(), 1e-6 * wanted.abs().max().item<double>())
        << (transposed ? "transposed weight" : "");
  }
}

}  // namespace
}  // namespace assay::nn
