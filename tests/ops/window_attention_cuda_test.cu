// The CUDA kernels of window_attention against float64 arithmetic on the CPU. Everything written is
// poisoned with NaN first; errors are those of the worst row.
#include <gtest/gtest.h>

#include "cuda_memory.h"
#include "ops/attention/window_attention/kernel.h"

namespace assay::ops {
namespace {

struct Case {
  int64_t batch;
  int64_t time;
  int64_t keys;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t window;
  bool alibi = false;
  double scale = 10;  // for queries and keys of length 1
  int64_t margin = 0;
  bool decays = false;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "B" << c.batch << " T" << c.time << " of " << c.keys << " H" << c.heads << "/"
             << c.kv_heads << " D" << c.head_dim << " window " << c.window << " scale " << c.scale
             << (c.alibi ? " ALiBi" : "") << (c.decays ? " decays" : "") << " margin " << c.margin;
}

// Everything in float64; sequences [B, T, heads, D].
struct Model {
  Case c;
  Numbers q;
  Numbers k;
  Numbers v;
  Numbers dout;
  Numbers slopes;
  Numbers decay_sums;  // [B, S, H]
  // logsumexp [B, H, T]
  Numbers logsumexp;
  Numbers out;
  Numbers dq;
  Numbers dk;
  Numbers dv;
  Numbers ddecay_sums;
  // Weights are rounded to bfloat16: out is off by e ≤ 2^−8 Σ p ‖v‖, and dv by 2^−8 Σ p ‖dout‖.
  // dout · out with out in bfloat16 is off by ‖dout‖ (e + 2^−8 ‖out‖) ≤ 2^−7 ‖dout‖ Σ p ‖v‖ = f.
  // That moves dq by s f ‖Σ p k‖ and dk by s Σ p f ‖q‖: more than they are themselves where p has
  // one key. P below 2^−126 is 0.
  Numbers out_slack;
  Numbers dq_slack;
  Numbers dk_slack;
  Numbers dv_slack;
  Numbers ddecay_sums_slack;

  int64_t query(int64_t b, int64_t t, int64_t h) const {
    return ((b * c.time + t) * c.heads + h) * c.head_dim;
  }
  int64_t key(int64_t b, int64_t j, int64_t h) const {
    return ((b * c.keys + j) * c.kv_heads + h / (c.heads / c.kv_heads)) * c.head_dim;
  }
  int64_t sum_of(int64_t b, int64_t position, int64_t h) const {
    return (b * c.keys + position) * c.heads + h;
  }
  double dot(const Numbers& x, int64_t i, const Numbers& y, int64_t j) const {
    return ops::dot(x, i, y, j, c.head_dim);
  }
  double length(const Numbers& x, int64_t i) const { return std::sqrt(dot(x, i, x, i)); }

  void run() {
    const int64_t rows = c.batch * c.heads * c.time;
    const int64_t key_rows = int64_t(k.size()) / c.head_dim;
    out.assign(q.size(), 0);
    dq = out;
    dk.assign(k.size(), 0);
    dv = dk;
    logsumexp.assign(rows, 0);
    out_slack.assign(rows, 0);
    dq_slack = out_slack;
    dk_slack.assign(key_rows, 0);
    dv_slack = dk_slack;
    ddecay_sums.assign(decay_sums.size(), 0);
    ddecay_sums_slack = ddecay_sums;
    for (int64_t row = 0; row < rows; ++row) run_query(row);
  }
  void run_query(int64_t row) {
    const int64_t D = c.head_dim;
    const int64_t b = row / c.time / c.heads;
    const int64_t h = row / c.time % c.heads;
    const int64_t t = row % c.time;
    const int64_t i = query(b, t, h);
    const int64_t position = t + c.keys - c.time;
    const int64_t first = std::max<int64_t>(0, position - c.window + 1);
    Numbers p(position + 1 - first);
    Numbers mean_key(D);
    double top = -INFINITY;
    double sum = 0;
    double lengths = 0;
    double delta = 0;
    for (int64_t j = first; j <= position; ++j) {
      p[j - first] =
          c.scale * dot(q, i, k, key(b, j, h)) - (c.alibi ? slopes[h] * double(position - j) : 0);
      if (c.decays)
        p[j - first] += decay_sums[sum_of(b, position, h)] - decay_sums[sum_of(b, j, h)];
      top = std::max(top, p[j - first]);
    }
    for (double& x : p) sum += x = std::exp(x - top);
    logsumexp[row] = top + std::log(sum);
    for (int64_t j = first; j <= position; ++j) {
      const int64_t at = key(b, j, h);
      const double weight = p[j - first] /= sum;
      for (int64_t d = 0; d < D; ++d) {
        out[i + d] += weight * v[at + d];
        mean_key[d] += weight * k[at + d];
      }
      lengths += weight * length(v, at);
    }
    for (int64_t d = 0; d < D; ++d) delta += out[i + d] * dout[i + d];
    const double delta_slack = 0x1p-7 * length(dout, i) * lengths;
    const double slack = std::abs(c.scale) * delta_slack;
    out_slack[i / D] = 0x1p-8 * lengths;
    dq_slack[i / D] = slack * std::sqrt(ops::dot(mean_key, 0, mean_key, 0, D));
    for (int64_t j = first; j <= position; ++j) {
      const int64_t at = key(b, j, h);
      const double weight = p[j - first];
      const double dscore = weight * (dot(dout, i, v, at) - delta);
      const double ds = c.scale * dscore;
      if (c.decays) {
        const int64_t of_query = sum_of(b, position, h);
        const int64_t of_key = sum_of(b, j, h);
        ddecay_sums[of_query] += dscore;
        ddecay_sums[of_key] -= dscore;
        for (const int64_t place : {of_query, of_key})
          ddecay_sums_slack[place] += weight * delta_slack + 0x1p-120;
      }
      dk_slack[at / D] += (weight * slack + 0x1p-120) * length(q, i);
      dv_slack[at / D] += (0x1p-8 * weight + 0x1p-120) * length(dout, i);
      for (int64_t d = 0; d < D; ++d) {
        dq[i + d] += ds * k[at + d];
        dk[at + d] += ds * q[i + d];
        dv[at + d] += weight * dout[i + d];
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
  Array slopes;
  Array decay_sums;
  Array ddecay_sums;
  Memory forward_scratch;
  Memory backward_scratch;
  static Sequence sequence(const Case& c, int64_t time, int64_t heads) {
    return Sequence(DType::bf16, c.batch, time, heads * c.head_dim, c.margin, c.margin);
  }
  explicit Device(const Case& c)
      : q(sequence(c, c.time, c.heads)),
        k(sequence(c, c.keys, c.kv_heads)),
        v(sequence(c, c.keys, c.kv_heads)),
        out(sequence(c, c.time, c.heads)),
        dout(sequence(c, c.time, c.heads)),
        dq(sequence(c, c.time, c.heads)),
        dk(sequence(c, c.keys, c.kv_heads)),
        dv(sequence(c, c.keys, c.kv_heads)),
        logsumexp(DType::f32, c.batch * c.heads * c.time),
        slopes(DType::f32, c.heads),
        decay_sums(DType::f32, c.batch * c.keys * c.heads),
        ddecay_sums(DType::f32, c.batch * c.keys * c.heads),
        forward_scratch(cuda::workspace_bytes(forward(c))),
        backward_scratch(cuda::workspace_bytes(backward(c))) {}
  WindowAttentionForward forward(const Case& c) const {
    WindowAttentionForward p{DType::bf16, c.batch,    c.time,     c.keys,
                             c.heads,     c.kv_heads, c.head_dim, c.window,
                             c.scale,     q.view(),   k.view(),   v.view(),
                             nullptr,     nullptr,    out.view(), logsumexp.data()};
    if (c.alibi) p.alibi_slopes = slopes.data();
    if (c.decays) p.decay_sums = decay_sums.data();
    return p;
  }
  WindowAttentionBackward backward(const Case& c) const {
    return {forward(c),
            dout.view(),
            dq.view(),
            dk.view(),
            dv.view(),
            nullptr,
            c.decays ? ddecay_sums.data() : nullptr};
  }
  void run(const Case& c) const {
    cuda::window_attention(forward(c), forward_scratch.data, nullptr);
    cuda::window_attention(backward(c), backward_scratch.data, nullptr);
    must(cudaDeviceSynchronize());
  }
  std::vector<std::vector<unsigned char>> bytes() const {
    std::vector<std::vector<unsigned char>> all;
    for (const Sequence* s :
         std::initializer_list<const Sequence*>{&out, &dq, &dk, &dv, &logsumexp, &ddecay_sums})
      all.push_back(s->memory.bytes());
    return all;
  }
};

void fill(Device& device, Model& model) {
  const Case& c = model.c;
  Random random{std::mt19937_64(5)};
  const int64_t queries = c.batch * c.time * c.heads;
  const int64_t keys = c.batch * c.keys * c.kv_heads;
  const auto directions = [&](int64_t rows) {
    return unit_rows(random.normal(rows * c.head_dim), c.head_dim);
  };
  model.q = device.q.set(directions(queries));
  model.k = device.k.set(directions(keys));
  // Means off zero: the relative error of a sum that cancels would say nothing about the kernel.
  model.v = device.v.set(random.normal(keys * c.head_dim, 0.5));
  model.dout = device.dout.set(random.normal(queries * c.head_dim, 0.5));
  Numbers slopes(c.heads);
  for (int64_t h = 0; h < c.heads; ++h) slopes[h] = std::exp2(-8.0 * (h + 1) / c.heads);
  model.slopes = device.slopes.set(slopes);
  Numbers sums = random.normal(c.batch * c.keys * c.heads);
  for (size_t i = 0; i < sums.size(); ++i)
    sums[i] = (int64_t(i) / c.heads % c.keys ? sums[i - c.heads] : 0) - 0.05 * sums[i] * sums[i];
  model.decay_sums = device.decay_sums.set(sums);
}

class WindowAttentionCuda : public testing::TestWithParam<Case> {};

TEST_P(WindowAttentionCuda, EqualsFloat64AndItself) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  const Case c = GetParam();
  Device device(c);
  Model model{c};
  fill(device, model);
  device.run(c);
  const auto first = device.bytes();
  device.run(c);
  EXPECT_EQ(first, device.bytes()) << "two runs differ";
  model.run();
  EXPECT_LE(worst_row(device.logsumexp.values(), model.logsumexp, c.time), 1e-5) << "logsumexp";
  const double limit = tolerance(DType::bf16);
  EXPECT_LE(worst_beyond(device.out.values(), model.out, model.out_slack), 4e-3) << "out";
  EXPECT_LE(worst_beyond(device.dq.values(), model.dq, model.dq_slack), limit) << "dq";
  EXPECT_LE(worst_beyond(device.dk.values(), model.dk, model.dk_slack), limit) << "dk";
  EXPECT_LE(worst_beyond(device.dv.values(), model.dv, model.dv_slack), 4e-3) << "dv";
  if (!c.decays) return;
  EXPECT_LE(worst_beyond(device.ddecay_sums.values(), model.ddecay_sums, model.ddecay_sums_slack),
            limit)
      << "ddecay_sums";
}

std::vector<Case> cases() {
  std::vector<Case> out;
  for (int64_t time : {1, 63, 64, 65, 127, 200, 1000, 2048})
    out.push_back({1, time, time, 2, 2, 64, time});
  for (int64_t head_dim : {64, 96, 128}) {
    for (int64_t window : {1, 5, 64, 100, 256})
      for (bool alibi : {false, true}) out.push_back({2, 401, 401, 6, 2, head_dim, window, alibi});
    for (int64_t keys : {402, 471, 1100}) {
      out.push_back({2, 401, keys, 6, 2, head_dim, keys});
      out.push_back({1, 401, keys, 4, 1, head_dim, 130, true});
    }
    out.push_back({2, 333, 333, 6, 2, head_dim, 333, true, 10, 8});  // rows apart
    out.push_back({1, 1, 517, 4, 1, head_dim, 517});                 // one query, as in decoding
    out.push_back({1, 3, 700, 4, 2, head_dim, 20});                  // keys that no query sees
    out.push_back({1, 500, 500, 2, 1, head_dim, 500, false, 100});   // sharp
    out.push_back({1, 500, 500, 2, 2, head_dim, 500, true, -3});     // a negative scale
    out.push_back({1, 300, 300, 2, 2, head_dim, 300, true, 0});
    for (int64_t window : {5, 100, 401})
      out.push_back({2, 401, 401, 6, 2, head_dim, window, false, 10, 0, true});
    out.push_back({1, 401, 1100, 4, 1, head_dim, 1100, false, 10, 8, true});
    out.push_back({1, 3, 700, 4, 2, head_dim, 20, false, 10, 0, true});
    out.push_back({1, 1, 517, 4, 1, head_dim, 517, false, -3, 0, true});
  }
  out.push_back({1, 2500, 2500, 2, 1, 64, 1500});  // more parts than stages
  for (int64_t head_dim : {96, 128}) out.push_back({1, 65, 65, 2, 2, head_dim, 65});
  return out;
}
INSTANTIATE_TEST_SUITE_P(Shapes, WindowAttentionCuda, testing::ValuesIn(cases()));

// The gradients of decays alone, from logsumexp and dout · out of the exact softmax.
class DecayGradientsCuda : public testing::TestWithParam<Case> {};

TEST_P(DecayGradientsCuda, EqualFloat64AndThemselves) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  const Case c = GetParam();
  Device device(c);
  Model model{c};
  fill(device, model);
  model.run();
  device.logsumexp.set(model.logsumexp);
  Numbers products(model.logsumexp.size());
  for (int64_t row = 0; row < int64_t(products.size()); ++row) {
    const int64_t i = model.query(row / c.time / c.heads, row % c.time, row / c.time % c.heads);
    products[row] = model.dot(model.out, i, model.dout, i);
  }
  Array delta(DType::f32, int64_t(products.size()));
  delta.set(products);
  expect_equal_runs(
      [&] {
        cuda::decay_gradients(device.backward(c), static_cast<const float*>(delta.data()), nullptr);
      },
      {&device.ddecay_sums.memory});
  // Sums of terms that nearly cancel: a hundredth of what bf16 may change.
  Numbers slack = model.ddecay_sums_slack;
  for (double& x : slack) x *= 1e-2;
  EXPECT_LE(worst_beyond(device.ddecay_sums.values(), model.ddecay_sums, slack), 1e-3);
}

std::vector<Case> cases_with_decays() {
  std::vector<Case> out;
  for (const Case& c : cases())
    if (c.decays) out.push_back(c);
  return out;
}
INSTANTIATE_TEST_SUITE_P(Shapes, DecayGradientsCuda, testing::ValuesIn(cases_with_decays()));

// A NaN in a key or a value reaches only gradients of its own position and of queries that see it.
TEST(DecayGradientsCudaNan, ReachesOnlyPositionsThatSeeIt) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  const Case c{1, 300, 300, 1, 1, 64, 100, false, 10, 0, true};
  constexpr int64_t kPosition = 150;
  for (bool in_key : {true, false}) {
    Device device(c);
    Model model{c};
    fill(device, model);
    model.run();
    device.logsumexp.set(model.logsumexp);
    Array delta(DType::f32, c.time);
    delta.set(Numbers(c.time));
    Numbers& spoiled = in_key ? model.k : model.v;
    for (int64_t d = 0; d < c.head_dim; ++d) spoiled[kPosition * c.head_dim + d] = NAN;
    (in_key ? device.k : device.v).set(spoiled);
    cuda::decay_gradients(device.backward(c), static_cast<const float*>(delta.data()), nullptr);
    must(cudaDeviceSynchronize());
    const Numbers found = device.ddecay_sums.values();
    for (int64_t i = 0; i < c.keys; ++i)
      ASSERT_EQ(std::isnan(found[i]), i >= kPosition && i < kPosition + c.window) << i;
  }
}

// A NaN in a key reaches only the queries that see it. One in a value reaches those 64 queries and
// those 64 values of which one pair sees each other, because a weight of 0 times NaN is NaN.
TEST(WindowAttentionCudaNan, DoesNotReachQueriesThatDoNotSeeIt) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  for (bool in_key : {true, false}) {
    const Case c{1, 700, 700, 1, 1, 64, 100};
    Device device(c);
    Model model{c};
    fill(device, model);
    device.run(c);
    const Numbers whole = device.out.values();
    const Numbers whole_dq = device.dq.values();
    constexpr int64_t kPosition = 300;
    Numbers& spoiled = in_key ? model.k : model.v;
    for (int64_t d = 0; d < c.head_dim; ++d) spoiled[kPosition * c.head_dim + d] = NAN;
    if (in_key) device.k.set(spoiled);
    else device.v.set(spoiled);
    device.run(c);
    const Numbers out = device.out.values();
    const Numbers dq = device.dq.values();
    for (int64_t i = 0; i < int64_t(out.size()); ++i) {
      const int64_t t = i / c.head_dim;
      const bool sees = t >= kPosition && t < kPosition + c.window;
      const bool sees_part =
          t >= kPosition / 64 * 64 && t / 64 * 64 - c.window + 1 < kPosition / 64 * 64 + 64;
      if (sees) ASSERT_TRUE(std::isnan(out[i])) << "query " << t;
      else if (in_key || !sees_part) ASSERT_EQ(out[i], whole[i]) << "query " << t;
      if (!sees_part) ASSERT_EQ(dq[i], whole_dq[i]) << "query " << t;
    }
  }
}

TEST(WindowAttentionCudaShapes, UnsupportedCallsThrow) {
  WindowAttentionForward p{DType::f32, 1, 1, 1, 1, 1, 64, 1, 1};
  EXPECT_THROW(cuda::window_attention(p, nullptr, nullptr), Unsupported);
  p.dtype = DType::bf16;
  p.head_dim = 40;
  EXPECT_STREQ(cuda::why_unsupported(p), "takes a head_dim of 64, 96 or 128");
  p.head_dim = 64;
  const float number = 0;
  p.alibi_slopes = &number;
  p.decay_sums = &number;
  EXPECT_STREQ(cuda::why_unsupported(p), "takes no slopes with decays");
}

}  // namespace
}  // namespace assay::ops
