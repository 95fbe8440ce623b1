// The CUDA kernels of top1_chunk against float64 arithmetic on the CPU. The choice and what follows
// from it are tested apart: the chunk chosen must score as high as the best one but for rounding;
// out, logsumexp and the gradients must be those of the choice that was made. Everything written is
// poisoned with NaN first; errors are those of the worst row.
#include <gtest/gtest.h>

#include <functional>

#include "cuda_memory.h"
#include "ops/attention/passes/choice.h"
#include "ops/attention/top1_chunk/kernel.h"

namespace assay::ops {
namespace {

struct Case {
  int64_t batch;
  int64_t time;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t chunk_size;
  Selection selection = Selection::approx;
  double scale = 10;
  bool unit = true;  // q and k of length 1; else about √D, with scale / D
  int64_t top_k = 1;
  int64_t margin = 0;
  // popular: most queries choose the first chunk
  bool forced = false;
  bool popular = false;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "B" << c.batch << " T" << c.time << " H" << c.heads << "/" << c.kv_heads << " D"
             << c.head_dim << " C" << c.chunk_size
             << (c.selection == Selection::exact ? " exact" : " approx") << " k" << c.top_k
             << " scale " << c.scale << (c.unit ? " unit" : "") << (c.forced ? " forced" : "")
             << (c.popular ? " popular" : "") << " margin " << c.margin;
}

// Everything in float64; sequences [B, T, heads, D], logsumexp [B, H, T].
struct Model {
  Case c;
  Numbers q;
  Numbers k;
  Numbers v;
  Numbers dout;
  Numbers out;
  Numbers logsumexp;
  Numbers dq;
  Numbers dk;
  Numbers dv;
  // The backward reads `out` in bfloat16. Two roundings of it, 2^−9 of a number each, move delta by
  // e ≤ 2^−8 ‖dout‖ ‖out‖, hence dq by s e ‖Σ P k‖ and dk by s Σ P e ‖q‖: more than dq itself where
  // a query reads few keys.
  // [B, T, H], [B, T, Hk]
  Numbers dq_slack;
  Numbers dk_slack;

  int64_t query(int64_t b, int64_t t, int64_t h) const {
    return ((b * c.time + t) * c.heads + h) * c.head_dim;
  }
  int64_t key(int64_t b, int64_t t, int64_t h) const {
    return ((b * c.time + t) * c.kv_heads + h / (c.heads / c.kv_heads)) * c.head_dim;
  }
  int64_t row(int64_t b, int64_t h, int64_t t) const { return (b * c.heads + h) * c.time + t; }
  double dot(const Numbers& x, int64_t i, const Numbers& y, int64_t j) const {
    return ops::dot(x, i, y, j, c.head_dim);
  }
  double scale() const { return c.unit ? c.scale : c.scale / double(c.head_dim); }

  // The score of a chunk, and how far rounding may move it.
  std::pair<double, double> score(int64_t b, int64_t h, int64_t t, int64_t chunk) const {
    Numbers x(c.chunk_size);
    double mean = 0;
    double sum = 0;
    double longest = 0;
    const double length = std::sqrt(dot(q, query(b, t, h), q, query(b, t, h)));
    for (int64_t j = 0; j < c.chunk_size; ++j) {
      const int64_t at = key(b, chunk * c.chunk_size + j, h);
      x[j] = dot(q, query(b, t, h), k, at);
      mean += x[j] / double(c.chunk_size);
      longest = std::max(longest, length * std::sqrt(dot(k, at, k, at)));
    }
    // The mean is kept in two bfloat16, to 2^−17 of itself; a product of D terms is summed in
    // float32.
    if (c.selection == Selection::approx) return {mean, longest * 0x1p-16};
    const double top = *std::max_element(x.begin(), x.end());
    for (double y : x) sum += std::exp(scale() * (y - top));
    return {scale() * top + std::log(sum), 0x1p-18 * (1 + std::abs(scale()) * longest)};
  }

  // The keys that a query reads under `selected`.
  std::vector<int64_t> keys(int64_t b, int64_t h, int64_t t,
                            const std::vector<int64_t>& selected) const {
    std::vector<int64_t> out;
    const int64_t own = t / c.chunk_size;
    for (int64_t r = 0; r < c.top_k; ++r) {
      const int64_t chunk = selected[row(b, h, t) * c.top_k + r];
      for (int64_t j = 0; j < c.chunk_size && chunk >= 0 && chunk < own; ++j)
        out.push_back(chunk * c.chunk_size + j);
    }
    for (int64_t j = own * c.chunk_size; j <= t; ++j) out.push_back(j);
    return out;
  }

  void run(const std::vector<int64_t>& selected) {
    out.assign(q.size(), 0);
    dq = out;
    dk.assign(k.size(), 0);
    dv = dk;
    logsumexp.assign(c.batch * c.heads * c.time, 0);
    dq_slack.assign(q.size() / c.head_dim, 0);
    dk_slack.assign(k.size() / c.head_dim, 0);
    for (int64_t b = 0; b < c.batch; ++b)
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t t = 0; t < c.time; ++t) run_query(b, h, t, keys(b, h, t, selected));
  }
  void run_query(int64_t b, int64_t h, int64_t t, const std::vector<int64_t>& read) {
    const int64_t i = query(b, t, h);
    const int64_t D = c.head_dim;
    Numbers p;
    double top = -INFINITY;
    double sum = 0;
    double delta = 0;
    for (int64_t j : read) {
      p.push_back(scale() * dot(q, i, k, key(b, j, h)));
      top = std::max(top, p.back());
    }
    for (double& x : p) {
      x = std::exp(x - top);
      sum += x;
    }
    logsumexp[row(b, h, t)] = top + std::log(sum);
    for (size_t n = 0; n < read.size(); ++n) {
      p[n] /= sum;
      for (int64_t d = 0; d < D; ++d) out[i + d] += p[n] * v[key(b, read[n], h) + d];
    }
    for (int64_t d = 0; d < D; ++d) delta += out[i + d] * dout[i + d];
    const double slack =
        std::abs(scale()) * 0x1p-8 * std::sqrt(dot(dout, i, dout, i) * dot(out, i, out, i));
    Numbers mean(D);
    for (size_t n = 0; n < read.size(); ++n) {
      const int64_t j = key(b, read[n], h);
      for (int64_t d = 0; d < D; ++d) mean[d] += p[n] * k[j + d];
      dk_slack[j / D] += p[n] * slack * std::sqrt(dot(q, i, q, i));
      const double ds = scale() * p[n] * (dot(dout, i, v, j) - delta);
      for (int64_t d = 0; d < D; ++d) {
        dv[j + d] += p[n] * dout[i + d];
        dq[i + d] += ds * k[j + d];
        dk[j + d] += ds * q[i + d];
      }
    }
    dq_slack[i / D] = slack * std::sqrt(dot(mean, 0, mean, 0));
  }

  // Each choice must be a candidate, no chunk twice, and the best of those left but for rounding.
  void check_choice(const std::vector<int64_t>& selected) const {
    int64_t other = 0;
    int64_t all = 0;
    for (int64_t b = 0; b < c.batch; ++b)
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t t = 0; t < c.time; ++t, ++all) {
          std::vector<std::pair<double, double>> scores;
          for (int64_t chunk = 0; chunk < t / c.chunk_size; ++chunk)
            scores.push_back(score(b, h, t, chunk));
          for (int64_t r = 0; r < c.top_k; ++r) {
            const int64_t chosen = selected[row(b, h, t) * c.top_k + r];
            const auto best = std::max_element(scores.begin(), scores.end());
            if (r >= int64_t(scores.size())) {
              ASSERT_EQ(chosen, -1) << "rank " << r << " of query " << t;
              continue;
            }
            ASSERT_TRUE(chosen >= 0 && chosen < int64_t(scores.size()))
                << chosen << ", query " << t;
            ASSERT_GE(scores[chosen].first, best->first - best->second - scores[chosen].second)
                << "query " << t << " of head " << h << ", rank " << r << ": " << chosen << " for "
                << best - scores.begin();
            other += &scores[chosen] != &*best;
            scores[chosen].first = -INFINITY;
          }
        }
    EXPECT_LE(double(other), 0.002 * double(all) + 1) << "choices that only rounding explains";
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
  Memory selected;
  static Sequence sequence(const Case& c, int64_t heads) {
    return Sequence(DType::bf16, c.batch, c.time, heads * c.head_dim, c.margin, c.margin);
  }
  explicit Device(const Case& c)
      : q(sequence(c, c.heads)),
        k(sequence(c, c.kv_heads)),
        v(sequence(c, c.kv_heads)),
        out(sequence(c, c.heads)),
        dout(sequence(c, c.heads)),
        dq(sequence(c, c.heads)),
        dk(sequence(c, c.kv_heads)),
        dv(sequence(c, c.kv_heads)),
        logsumexp(DType::f32, c.batch * c.heads * c.time),
        selected(size_t(c.batch * c.heads * c.time * c.top_k) * sizeof(int64_t)) {}
  std::vector<int64_t> choices() const {
    std::vector<int64_t> out(selected.size / sizeof(int64_t));
    must(cudaMemcpy(out.data(), selected.data, selected.size, cudaMemcpyDeviceToHost));
    return out;
  }
  Top1ChunkForward forward(const Case& c, double scale) {
    return {.dtype = DType::bf16,
            .batch = c.batch,
            .time = c.time,
            .heads = c.heads,
            .kv_heads = c.kv_heads,
            .head_dim = c.head_dim,
            .chunk_size = c.chunk_size,
            .top_k = c.top_k,
            .scale = scale,
            .selection = c.selection,
            .forced = c.forced,
            .q = q.view(),
            .k = k.view(),
            .v = v.view(),
            .out = out.view(),
            .logsumexp = logsumexp.data(),
            .selected = static_cast<int64_t*>(selected.data)};
  }
};

Numbers directions(Random& random, const Case& c, int64_t heads) {
  Numbers x = random.normal(c.batch * c.time * heads * c.head_dim);
  return c.unit ? unit_rows(std::move(x), c.head_dim) : x;
}

// Any numbers: candidates or not, a chunk twice, all of them the first one.
std::vector<int64_t> forced_choices(const Case& c) {
  std::mt19937_64 engine(3);
  std::vector<int64_t> out(c.batch * c.heads * c.time * c.top_k);
  std::uniform_int_distribution<int64_t> draw(-2, 2 + c.time / c.chunk_size);
  std::uniform_int_distribution<int64_t> tenth(0, 9);
  for (int64_t& x : out) x = c.popular && tenth(engine) ? 0 : draw(engine);
  return out;
}

class Top1ChunkCuda : public testing::TestWithParam<Case> {};

TEST_P(Top1ChunkCuda, EqualsFloat64AndItself) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  const Case c = GetParam();
  Random random{std::mt19937_64(5)};
  Device device(c);
  Model model{c};
  model.q = device.q.set(directions(random, c, c.heads));
  model.k = device.k.set(directions(random, c, c.kv_heads));
  // Means off zero: the relative error of a sum that cancels would say nothing about the kernel.
  model.v = device.v.set(random.normal(c.batch * c.time * c.kv_heads * c.head_dim, 0.5));
  model.dout = device.dout.set(random.normal(c.batch * c.time * c.heads * c.head_dim, 0.5));
  if (c.forced)
    must(cudaMemcpy(device.selected.data, forced_choices(c).data(), device.selected.size,
                    cudaMemcpyHostToDevice));

  const Top1ChunkForward p = device.forward(c, model.scale());
  const Top1ChunkBackward g{p, device.dout.view(), device.dq.view(), device.dk.view(),
                            device.dv.view()};
  const Memory forward_scratch(cuda::workspace_bytes(p));
  const Memory scratch(cuda::workspace_bytes(g));
  expect_equal_runs(
      [&] {
        cuda::top1_chunk(p, forward_scratch.data, nullptr);
        cuda::top1_chunk(g, scratch.data, nullptr);
      },
      {&device.selected, &device.out.memory, &device.dq.memory, &device.dk.memory,
       &device.dv.memory, &device.logsumexp.memory});
  const std::vector<int64_t> selected = device.choices();
  if (!c.forced) model.check_choice(selected);
  model.run(selected);
  const double limit = tolerance(DType::bf16);
  EXPECT_LE(worst_row(device.out.values(), model.out, c.head_dim), limit) << "out";
  EXPECT_LE(worst_row(device.logsumexp.values(), model.logsumexp, c.time), 1e-5) << "logsumexp";
  EXPECT_LE(worst_row(device.dv.values(), model.dv, c.head_dim), limit) << "dv";
  EXPECT_LE(worst_beyond(device.dq.values(), model.dq, model.dq_slack), limit) << "dq";
  EXPECT_LE(worst_beyond(device.dk.values(), model.dk, model.dk_slack), limit) << "dk";
}

std::vector<Case> cases() {
  using enum Selection;
  std::vector<Case> out;
  for (int64_t time : {1, 63, 64, 65, 127, 128, 129, 101, 300, 700})
    for (Selection selection : {approx, exact}) out.push_back({1, time, 2, 2, 64, 64, selection});
  for (int64_t head_dim : {64, 96, 128})
    for (int64_t chunk_size : {64, 128, 256})
      for (Selection selection : {approx, exact})
        out.push_back({2, 901, 2, 1, head_dim, chunk_size, selection});
  out.push_back({1, 2500, 1, 1, 64, 16, approx});   // 157 chunks: three steps of the selection
  out.push_back({1, 4000, 1, 1, 64, 1, approx});    // more chunks than one step of the sort counts
  for (int64_t chunk_size : {1, 5, 33, 72, 200}) {  // no tile divides these
    out.push_back({1, 450, 2, 2, 64, chunk_size, approx});
    out.push_back({1, 450, 2, 2, 96, chunk_size, exact});
  }
  for (Selection selection : {approx, exact}) {
    out.push_back({2, 333, 6, 2, 64, 64, selection, 10, true, 1, 8});  // rows apart
    out.push_back({1, 500, 2, 1, 128, 64, selection, 10, true, 3});    // top_k
    out.push_back({1, 700, 2, 2, 64, 64, selection, 100});             // sharp
    out.push_back(
        {1, 700, 2, 2, 64, 64, selection, 100, false});  // scores beyond 100: a maximum is needed
    out.push_back({1, 700, 2, 2, 64, 64, selection, -3, false});  // a negative scale
  }
  for (int64_t chunk_size : {64, 128, 256}) {
    out.push_back({1, 3001, 2, 1, 64, chunk_size, approx, 10, true, 1, 0, true,
                   true});  // lists of several segments
    out.push_back({1, 1501, 2, 2, 128, chunk_size, exact, 10, true, 2, 0, true, true});
  }
  out.push_back({2, 500, 4, 4, 96, 32, approx, 10, true, 2, 16, true});
  // more blocks than run at the same time, most of which wait for others
  for (bool popular : {false, true})
    out.push_back({2, 8192, 2, 2, 64, 32, approx, 10, true, 1, 0, true, popular});
  // from 256 chunks on, cheap scores come first
  for (double scale : {-10., 60.}) out.push_back({1, 16500, 1, 1, 64, 64, exact, scale});
  out.push_back({1, 16500, 1, 1, 64, 64, exact, 100, false});  // scores beyond 100
  for (int64_t chunk_size : {64, 128})
    out.push_back({1, 1501, 2, 2, 96, chunk_size, approx, 10, true, 1, 0, true, true});
  out.push_back({1, 200, 2, 1, 96, 64, approx});
  out.push_back({1, 300, 2, 1, 128, 128, approx});
  return out;
}
INSTANTIATE_TEST_SUITE_P(Shapes, Top1ChunkCuda, testing::ValuesIn(cases()));

// Exact's choice on GPUs other than Hopper.
Top1Choice choice_of(const Top1ChunkForward& p) {
  return {.batch = p.batch,
          .time = p.time,
          .past = p.past,
          .heads = p.heads,
          .kv_heads = p.kv_heads,
          .head_dim = p.head_dim,
          .chunk_size = p.chunk_size,
          .scale = p.scale,
          .q = p.q,
          .k = p.k,
          .index = p.selected};
}
class ExactChoiceCuda : public testing::TestWithParam<Case> {};

TEST_P(ExactChoiceCuda, EqualsFloat64AndItself) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  const Case c = GetParam();
  Random random{std::mt19937_64(5)};
  Device device(c);
  Model model{c};
  model.q = device.q.set(directions(random, c, c.heads));
  model.k = device.k.set(directions(random, c, c.kv_heads));
  const Top1Choice choice = choice_of(device.forward(c, model.scale()));
  cuda::choose(choice, nullptr);
  const std::vector<int64_t> selected = device.choices();
  model.check_choice(selected);
  must(cudaMemset(device.selected.data, 0xff, device.selected.size));
  cuda::choose(choice, nullptr);
  EXPECT_EQ(device.choices(), selected) << "two runs differ";
}

std::vector<Case> exact_cases() {
  std::vector<Case> out;
  for (const Case& c : cases())
    if (c.selection == Selection::exact && c.top_k == 1 && !c.forced) out.push_back(c);
  out.push_back({1, 450, 2, 2, 64, 1, Selection::exact});
  out.push_back({1, 450, 2, 1, 128, 72, Selection::exact, 0});
  return out;
}
INSTANTIATE_TEST_SUITE_P(Shapes, ExactChoiceCuda, testing::ValuesIn(exact_cases()));

// A chunk with a NaN score counts as the best, and a query with a NaN has the first chunk.
TEST(ExactChoiceCudaNan, CountsAsTheLargest) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  const Case c{1, 300, 1, 1, 64, 32, Selection::exact};
  Random random{std::mt19937_64(5)};
  Device device(c);
  Numbers q = directions(random, c, 1);
  Numbers k = directions(random, c, 1);
  q[200 * 64] = NAN;
  k[70 * 64 + 5] = NAN;
  device.q.set(q);
  device.k.set(k);
  cuda::choose(choice_of(device.forward(c, c.scale)), nullptr);
  const std::vector<int64_t> selected = device.choices();
  EXPECT_EQ(selected[31], -1);
  EXPECT_EQ(selected[200], 0);
  for (int64_t t = 96; t < c.time; ++t)
    if (t != 200) ASSERT_EQ(selected[size_t(t)], 2) << "query " << t;
}

// All keys of a chunk are the same multiple of one direction, so the order of the chunks is known.
// Queries have different lengths, so that scores lie everywhere between two powers of two.
void settle_near_ties(int64_t head_dim, int64_t chunk_size,
                      const std::function<double(int64_t)>& key_of_chunk, bool some_are_zero) {
  const Case c{1, chunk_size * 263, 1, 1, head_dim, chunk_size, Selection::exact, 2};
  Device device(c);
  Numbers q(size_t(c.time * head_dim));
  Numbers k = q;
  for (int64_t t = 0; t < c.time; ++t) {
    q[t * head_dim] = some_are_zero && t % 500 == 0 ? 0 : 0.5 + 2 * double(t) / double(c.time);
    k[t * head_dim] = key_of_chunk(t / chunk_size);
  }
  q = device.q.set(q);
  k = device.k.set(k);
  device.v.set(k);
  const Top1ChunkForward p = device.forward(c, c.scale);
  const Memory scratch(cuda::workspace_bytes(p));
  cuda::top1_chunk(p, scratch.data, nullptr);
  must(cudaDeviceSynchronize());
  const std::vector<int64_t> selected = device.choices();
  for (int64_t t = 0; t < c.time; ++t) {
    const auto score = [&](int64_t chunk) {
      return q[t * head_dim] * k[chunk * chunk_size * head_dim];
    };
    int64_t best = t < chunk_size ? -1 : 0;
    for (int64_t chunk = 1; chunk < t / chunk_size; ++chunk)
      if (score(chunk) > score(best)) best = chunk;
    ASSERT_EQ(selected[size_t(t)], best)
        << "query " << t << ", D " << head_dim << ", C " << chunk_size;
  }
}

TEST(Top1ChunkCudaNearTies, ExactFindsTheBestOfChunksCloserThanTheErrorOfCheapScores) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  // 263 neighbouring bfloat16 numbers in a mixed order
  const auto key = [](int64_t chunk) {
    const int64_t i = chunk * 97 % 263;
    return std::ldexp(1 - double(i % 128 + 1) / 256, -int(i / 128));
  };
  for (int64_t head_dim : {64, 96, 128})
    for (int64_t chunk_size : {64, 128, 256}) settle_near_ties(head_dim, chunk_size, key, false);
}
TEST(Top1ChunkCudaNearTies, ExactTakesTheFirstOfManyEqualChunks) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  settle_near_ties(64, 64, [](int64_t chunk) { return 0.5 + double(chunk % 2) / 256; }, false);
  settle_near_ties(128, 128, [](int64_t) { return 0.5; }, true);
}

TEST(Top1ChunkCudaShapes, SaysWhatItDoesNotTake) {
  Top1ChunkForward p{.dtype = DType::f32,
                     .batch = 1,
                     .time = 1,
                     .heads = 1,
                     .kv_heads = 1,
                     .head_dim = 64,
                     .chunk_size = 64,
                     .top_k = 1};
  EXPECT_THROW(cuda::top1_chunk(p, nullptr, nullptr), Unsupported);
  p.dtype = DType::bf16;
  EXPECT_EQ(cuda::why_unsupported(p), nullptr);
  p.head_dim = 40;
  EXPECT_STREQ(cuda::why_unsupported(p), "takes a head_dim of 64, 96 or 128");
  p.head_dim = 64;
  p.batch = 8192;
  p.heads = p.kv_heads = 8;
  EXPECT_STREQ(cuda::why_unsupported(p), "takes fewer than 2^16 heads of the batch");
  p.heads = p.kv_heads = 7;
  EXPECT_EQ(cuda::why_unsupported(p), nullptr);
  p.batch = 1;
  EXPECT_EQ(cuda::why_no_step(p), nullptr);
  p.past = 49153 * 64;
  EXPECT_STREQ(cuda::why_no_step(p),
               "keeps at most 192 KB of scores per query, and 64 KB on GPUs other than Hopper");
}

}  // namespace
}  // namespace assay::ops
