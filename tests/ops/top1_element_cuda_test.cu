// The CUDA kernels of top1_element against float64 arithmetic on the CPU. The choice and what
// follows from it are tested apart: the key chosen must score as high as the best one but for
// rounding, and out must be its value bit for bit; logsumexp, soft and the gradients must be those
// of the softmax and of the choice that was made. Everything written is poisoned with NaN first;
// errors are those of the worst row.
#include <gtest/gtest.h>

#include "cuda_memory.h"
#include "ops/attention/passes/choice.h"
#include "ops/attention/top1_element/kernel.h"

namespace assay::ops {
namespace {

struct Case {
  int64_t batch;
  int64_t time;
  int64_t past;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  double scale = 10;
  bool unit = true;  // q and k of length 1; else about √D, with scale / D
  int64_t margin = 0;
  bool equal = false;  // all keys: the first is to be chosen
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "B" << c.batch << " T" << c.time << " past " << c.past << " H" << c.heads << "/"
             << c.kv_heads << " D" << c.head_dim << " scale " << c.scale << (c.unit ? " unit" : "")
             << (c.equal ? " equal keys" : "") << " margin " << c.margin;
}

// Everything in float64; sequences [B, T, heads, D].
struct Model {
  Case c;
  Numbers q;
  Numbers k;
  Numbers v;
  Numbers dout;
  // logsumexp [B, H, T], soft [B, H, T, D]
  Numbers logsumexp;
  Numbers soft;
  Numbers dq;
  Numbers dk;
  Numbers dv;
  // Weights are rounded to bfloat16 in soft, but for the largest, which is 1: soft · dout is off by
  // e ≤ 2^−8 ‖dout‖ Σ p ‖v‖ over the others, and by float32's rounding. That moves dq by s e ‖Σ p
  // k‖ and dk by s Σ p e ‖q‖: more than they are themselves where p has one key. P below 2^−126 is
  // 0.
  Numbers soft_slack;
  Numbers dq_slack;
  Numbers dk_slack;

  double scale() const { return c.unit ? c.scale : c.scale / double(c.head_dim); }
  int64_t query(int64_t b, int64_t t, int64_t h) const {
    return ((b * c.time + t) * c.heads + h) * c.head_dim;
  }
  int64_t key(int64_t b, int64_t j, int64_t h) const {
    return ((b * (c.past + c.time) + j) * c.kv_heads + h / (c.heads / c.kv_heads)) * c.head_dim;
  }
  double dot(const Numbers& x, int64_t i, const Numbers& y, int64_t j) const {
    return ops::dot(x, i, y, j, c.head_dim);
  }
  double length(const Numbers& x, int64_t i) const { return std::sqrt(dot(x, i, x, i)); }

  void run(const std::vector<int64_t>& chosen) {
    const int64_t rows = c.batch * c.heads * c.time;
    dq.assign(q.size(), 0);
    dk.assign(k.size(), 0);
    dv = dk;
    soft.assign(q.size(), 0);
    logsumexp.assign(rows, 0);
    soft_slack.assign(rows, 0);
    dq_slack.assign(rows, 0);
    dk_slack.assign(k.size() / c.head_dim, 0);
    for (int64_t row = 0; row < rows; ++row) run_query(row, chosen[row]);
  }
  void run_query(int64_t row, int64_t chosen) {
    const int64_t D = c.head_dim;
    const int64_t b = row / c.time / c.heads;
    const int64_t h = row / c.time % c.heads;
    const int64_t t = row % c.time;
    const int64_t i = query(b, t, h);
    const int64_t keys = c.past + t + 1;
    double* mean = &soft[row * D];
    Numbers p(keys);
    Numbers mean_key(D);
    double longest = 0;
    double sum = 0;
    double delta = 0;
    double lengths = 0;
    for (int64_t j = 0; j < keys; ++j) {
      p[j] = scale() * dot(q, i, k, key(b, j, h));
      longest = std::max(longest, length(k, key(b, j, h)));
    }
    const int64_t best = std::max_element(p.begin(), p.end()) - p.begin();
    const double top = p[best];
    const double rounding = 0x1p-17 * std::abs(scale()) * length(q, i) * longest;
    ASSERT_TRUE(chosen >= 0 && chosen < keys) << chosen << ", query " << t;
    ASSERT_GE(p[chosen], top - rounding)
        << "query " << t << " of head " << h << ": " << chosen << " for " << best;
    if (c.equal) ASSERT_EQ(chosen, 0);
    for (double& x : p) sum += x = std::exp(x - top);
    logsumexp[row] = top + std::log(sum);
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = key(b, j, h);
      p[j] /= sum;
      for (int64_t d = 0; d < D; ++d) {
        mean[d] += p[j] * v[at + d];
        mean_key[d] += p[j] * k[at + d];
      }
      lengths += p[j] * length(v, at) * (j == best ? 0x1p-18 : 0x1p-8);
    }
    for (int64_t d = 0; d < D; ++d) {
      delta += mean[d] * dout[i + d];
      dv[key(b, chosen, h) + d] += dout[i + d];
    }
    const double slack = std::abs(scale()) * length(dout, i) * lengths;
    soft_slack[row] = lengths;
    dq_slack[i / D] = slack * std::sqrt(dot(mean_key, 0, mean_key, 0));
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = key(b, j, h);
      const double ds = scale() * p[j] * (dot(dout, i, v, at) - delta);
      dk_slack[at / D] += (p[j] * slack + 0x1p-120) * length(q, i);
      for (int64_t d = 0; d < D; ++d) {
        dq[i + d] += ds * k[at + d];
        dk[at + d] += ds * q[i + d];
      }
    }
  }
};

struct Device {
  Sequence q;
  Sequence k;
  Sequence v;
  Sequence out;
  Sequence dout;
  Sequence dq;
  Sequence dk;
  Sequence dv;
  Array logsumexp;
  Array soft;
  Memory index;
  static Sequence sequence(const Case& c, int64_t time, int64_t heads) {
    return Sequence(DType::bf16, c.batch, time, heads * c.head_dim, c.margin, c.margin);
  }
  explicit Device(const Case& c)
      : q(sequence(c, c.time, c.heads)),
        k(sequence(c, c.past + c.time, c.kv_heads)),
        v(sequence(c, c.past + c.time, c.kv_heads)),
        out(sequence(c, c.time, c.heads)),
        dout(sequence(c, c.time, c.heads)),
        dq(sequence(c, c.time, c.heads)),
        dk(sequence(c, c.past + c.time, c.kv_heads)),
        dv(sequence(c, c.past + c.time, c.kv_heads)),
        logsumexp(DType::f32, c.batch * c.heads * c.time),
        soft(DType::f32, c.batch * c.heads * c.time * c.head_dim),
        index(size_t(c.batch * c.heads * c.time) * sizeof(int64_t)) {}
  std::vector<int64_t> choices() const {
    std::vector<int64_t> out(index.size / sizeof(int64_t));
    must(cudaMemcpy(out.data(), index.data, index.size, cudaMemcpyDeviceToHost));
    return out;
  }
  Top1ElementForward forward(const Case& c, double scale) {
    Top1ElementForward p{.dtype = DType::bf16,
                         .batch = c.batch,
                         .time = c.time,
                         .past = c.past,
                         .heads = c.heads,
                         .kv_heads = c.kv_heads,
                         .head_dim = c.head_dim,
                         .scale = scale};
    p.q = q.view();
    p.k = k.view();
    p.v = v.view();
    p.out = out.view();
    p.logsumexp = logsumexp.data();
    p.soft = soft.data();
    p.index = static_cast<int64_t*>(index.data);
    return p;
  }
};

Numbers directions(Random& random, int64_t rows, const Case& c) {
  Numbers x = random.normal(rows * c.head_dim);
  return c.unit ? unit_rows(std::move(x), c.head_dim) : x;
}

void fill(Device& device, Model& model) {
  const Case& c = model.c;
  Random random{std::mt19937_64(5)};
  const int64_t queries = c.batch * c.time * c.heads;
  const int64_t keys = c.batch * (c.past + c.time) * c.kv_heads;
  Numbers k = directions(random, keys, c);
  for (size_t i = 0; c.equal && i < k.size(); ++i) k[i] = k[i % c.head_dim];
  model.q = device.q.set(directions(random, queries, c));
  model.k = device.k.set(k);
  // Means off zero: the relative error of a sum that cancels would say nothing about the kernel.
  model.v = device.v.set(random.normal(keys * c.head_dim, 0.5));
  model.dout = device.dout.set(random.normal(queries * c.head_dim, 0.5));
}

// The chosen values, and NaN nowhere.
void expect_values(const Model& m, const std::vector<int64_t>& index, const Numbers& out) {
  const Case& c = m.c;
  for (int64_t row = 0; row < int64_t(index.size()); ++row)
    for (int64_t d = 0, b = row / c.time / c.heads, h = row / c.time % c.heads; d < c.head_dim; ++d)
      ASSERT_EQ(out[m.query(b, row % c.time, h) + d], m.v[m.key(b, index[row], h) + d])
          << "query row " << row;
}

class Top1ElementCuda : public testing::TestWithParam<Case> {};

TEST_P(Top1ElementCuda, EqualsFloat64AndItself) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  const Case c = GetParam();
  Device device(c);
  Model model{c};
  fill(device, model);
  const Top1ElementForward p = device.forward(c, model.scale());
  const Top1ElementBackward g{p, device.dout.view(), device.dq.view(), device.dk.view(),
                              device.dv.view()};
  const Memory forward_scratch(cuda::workspace_bytes(p));
  const Memory scratch(cuda::workspace_bytes(g));
  expect_equal_runs(
      [&] {
        cuda::top1_element(p, forward_scratch.data, nullptr);
        cuda::top1_element(g, scratch.data, nullptr);
      },
      {&device.index, &device.out.memory, &device.dq.memory, &device.dk.memory, &device.dv.memory,
       &device.soft.memory, &device.logsumexp.memory});
  const std::vector<int64_t> index = device.choices();
  model.run(index);
  if (HasFatalFailure()) return;
  expect_values(model, index, device.out.values());
  const double limit = tolerance(DType::bf16);
  EXPECT_LE(worst_row(device.logsumexp.values(), model.logsumexp, c.time), 1e-5) << "logsumexp";
  EXPECT_LE(worst_beyond(device.soft.values(), model.soft, model.soft_slack), 1e-5) << "soft";
  EXPECT_LE(worst_row(device.dv.values(), model.dv, c.head_dim), limit) << "dv";
  EXPECT_LE(worst_beyond(device.dq.values(), model.dq, model.dq_slack), limit) << "dq";
  EXPECT_LE(worst_beyond(device.dk.values(), model.dk, model.dk_slack), limit) << "dk";
}

// Without a gradient nothing but index and out is made: the same.
TEST_P(Top1ElementCuda, ChoosesTheSameWithoutGradient) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  const Case c = GetParam();
  Device device(c);
  Model model{c};
  fill(device, model);
  Top1ElementForward p = device.forward(c, model.scale());
  const Memory scratch(cuda::workspace_bytes(p));
  cuda::top1_element(p, scratch.data, nullptr);
  must(cudaDeviceSynchronize());
  const auto index = device.index.bytes();
  const auto out = device.out.memory.bytes();
  must(cudaMemset(device.index.data, 0xff, index.size()));
  must(cudaMemset(device.out.memory.data, 0xff, out.size()));
  p.logsumexp = p.soft = nullptr;
  cuda::top1_element(p, scratch.data, nullptr);
  must(cudaDeviceSynchronize());
  EXPECT_EQ(device.index.bytes(), index);
  EXPECT_EQ(device.out.memory.bytes(), out);
}

Top1Choice choice_of(const Top1ElementForward& p) {
  return {.batch = p.batch,
          .time = p.time,
          .past = p.past,
          .heads = p.heads,
          .kv_heads = p.kv_heads,
          .head_dim = p.head_dim,
          .chunk_size = 0,
          .scale = p.scale,
          .q = p.q,
          .k = p.k,
          .index = p.index,
          .v = p.v,
          .out = p.out};
}

// The kernels for GPUs other than Hopper.
class ElementChoiceCuda : public testing::TestWithParam<Case> {};

TEST_P(ElementChoiceCuda, AndValueGradientsEqualFloat64AndThemselves) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  const Case c = GetParam();
  Device device(c);
  Model model{c};
  fill(device, model);
  const Top1ElementForward p = device.forward(c, model.scale());
  const Top1ElementBackward g{p, device.dout.view(), {}, {}, device.dv.view()};
  const Memory scratch(cuda::value_gradient_bytes(g));
  expect_equal_runs(
      [&] {
        cuda::choose(choice_of(p), nullptr);
        cuda::value_gradients(g, scratch.data, nullptr);
      },
      {&device.index, &device.out.memory, &device.dv.memory});
  const std::vector<int64_t> index = device.choices();
  model.run(index);
  if (HasFatalFailure()) return;
  expect_values(model, index, device.out.values());
  EXPECT_LE(worst_row(device.dv.values(), model.dv, c.head_dim), tolerance(DType::bf16)) << "dv";
}

std::vector<Case> cases() {
  std::vector<Case> out;
  for (int64_t time : {1, 2, 63, 64, 65, 127, 128, 129, 101, 191, 193, 300, 385, 700})
    out.push_back({1, time, 0, 2, 2, 64});
  for (int64_t head_dim : {64, 96, 128})
    for (int64_t past : {0, 1, 70, 200}) out.push_back({2, 401, past, 6, 2, head_dim});
  for (int64_t head_dim : {64, 96, 128}) {
    out.push_back({2, 333, 0, 6, 2, head_dim, 10, true, 8});  // rows apart
    out.push_back({1, 1, 517, 4, 1, head_dim});               // one query, as in decoding
    out.push_back({1, 500, 0, 2, 1, head_dim, 100});          // sharp
    out.push_back({1, 500, 0, 2, 2, head_dim, 300, false});   // scores of hundreds
    out.push_back({1, 500, 0, 2, 2, head_dim, -3, false});    // a negative scale
    out.push_back({1, 300, 0, 2, 2, head_dim, 0});
    out.push_back({1, 300, 40, 2, 2, head_dim, 10, true, 0, true});
  }
  out.push_back({1, 2500, 0, 2, 1, 64, 30});  // more parts than stages
  return out;
}
INSTANTIATE_TEST_SUITE_P(Shapes, Top1ElementCuda, testing::ValuesIn(cases()));
INSTANTIATE_TEST_SUITE_P(Shapes, ElementChoiceCuda, testing::ValuesIn(cases()));

// A query whose scores hold a NaN gives NaN; every other one what it gives without.
TEST(Top1ElementCudaNan, StaysInItsRow) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  const Case c{1, 300, 0, 1, 1, 64};
  Device device(c);
  Model model{c};
  fill(device, model);
  Top1ElementForward p = device.forward(c, model.scale());
  const Memory scratch(cuda::workspace_bytes(p));
  cuda::top1_element(p, scratch.data, nullptr);
  const Numbers whole = device.out.values();
  for (int64_t d = 0; d < c.head_dim; ++d) model.q[40 * c.head_dim + d] = NAN;
  device.q.set(model.q);
  for (bool gradient : {true, false}) {
    if (!gradient) p.logsumexp = p.soft = nullptr;
    cuda::top1_element(p, scratch.data, nullptr);
    const Numbers out = device.out.values();
    for (int64_t i = 0; i < int64_t(out.size()); ++i) {
      if (i / c.head_dim == 40) ASSERT_TRUE(std::isnan(out[i]));
      else ASSERT_EQ(out[i], whole[i]);
    }
    const int64_t chosen = device.choices()[40];
    EXPECT_TRUE(chosen >= 0 && chosen <= 40) << chosen;
  }
}

// On other GPUs, too: NaN in a query stays in its row, and NaN in a key reaches all later rows.
TEST(ElementChoiceCudaNan, StaysInItsRows) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  const Case c{1, 300, 0, 1, 1, 64};
  Device device(c);
  Model model{c};
  fill(device, model);
  const Top1Choice choice = choice_of(device.forward(c, model.scale()));
  cuda::choose(choice, nullptr);
  const Numbers whole = device.out.values();
  model.q[40 * c.head_dim] = NAN;
  model.k[200 * c.head_dim + 7] = NAN;
  device.q.set(model.q);
  device.k.set(model.k);
  cuda::choose(choice, nullptr);
  const Numbers out = device.out.values();
  for (int64_t i = 0; i < int64_t(out.size()); ++i) {
    const int64_t t = i / c.head_dim;
    if (t == 40 || t >= 200) ASSERT_TRUE(std::isnan(out[i])) << "query " << t;
    else ASSERT_EQ(out[i], whole[i]) << "query " << t;
  }
  EXPECT_EQ(device.choices()[250], 200);
}

TEST(Top1ElementCudaShapes, SaysWhatItDoesNotTake) {
  Top1ElementForward p{
      .dtype = DType::f32, .batch = 1, .time = 1, .heads = 1, .kv_heads = 1, .head_dim = 64};
  EXPECT_THROW(cuda::top1_element(p, nullptr, nullptr), Unsupported);
  p.dtype = DType::bf16;
  EXPECT_EQ(cuda::why_unsupported(p), nullptr);
  p.head_dim = 40;
  EXPECT_STREQ(cuda::why_unsupported(p), "takes a head_dim of 64, 96 or 128");
}

}  // namespace
}  // namespace assay::ops
