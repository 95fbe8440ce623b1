// Tensors of a state that grow: they equal concatenation, do not copy the past at every token, and
// are independent of their copies.
#include "nn/cache.h"

#include <torch/torch.h>

#include "testing.h"

namespace assay::nn {
namespace {

const Cache cache("k");

at::Tensor tokens(int64_t count) {
  return at::randn({2, count, 3, 4}, generator("tokens"), at::kDouble);
}

TEST(Cache, EqualsConcatenationAndSeldomCopies) {
  const at::NoGradGuard no_grad;
  const at::Tensor x = tokens(300);
  State state;
  cache.append(state, x.slice(1, 0, 7));
  int copies = 0;
  for (int64_t t = 7; t < 300; ++t) {
    const void* before = state["k"].data_ptr();
    EXPECT_TRUE(at::equal(cache.append(state, x.slice(1, t, t + 1)), x.slice(1, 0, t + 1))) << t;
    copies += state["k"].data_ptr() != before;
  }
  EXPECT_LE(copies, 6);  // 16, 34, 70, 142, 286, 574
  EXPECT_EQ(state.bytes(), x.numel() * 8);
}

// A token costs its own bytes, not those of its past, in every mixer that keeps what it read.
TEST(Cache, MixersKeepTheirMemoryFromStepToStep) {
  const at::NoGradGuard no_grad;
  for (const std::string name : {"attention", "top1_element", "top1_chunk"}) {
    const auto mixer = mixers().at(name).make(ConfigNode::parse(""), 32);
    const at::Tensor x = at::randn({2, 100, 32}, generator(name));
    State state;
    mixer->forward(x.slice(1, 0, 50), state);
    mixer->forward(x.slice(1, 50, 51), state);  // makes room
    const void* keys = state["k"].data_ptr();
    const void* values = state["v"].data_ptr();
    for (int64_t t = 51; t < 100; ++t) mixer->forward(x.slice(1, t, t + 1), state);
    EXPECT_TRUE(state["k"].data_ptr() == keys && state["v"].data_ptr() == values) << name;
    EXPECT_EQ(state["k"].size(1), 100) << name;
  }
}

// Windows, too: they are copied when their room is used up.
TEST(Cache, AWindowEqualsConcatenationAndIsSeldomCopied) {
  const at::NoGradGuard no_grad;
  const at::Tensor x = tokens(300);
  for (const int64_t count : {0, 1, 20}) {
    State state;
    cache.append(state, x.slice(1, 0, 50), count);
    EXPECT_LE(state["k"].storage().nbytes(), 2 * size_t(count) * 2 * 12 * 8) << "is a part of all";
    int copies = 0;
    at::Tensor snapshot;
    at::Tensor copied;
    for (int64_t t = 50; t < 300; ++t) {
      if (t == 100) {
        snapshot = state["k"];
        copied = snapshot.clone();
      }
      const void* before = state["k"].storage().data();
      EXPECT_TRUE(
          at::equal(cache.append(state, x.slice(1, t, t + 1), count), x.slice(1, t - count, t + 1)))
          << count << " steps, token " << t;
      copies += state["k"].storage().data() != before;
      if (t == 200) EXPECT_TRUE(at::equal(snapshot, copied)) << "is changed by later tokens";
      if (t == 200) snapshot = at::Tensor();
    }
    if (count == 20) EXPECT_LE(copies, 16);  // every 21 tokens, and twice for the copy
  }
}

TEST(Cache, ACopyGrowsApart) {
  const at::NoGradGuard no_grad;
  const at::Tensor x = tokens(40);
  State one;
  for (int64_t t = 0; t < 9; ++t) cache.append(one, x.slice(1, t, t + 1));
  State other = one;
  const at::Tensor held = one["k"];
  for (int64_t t = 9; t < 30; ++t) {
    cache.append(one, x.slice(1, t, t + 1));
    cache.append(other, -x.slice(1, t, t + 1));
  }
  EXPECT_TRUE(at::equal(held, x.slice(1, 0, 9)));
  EXPECT_TRUE(at::equal(one["k"], x.slice(1, 0, 30)));
  EXPECT_TRUE(at::equal(other["k"], at::cat({x.slice(1, 0, 9), -x.slice(1, 9, 30)}, 1)));
}

TEST(Cache, TakesPartsOfLargerTensors) {
  const at::NoGradGuard no_grad;
  const at::Tensor x = tokens(10);
  const at::Tensor kept = x.clone();
  State state;
  cache.append(state, x.slice(1, 0, 4));
  cache.append(state, at::ones({2, 3, 3, 4}, at::kDouble));
  EXPECT_TRUE(at::equal(x, kept));
  State given;
  // Memory with room behind it
  given["k"] = at::arange(48, at::kDouble).view({1, 4, 3, 4}).narrow(1, 0, 2);
  cache.append(given, at::ones({1, 1, 3, 4}, at::kDouble));
  EXPECT_EQ(given["k"].size(1), 3);
}

TEST(Cache, GradientsFlowThroughAllParts) {
  at::Tensor x = tokens(6).requires_grad_();
  State state;
  cache.append(state, x.slice(1, 0, 2));
  cache.append(state, x.slice(1, 2, 6));
  state["k"].square().sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), 2 * x.detach()));
}

}  // namespace
}  // namespace assay::nn
