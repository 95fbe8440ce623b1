// The operator against its naive twin, the golden files, and wrong arguments. Selection is
// discontinuous, so it is tested in two halves: outputs and gradients with the choice forced, and
// the choice itself by how much worse than the best it is, which rounding bounds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ops/attention/top1_chunk/top1_chunk.h"
#include "ops/attention_arguments.h"

namespace assay::ops {
namespace {

struct Options {
  int64_t chunk_size = 16;
  double scale = 8;
  std::string selection = "exact";
  int64_t top_k = 1;
};
const std::vector<std::string> kSelections = {"exact", "approx"};
using Result = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Result run(const Qkv& a, const Options& o, const std::optional<at::Tensor>& selected = {},
           const std::optional<at::Tensor>& summaries = {}) {
  return top1_chunk(a.q, a.k, a.v, o.chunk_size, o.scale, o.selection, o.top_k, selected,
                    summaries);
}
Result run_reference(const Qkv& a, const Options& o,
                     const std::optional<at::Tensor>& selected = {}) {
  return top1_chunk_reference(a.q, a.k, a.v, o.chunk_size, o.scale, o.selection, o.top_k, selected);
}

// Scores of the full chunks by the definition, −∞ where a chunk is no candidate: [B, H,
// T, chunks], float64.
at::Tensor chunk_scores(const Qkv& exact, const Options& o) {
  const at::NoGradGuard no_grad;
  const int64_t size = exact.k.size(1);
  const int64_t time = exact.q.size(1);
  const int64_t C = o.chunk_size;
  const int64_t chunks = size / C;
  const at::Tensor q = exact.q.transpose(1, 2);
  const at::Tensor k = exact.k.transpose(1, 2)
                           .repeat_interleave(exact.q.size(2) / exact.k.size(2), 1)
                           .slice(2, 0, chunks * C);
  const at::Tensor score =
      o.selection == "approx"
          ? q.matmul(k.unflatten(2, {chunks, C}).mean(3).mT())
          : (o.scale * q.matmul(k.mT())).unflatten(3, {chunks, C}).logsumexp(-1);
  const at::Tensor own = at::arange(size - time, size).floor_divide(C).unsqueeze(1);
  return score.masked_fill(at::arange(chunks) >= own, -INFINITY);
}

// A score of unit vectors in `dtype` is off by at most this: D products and sums, C terms
// of a logarithm.
double rounding_bound(at::ScalarType dtype, const Options& o, int64_t head_dim) {
  const double step = dtype == at::kDouble ? 1.1e-16 : 6e-8;
  const double terms = double(head_dim + o.chunk_size);
  return 4 * step * terms * (o.selection == "approx" ? 1 : std::abs(o.scale) + 1);
}

// The i-th choice scores as the i-th best candidate does, no chunk is chosen twice, and −1 stands
// where none is left.
void expect_best(const at::Tensor& selected, const at::Tensor& scores, double bound) {
  const int64_t candidates = scores.size(-1);
  const int64_t top_k = selected.size(-1);
  // Index −1 reads one of these
  const at::Tensor padded = at::constant_pad_nd(scores, {0, top_k}, -INFINITY);
  const at::Tensor best = std::get<0>(padded.sort(-1, /*descending=*/true)).slice(-1, 0, top_k);
  const at::Tensor found = padded.gather(-1, at::where(selected < 0, candidates, selected));
  EXPECT_TRUE(at::equal(found.isinf(), best.isinf()));
  EXPECT_LE((best - found).nan_to_num(0).abs().max().item<double>(), bound);
  const at::Tensor sorted = std::get<0>(selected.sort(-1));
  EXPECT_FALSE(((sorted.diff() == 0) & (sorted.slice(-1, 1) >= 0)).any().item<bool>())
      << "a chunk chosen twice";
}

void expect_equal_to_reference(const Shape& shape, const Options& o, at::ScalarType dtype,
                               double tolerance, at::Device device = at::kCPU) {
  SCOPED_TRACE(testing::Message() << shape << " C " << o.chunk_size << " top_k " << o.top_k << " "
                                  << o.selection << " " << dtype);
  const Qkv arguments = random_qkv(shape);
  const Qkv a = arguments.as(dtype, device);
  const Qkv exact = arguments.as(at::kDouble);
  const auto [out, logsumexp, selected] = run(a, o);
  expect_best(selected.cpu(), chunk_scores(exact, o), rounding_bound(dtype, o, shape.head_dim));
  EXPECT_EQ(out.scalar_type(), dtype);
  EXPECT_FALSE(logsumexp.requires_grad() || selected.requires_grad());
  const auto [expected, expected_logsumexp, forced] = run_reference(exact, o, selected.cpu());
  EXPECT_TRUE(at::equal(forced, selected.cpu()));
  EXPECT_LE(worst_row_error(out.cpu(), expected), tolerance);
  EXPECT_LE((logsumexp.cpu() - expected_logsumexp).abs().max().item<double>(),
            10 * std::min(tolerance, 1e-5));
  const at::Tensor weights = at::randn_like(exact.q).to(at::kBFloat16);
  const auto gradients = a.gradients(out, weights);
  // The kernel's δ is dout · out of an out rounded to bfloat16: rows of few keys, whose terms
  // cancel, feel it.
  const bool rounded = dtype == at::kBFloat16 && device.is_cuda();
  expect_close(gradients, exact.gradients(expected, weights), rounded ? 5e-2 : tolerance);
  const auto [again, same, choice] = run(a, o, selected);
  EXPECT_TRUE(at::equal(again, out) && at::equal(same, logsumexp) && at::equal(choice, selected))
      << "the choice forced";
  EXPECT_TRUE(at::equal(gradients[1], a.gradients(again, weights)[1]));
}

const std::vector<std::pair<Shape, int64_t>> kShapes = {  // and the chunk size
    {{.time = 1}, 16},
    {{.time = 15}, 16},
    {{.time = 16}, 16},
    {{.time = 17}, 16},
    {{.time = 101, .kv_heads = 4}, 16},
    {{.time = 130, .heads = 3, .kv_heads = 1, .head_dim = 64}, 32},
    {{.batch = 1, .time = 65, .head_dim = 3}, 1},
    {{.time = 70, .head_dim = 7}, 9},
    {{.time = 37, .past = 60}, 16},
    {{.time = 1, .past = 64}, 16},
    {{.time = 3, .past = 98, .heads = 3, .kv_heads = 1, .head_dim = 33}, 16},
    {{.time = 16, .past = 85, .head_dim = 64}, 5},
    {{.time = 20, .past = 77, .kv_heads = 1}, 200},
    {{.batch = 1, .time = 400, .heads = 2, .head_dim = 33}, 130}};

TEST(Top1ChunkOp, EqualsItsReference) {
  const PoisonedMemory poisoned;
  ASSERT_TRUE(at::empty({3}, at::kFloat).isnan().all().item<bool>());
  for (const auto& [shape, chunk_size] : kShapes) {
    for (const std::string& selection : kSelections)
      for (const int64_t top_k : {1, 3})
        expect_equal_to_reference(shape, {chunk_size, 8, selection, top_k}, at::kDouble, 1e-12);
    // A softmax of two: its gradient cancels below what single precision holds
    if (chunk_size == 1) continue;
    expect_equal_to_reference(shape, {chunk_size, 8, "exact", 3}, at::kFloat, 1e-5);
    expect_equal_to_reference(shape, {chunk_size, 8, "approx", 1}, at::kFloat, 1e-5);
  }
  expect_equal_to_reference({.time = 101}, {16, 8, "exact", 2}, at::kBFloat16, 1e-2);
  expect_equal_to_reference({.time = 101}, {16, 8, "approx", 1}, at::kBFloat16, 1e-2);
}

TEST(Top1ChunkOp, ChoiceAloneIsThatOfTheReference) {
  for (const auto& [shape, chunk_size] : kShapes)
    for (const std::string& selection : kSelections)
      for (const int64_t top_k : {1, 3}) {
        const Qkv a = random_qkv(shape).as(at::kDouble);
        const Options o{chunk_size, 8, selection, top_k};
        const at::Tensor choice = top1_chunk_choice(a.q, a.k, chunk_size, 8, selection, top_k);
        EXPECT_TRUE(at::equal(choice, std::get<2>(run_reference(a, o))))
            << shape << " C " << chunk_size << " top_k " << top_k << " " << selection;
      }
}

TEST(Top1ChunkOp, OnCudaEqualsItsReference) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  for (const std::string& selection : kSelections)
    for (const int64_t top_k : {1, 3})
      for (const auto& [shape, chunk_size] : {std::pair{Shape{.time = 1, .head_dim = 64}, 64},
                                              {Shape{.time = 300, .head_dim = 64}, 64},
                                              {Shape{.time = 700, .head_dim = 96}, 128},
                                              {Shape{}, 16},
                                              {Shape{.time = 37, .past = 60}, 16}})
        for (const auto& [dtype, tolerance] :
             {std::pair{at::kDouble, 1e-12}, {at::kFloat, 1e-5}, {at::kBFloat16, 1e-2}})
          expect_equal_to_reference(shape, {chunk_size, 8, selection, top_k}, dtype, tolerance,
                                    at::kCUDA);
}

// Kernels leave out the maximum of a softmax where a row's sum allows it.
TEST(Top1ChunkOp, OnCudaRowsDoNotDependOnLargeScoresOfTheirNeighbours) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  for (const std::string& selection : kSelections) {
    SCOPED_TRACE(selection);
    const Qkv a = random_qkv({.time = 300, .head_dim = 64}).as(at::kBFloat16, at::kCUDA);
    Qkv b = a;
    b.q = a.q.detach().clone();
    b.q.slice(1, 1, {}, 2) *= 64;
    const Options options{64, 8, selection};
    const auto [out, logsumexp, selected] = run(a, options);
    const auto [large, large_logsumexp, large_selected] = run(b, options);
    EXPECT_GT(large_logsumexp.max().item<double>(), 88);  // e^88.7 is not a float
    EXPECT_FALSE(large.isnan().any().item<bool>());
    const auto even = [](const at::Tensor& x, int dim) { return x.slice(dim, 0, {}, 2); };
    EXPECT_TRUE(at::equal(even(out, 1), even(large, 1)));
    EXPECT_TRUE(at::equal(even(logsumexp, 2), even(large_logsumexp, 2)));
    EXPECT_TRUE(at::equal(even(selected, 2), even(large_selected, 2)));
  }
}

// A gradient that begins three numbers into its memory, as a part of a larger one does.
void expect_misaligned_gradient(at::Device device) {
  const Qkv a = random_qkv({.time = 130, .head_dim = 64}).as(at::kBFloat16, device);
  const at::Tensor out = std::get<0>(run(a, {64, 8, "approx"}));
  const at::Tensor dout = at::randn_like(out);
  const auto gradients = [&](const at::Tensor& of_out) {
    return torch::autograd::grad({out}, {a.q, a.k, a.v}, {of_out}, /*retain_graph=*/true);
  };
  const auto found = gradients(misaligned(dout));
  const auto expected = gradients(dout);
  for (size_t i = 0; i < 3; ++i)
    EXPECT_TRUE(at::equal(found[i], expected[i])) << "gradient of "
                                                  << "qkv"[i];
}
TEST(Top1ChunkOp, MisalignedGradientGivesTheSameBits) { expect_misaligned_gradient(at::kCPU); }
TEST(Top1ChunkOp, OnCudaMisalignedGradientGivesTheSameBits) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_misaligned_gradient(at::kCUDA);
}

const std::vector<std::pair<std::string, Options>> kGolden = {
    {"top1_chunk_approx_T101_C16", {16, 10, "approx"}},
    {"top1_chunk_approx_T128_C32", {32, 8, "approx"}},
    {"top1_chunk_exact_T101_C16", {16, 10}},
    {"top1_chunk_exact_T128_C32", {32, 8}},
    {"top1_chunk_exact_T65_C16_unnorm", {16, 1 / std::sqrt(24.0)}},
    {"top1_chunk_short_T13_C16", {16, 8}},
    {"top2_chunk_exact_T130_C16", {16, 8, "exact", 2}},
    {"top3_chunk_approx_T130_C16", {16, 8, "approx", 3}}};

TEST(Top1ChunkOp, EqualsTheGoldenFiles) {
  for (const auto& [name, options] : golden_cases(kGolden)) {
    SCOPED_TRACE(name);
    auto golden = read_golden(golden_file(name));
    if (name.ends_with("unnorm")) ASSERT_NEAR(options.scale, 0.204124, 1e-6);
    for (const auto& [dtype, tolerance] : {std::pair{at::kDouble, 1e-12}, {at::kFloat, 1e-5}}) {
      const Qkv a = Qkv{golden["in.q"], golden["in.k"], golden["in.v"]}.as(dtype);
      const auto [out, logsumexp, selected] = run(a, options);
      EXPECT_TRUE(at::equal(selected, golden["out.remote"].to(at::kLong))) << dtype;
      EXPECT_LE(worst_row_error(out, golden["out.o"]), tolerance) << dtype;
      EXPECT_LE((logsumexp - golden["out.lse"]).abs().max().item<double>(), tolerance) << dtype;
      expect_close(a.gradients(out, golden["cot.o"]),
                   {golden["grad.q"], golden["grad.k"], golden["grad.v"]}, tolerance);
    }
  }
}

// MoBA counts the own chunk among its top_k and ranks by q · mean(k). Its sequences lie
// back to back.
TEST(Top1ChunkOp, EqualsTheGoldenFilesOfMoba) {
  struct Moba {
    int chunk_size;
    int top_k;
  };
  for (const auto& [name, moba] : golden_cases<Moba>({{"moba_T128_C32_k2", {32, 2}},
                                                      {"moba_T65x2_C16_k3", {16, 3}},
                                                      {"moba_varlen_C16_k2", {16, 2}}})) {
    SCOPED_TRACE(name);
    auto golden = read_golden(golden_file(name));
    const at::Tensor ends = golden["in.cu_seqlens"].to(at::kLong);
    for (const auto& [dtype, tolerance] : {std::pair{at::kDouble, 1e-12}, {at::kFloat, 1e-5}})
      for (int64_t i = 0; i + 1 < ends.size(0); ++i) {
        const int64_t begin = ends[i].item<int64_t>();
        const int64_t end = ends[i + 1].item<int64_t>();
        auto part = [&](const char* of) { return golden[of].slice(0, begin, end).unsqueeze(0); };
        const Qkv a = Qkv{part("in.q"), part("in.k"), part("in.v")}.as(dtype);
        const auto [out, logsumexp, selected] =
            run(a, {moba.chunk_size, 1 / std::sqrt(double(a.q.size(3))), "approx", moba.top_k - 1});
        EXPECT_TRUE(
            at::equal(selected[0], golden["out.remote"].to(at::kLong).slice(1, begin, end)));
        EXPECT_LE(worst_row_error(out, part("out.o")), tolerance) << dtype;
        expect_close(a.gradients(out, part("cot.o")),
                     {part("grad.q"), part("grad.k"), part("grad.v")}, tolerance);
      }
  }
}

TEST(Top1ChunkOp, MayBeCutAnywhere) {
  const Qkv a = random_qkv({.time = 67});
  for (const std::string& selection : kSelections) {
    const Options o{16, 8, selection, 2};
    const auto [whole, logsumexp, selected] = run(a, o);
    for (const int64_t cut : {1, 16, 33, 66}) {
      const Qkv piece{a.q.slice(1, cut), a.k, a.v};
      const Qkv first{a.q.slice(1, 0, cut), a.k.slice(1, 0, cut), a.v.slice(1, 0, cut)};
      EXPECT_LE(worst_row_error(
                    at::cat({std::get<0>(run(first, o)), std::get<0>(run(piece, o))}, 1), whole),
                1e-12);
      EXPECT_TRUE(at::equal(std::get<2>(run(piece, o)), selected.slice(2, cut)))
          << "cut at " << cut;
    }
  }
}

// Few queries of a long cache, which is part of a larger tensor, with summaries that
// their owner keeps.
void expect_steps_equal_reference(const Shape& shape, const Options& o, at::ScalarType dtype,
                                  double tolerance, at::Device device) {
  SCOPED_TRACE(testing::Message() << shape << " C " << o.chunk_size << " top_k " << o.top_k << " "
                                  << o.selection << " " << dtype << " " << device);
  const at::NoGradGuard no_grad;
  const int64_t size = shape.past + shape.time;
  const Qkv exact = random_qkv(shape);
  auto cache = [&](const at::Tensor& x) {
    const at::Tensor memory =
        at::full({x.size(0), size + 7, x.size(2), x.size(3)}, NAN, x.options().dtype(dtype));
    memory.slice(1, 0, size).copy_(x);
    return memory.to(device).slice(1, 0, size);
  };
  const Qkv a{exact.q.to(device, dtype), cache(exact.k), cache(exact.v)};
  const at::Tensor more = at::cat({exact.k, exact.k.slice(1, 0, o.chunk_size)}, 1).to(dtype);
  const at::Tensor kept = chunk_summaries(more, o.chunk_size).to(device);
  const auto [out, logsumexp, selected] = run(a, o, {}, kept);
  const auto [expected, expected_logsumexp, choice] = run_reference(exact, o);
  EXPECT_EQ(out.scalar_type(), dtype);
  EXPECT_TRUE(at::equal(selected.cpu(), choice));
  EXPECT_LE(worst_row_error(out.cpu(), expected), tolerance);
  EXPECT_LE((logsumexp.cpu() - expected_logsumexp).abs().max().item<double>(),
            10 * std::min(tolerance, 1e-5));
  EXPECT_TRUE(at::equal(std::get<0>(run(a, o, selected)), out)) << "the choice forced";
  EXPECT_TRUE(at::equal(std::get<2>(run(a, o)), selected)) << "summaries computed";
}

void expect_steps(at::Device device) {
  const PoisonedMemory poisoned;
  for (const std::string& selection : kSelections)
    for (const int64_t top_k : {1, 3})
      for (const auto& [shape, chunk_size] :
           {std::pair{Shape{.time = 1, .past = 300, .head_dim = 64}, 16},
            {Shape{.time = 1, .past = 5, .head_dim = 64}, 16},
            {Shape{.time = 5, .past = 250, .heads = 6, .head_dim = 96}, 33},
            {Shape{.batch = 1, .time = 2, .past = 1100, .head_dim = 128}, 1},
            {Shape{.time = 3, .past = 509, .head_dim = 128}, 128}})
        for (const auto& [dtype, tolerance] :
             {std::pair{at::kDouble, 1e-12}, {at::kFloat, 1e-5}, {at::kBFloat16, 1e-2}})
          expect_steps_equal_reference(shape, {chunk_size, 8, selection, top_k}, dtype, tolerance,
                                       device);
}
TEST(Top1ChunkOp, StepsEqualTheReference) { expect_steps(at::kCPU); }
TEST(Top1ChunkOp, StepsOnCudaEqualTheReference) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_steps(at::kCUDA);
}

// 384 blocks have 128 threads each, few blocks have 256.
TEST(Top1ChunkOp, StepsOnCudaOfManySequencesEqualTheReference) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const Shape shape{.batch = 64, .time = 1, .past = 300, .heads = 6, .head_dim = 64};
  for (const std::string& selection : kSelections)
    for (const auto& [dtype, tolerance] :
         {std::pair{at::kDouble, 1e-12}, {at::kFloat, 1e-5}, {at::kBFloat16, 1e-2}})
      expect_steps_equal_reference(shape, {16, 8, selection, 3}, dtype, tolerance, at::kCUDA);
}

// Blocks in a grid's second dimension are at most 65,535: more heads are composed from tensor
// arithmetic, or read by the steps' kernel without gradients.
TEST(Top1ChunkOp, OnCudaTakesAnyNumberOfHeads) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const Qkv a = random_qkv({.batch = 8192, .time = 2, .heads = 8, .kv_heads = 8, .head_dim = 64})
                    .as(at::kBFloat16, at::kCUDA);
  const Options o{1, 8, "approx"};
  std::vector<at::Tensor> halves;
  for (const int64_t begin : {0, 4096}) {
    const auto half = [&](const at::Tensor& x) { return x.slice(0, begin, begin + 4096); };
    halves.push_back(std::get<0>(run({half(a.q), half(a.k), half(a.v)}, o)));
  }
  const at::Tensor expected = at::cat(halves);
  EXPECT_LE(worst_row_error(std::get<0>(run(a, o)), expected), 2e-2);
  const at::NoGradGuard no_grad;
  EXPECT_LE(worst_row_error(std::get<0>(run(a, o)), expected), 2e-2);
}

// Each row has caches of its own, in which NaN stands where it has read nothing. A length counts
// the new token; the row with 0 is not used.
void expect_rows_decode_alone(at::ScalarType dtype, const std::string& selection) {
  constexpr int64_t kChunk = 16;
  constexpr int64_t kCapacity = 256;
  constexpr int64_t kHeads = 4;
  constexpr int64_t kKvHeads = 2;
  constexpr int64_t kWidth = 64;
  const std::vector<int64_t> lengths = {1, 16, 17, 64, 0, 200, 256};
  const auto rows = int64_t(lengths.size());
  const bool approx = selection == "approx";
  const auto options = at::TensorOptions().dtype(dtype).device(at::kCUDA);
  const auto random = [&](at::IntArrayRef sizes) {
    const at::Tensor x = at::randn(sizes, options.dtype(at::kFloat));
    return (x / x.norm(2, -1, true)).to(dtype);
  };
  const at::NoGradGuard no_grad;
  at::manual_seed(1);
  const at::Tensor q = random({rows, kHeads, kWidth});
  const at::Tensor all_k = random({rows, kCapacity, kKvHeads, kWidth});
  const at::Tensor all_v = random({rows, kCapacity, kKvHeads, kWidth});
  std::vector<at::Tensor> caches;
  std::vector<at::Tensor> new_k;
  std::vector<at::Tensor> new_v;
  std::vector<int64_t> positions;
  std::vector<int64_t> addresses;
  for (int64_t b = 0; b < rows; ++b) {
    const int64_t past = std::max<int64_t>(lengths[size_t(b)] - 1, 0);
    positions.push_back(lengths[size_t(b)] - 1);
    new_k.push_back(all_k[b][past]);
    new_v.push_back(all_v[b][past]);
    const at::Tensor known =
        chunk_summaries(all_k.slice(0, b, b + 1).slice(1, 0, past + 1), kChunk)[0].slice(
            0, 0, past / kChunk);
    for (const at::Tensor& held : {all_k[b].slice(0, 0, past), all_v[b].slice(0, 0, past), known}) {
      if (!approx && held.is_same(known)) continue;
      auto sizes = held.sizes().vec();
      sizes[0] = held.is_same(known) ? kCapacity / kChunk : kCapacity;
      caches.push_back(at::full(sizes, NAN, options));
      caches.back().slice(0, 0, held.size(0)).copy_(held);
      addresses.push_back(reinterpret_cast<int64_t>(caches.back().data_ptr()));
    }
  }
  const int64_t each = approx ? 3 : 2;
  const auto on_cuda = [](const std::vector<int64_t>& x) { return at::tensor(x).to(at::kCUDA); };
  const auto decode = [&] {
    return top1_chunk_decode(q, at::stack(new_k), at::stack(new_v), on_cuda(positions),
                             on_cuda(addresses).view({rows, each}), kChunk, 8, selection, 2,
                             kCapacity);
  };
  const at::Tensor out = decode();
  EXPECT_TRUE(at::equal(out, decode()));
  for (int64_t b = 0; b < rows; ++b) {
    const int64_t length = lengths[size_t(b)];
    SCOPED_TRACE("length " + std::to_string(length));
    if (length == 0) {
      EXPECT_EQ(out[b].abs().max().item<double>(), 0);
      continue;
    }
    const at::Tensor k = all_k.slice(0, b, b + 1).slice(1, 0, length);
    const Qkv alone{q[b].unsqueeze(0).unsqueeze(0), k,
                    all_v.slice(0, b, b + 1).slice(1, 0, length)};
    EXPECT_TRUE(at::equal(out[b], std::get<0>(run(alone, {kChunk, 8, selection, 2}))[0][0]));
    EXPECT_TRUE(at::equal(caches[size_t(each * b)].slice(0, 0, length), k[0]));
    if (!approx || length % kChunk) continue;
    const auto joined = [](const at::Tensor& x) { return x.to(at::kDouble).sum(-2); };
    const at::Tensor made = joined(caches[size_t(each * b + 2)][length / kChunk - 1]);
    const at::Tensor expected = joined(chunk_summaries(k, kChunk)[0][-1]);
    EXPECT_LE((made - expected).abs().max().item<double>(), 2e-6);
  }
}

TEST(Top1ChunkDecode, OnCudaRowsHaveTheBitsOfSequencesAlone) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat})
    for (const char* selection : {"exact", "approx"}) expect_rows_decode_alone(dtype, selection);
}

TEST(Top1ChunkDecode, NamesTheWrongArgument) {
  using testing::HasSubstr;
  const at::Tensor q = at::zeros({2, 4, 64});
  const at::Tensor k = at::zeros({2, 2, 64});
  const at::Tensor positions = at::zeros({2}, at::kLong);
  const at::Tensor caches = at::zeros({2, 2}, at::kLong);
  const auto decode = [&](const at::Tensor& keys, const at::Tensor& values) {
    return error_of(
        [&] { top1_chunk_decode(q, keys, values, positions, caches, 16, 1, "exact", 1, 64); });
  };
  EXPECT_THAT(decode(k.slice(0, 0, 1), k), HasSubstr("k has shape [1, 2, 64]"));
  EXPECT_THAT(decode(k, k.slice(2, 0, 8)), HasSubstr("v has shape [2, 2, 8]"));
  EXPECT_THAT(decode(at::zeros({2, 3, 64}), at::zeros({2, 3, 64})),
              HasSubstr("3 heads of k do not divide 4 heads of q"));
  EXPECT_THAT(decode(k, k), HasSubstr("it takes float32 or bfloat16 on CUDA"));
}

TEST(ChunkSummaries, AreMeans) {
  const at::Tensor k = random_qkv({.time = 105, .head_dim = 8}).k;
  const at::Tensor mean =
      k.slice(1, 0, 96).unflatten(1, {6, 16}).transpose(2, 3).mean(3, /*keepdim=*/true);
  const at::Tensor summaries = chunk_summaries(k, 16);
  ASSERT_EQ(summaries.sizes(), (at::IntArrayRef{2, 6, 2, 1, 8}));
  EXPECT_LE((summaries - mean).abs().max().item<double>(), 1e-15);
  const at::Tensor rounded = k.to(at::kBFloat16);
  const at::Tensor parts = chunk_summaries(rounded, 16);
  ASSERT_EQ(parts.sizes(), (at::IntArrayRef{2, 6, 2, 2, 8}));
  const at::Tensor whole = chunk_summaries(rounded.to(at::kFloat), 16);
  EXPECT_TRUE(at::equal(parts.slice(3, 1), whole.to(at::kBFloat16)));
  EXPECT_TRUE(
      ((joined_summaries(parts) - whole).abs() <= 0x1p-16 * whole.abs()).all().item<bool>());
  EXPECT_EQ(chunk_summaries(k, 200).sizes(), (at::IntArrayRef{2, 0, 2, 1, 8}));
  EXPECT_THAT(error_of([&] { chunk_summaries(k, 0); }), testing::HasSubstr("chunk_size is 0"));
}

TEST(Top1ChunkOp, GivesTheSameBitsForAnyNumberOfThreads) {
  const Qkv a = random_qkv({.time = 301}).as(at::kFloat);
  for (const std::string& selection : kSelections)
    expect_same_bits_for_any_threads([&] {
      const auto [out, logsumexp, selected] = run(a, {16, 8, selection, 2});
      auto all = a.gradients(out, at::ones_like(out));
      all.insert(all.end(), {out.detach(), logsumexp, selected});
      return all;
    });
}

TEST(Top1ChunkOp, TiesGoToTheLowerChunk) {
  const Qkv a = random_qkv({.time = 100});
  for (const std::string& selection : kSelections)
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
      const Qkv same = Qkv{a.q, at::ones_like(a.k), a.v}.as(dtype);
      const at::Tensor selected = std::get<2>(run(same, {16, 1, selection, 3}));
      const at::Tensor own = at::arange(100).floor_divide(16).unsqueeze(1);
      const at::Tensor slots = at::arange(3);
      EXPECT_TRUE(at::equal(selected, at::where(slots < own, slots, -1).expand_as(selected)))
          << selection << dtype;
    }
}

TEST(Top1ChunkOp, ForcedChoices) {
  const Qkv arguments = random_qkv({.time = 101});
  const Qkv exact = arguments.as(at::kDouble);
  const Qkv single = arguments.as(at::kFloat);
  const Options o{16, 8, "exact", 3};
  // Some are no candidates, some stand twice
  const at::Tensor any = at::randint(-3, 12, {2, 4, 101, 3}, at::kLong);
  const auto [expected, logsumexp, kept] = run_reference(exact, o, any);
  const at::Tensor own = at::arange(101).floor_divide(16).unsqueeze(1);
  EXPECT_TRUE(at::equal(kept, at::where((any >= 0) & (any < own), any, -1)));
  const at::Tensor weights = at::randn_like(exact.q);
  for (const auto& [a, tolerance] : {std::pair{exact, 1e-12}, {single, 1e-5}}) {
    const auto [out, lse, selected] = run(a, o, any);
    EXPECT_TRUE(at::equal(selected, kept));
    EXPECT_LE(worst_row_error(out, expected), tolerance);
    expect_close(a.gradients(out, weights), exact.gradients(expected, weights), tolerance);
  }
}

TEST(Top1ChunkOp, LargeScalesStayFinite) {
  for (const double scale : {100.0, 1e4}) {
    const Qkv a = random_qkv({.time = 100}).as(at::kFloat);
    const auto [out, logsumexp, selected] = run(a, {16, scale});
    EXPECT_TRUE(at::isfinite(out).all().item<bool>() && at::isfinite(logsumexp).all().item<bool>());
    for (const at::Tensor& gradient : a.gradients(out, at::ones_like(out)))
      EXPECT_TRUE(at::isfinite(gradient).all().item<bool>());
  }
}

TEST(Top1ChunkOp, NanGivesNanRows) {
  for (const std::string& selection : kSelections) {
    Qkv a = random_qkv({.time = 70});
    a.q.select(1, 40).fill_(NAN);
    const auto [out, logsumexp, selected] = run(a, {16, 8, selection});
    EXPECT_TRUE(out.select(1, 40).isnan().all().item<bool>());
    EXPECT_FALSE(at::cat({out.slice(1, 0, 40), out.slice(1, 41)}, 1).isnan().any().item<bool>());
    a = random_qkv({.time = 70});
    a.k.select(1, 3).fill_(NAN);  // its chunk counts as the best of every later query
    EXPECT_TRUE(std::get<0>(run(a, {16, 8, selection})).slice(1, 3).isnan().all().item<bool>());
  }
}

TEST(Top1ChunkOp, GradientsEqualFiniteDifferences) {
  const Options o{4, 3, "exact", 2};
  const Qkv a = random_qkv({.batch = 1, .time = 13, .heads = 2, .kv_heads = 1, .head_dim = 3})
                    .as(at::kDouble);
  const auto [out, logsumexp, selected] = run(a, o);
  const at::Tensor weights = at::randn_like(out);
  const auto gradients = a.gradients(out, weights);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < 3; ++i) {
    at::Tensor flat = (i == 0 ? a.q : i == 1 ? a.k : a.v).view(-1);
    for (int64_t j = 0; j < flat.size(0); ++j) {
      auto loss_at = [&](double step) {
        flat[j] += step;
        const double loss = (std::get<0>(run(a, o, selected)) * weights).sum().item<double>();
        flat[j] -= step;
        return loss;
      };
      EXPECT_NEAR(gradients[i].reshape(-1)[j].item<double>(),
                  (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5, 1e-7)
          << "qkv"[i] << j;
    }
  }
}

TEST(Top1ChunkOp, NamesTheWrongArgument) {
  auto message = [](auto change) {
    Qkv a = random_qkv({.time = 5});
    Options o;
    std::optional<at::Tensor> selected;
    change(a, o, selected);
    return error_of([&] { run(a, o, selected); });
  };
  using A = Qkv&;
  using O = Options&;
  using S = std::optional<at::Tensor>&;
  using testing::HasSubstr;
  EXPECT_EQ(message([](A, O, S) {}), "no error");
  EXPECT_THAT(message([](A a, O, S) { a.v = a.v.narrow(1, 0, 4); }),
              HasSubstr("top1_chunk: v has shape [2, 4, 2, 20]"));
  EXPECT_THAT(message([](A a, O, S) { a.q = a.q[0]; }), HasSubstr("q has shape"));
  EXPECT_THAT(message([](A a, O, S) { a.k = a.k.narrow(3, 0, 4); }), HasSubstr("k has shape"));
  EXPECT_THAT(message([](A a, O, S) { a.k = a.k.narrow(1, 0, 0); }), HasSubstr("k has shape"));
  EXPECT_THAT(message([](A a, O, S) { a.q = at::cat({a.q, a.q}, 1); }),
              HasSubstr("k has 5 positions"));
  EXPECT_THAT(message([](A a, O, S) { a.q = a.q.narrow(2, 0, 3); }), HasSubstr("k has 2 heads"));
  EXPECT_THAT(message([](A a, O, S) { a.q = a.q.to(at::kHalf); }), HasSubstr("q holds Half"));
  EXPECT_THAT(message([](A a, O, S) { a.v = a.v.to(at::kLong); }), HasSubstr("v holds Long"));
  EXPECT_THAT(message([](A, O o, S) { o.chunk_size = 0; }),
              HasSubstr("chunk_size is 0, expected 1 or more"));
  EXPECT_THAT(message([](A, O o, S) { o.top_k = 0; }), HasSubstr("top_k is 0"));
  EXPECT_THAT(message([](A, O o, S) { o.scale = INFINITY; }), HasSubstr("scale is inf"));
  EXPECT_THAT(message([](A, O o, S) { o.selection = "aprox"; }),
              HasSubstr("selection is 'aprox', expected 'exact' or 'approx'"));
  EXPECT_THAT(message([](A, O, S s) { s = at::zeros({2, 4, 5}, at::kLong); }),
              HasSubstr("selected has shape [2, 4, 5]"));
  EXPECT_THAT(message([](A, O, S s) { s = at::zeros({2, 4, 5, 1}, at::kInt); }),
              HasSubstr("selected holds Int"));
  const Qkv a = random_qkv({.time = 40});
  EXPECT_THAT(error_of([&] { run(a, {16, 8, "approx"}, {}, at::zeros({2, 1, 2, 1, 20})); }),
              HasSubstr("summaries has shape [2, 1, 2, 1, 20]"));
}

}  // namespace
}  // namespace assay::ops
