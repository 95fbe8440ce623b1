// ssd against its naive twin, golden files, and itself cut in two.
#include <gmock/gmock.h>

#include "ops/core/dispatch.h"
#include "ops/recurrence/linear_attention/linear_attention.h"
#include "ops/recurrence/ssd/ssd.h"
#include "ops/recurrences.h"

namespace assay::ops {
namespace {

Operator with(bool softplus, int64_t chunk_size = 64) {
  return [=](Named a) {
    return ssd(a["x"], a["dt"], a["A"], a["B"], a["C"], find(a, "D"), find(a, "z"),
               find(a, "dt_bias"), softplus, find(a, "initial_state"), chunk_size);
  };
}
Outputs twin(Named a) {
  return ssd_reference(a["x"], a["dt"], a["A"], a["B"], a["C"], find(a, "D"), find(a, "z"),
                       find(a, "dt_bias"), true, find(a, "initial_state"));
}

struct Shape {
  int64_t batch;
  int64_t time;
  int64_t heads;
  int64_t groups;
  int64_t head_dim;
  int64_t state_size;
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "B " << s.batch << " T " << s.time << " H " << s.heads << " G " << s.groups << " P "
             << s.head_dim << " N " << s.state_size << " seed 7";
}

Named random_arguments(const Shape& s, at::ScalarType dtype = at::kDouble) {
  torch::manual_seed(7);
  const auto real = dtype == at::kDouble ? at::kDouble : at::kFloat;
  auto normal = [&](at::IntArrayRef shape, at::ScalarType type) {
    return at::randn(shape, at::kDouble).to(type);
  };
  return {{"x", normal({s.batch, s.time, s.heads, s.head_dim}, dtype)},
          {"dt", (at::randn({s.batch, s.time, s.heads}, at::kDouble) - 2).to(dtype)},
          {"A", (-at::rand({s.heads}, at::kDouble) - 0.1).to(real)},
          {"B", normal({s.batch, s.time, s.groups, s.state_size}, dtype)},
          {"C", normal({s.batch, s.time, s.groups, s.state_size}, dtype)},
          {"D", normal({s.heads}, real)},
          {"z", normal({s.batch, s.time, s.heads, s.head_dim}, dtype)},
          {"dt_bias", normal({s.heads}, real) * 0.1},
          {"initial_state", normal({s.batch, s.heads, s.head_dim, s.state_size}, real)}};
}

TEST(SsdOp, EqualsItsTwin) {
  for (const Shape& shape : {Shape{2, 1, 4, 2, 5, 6},
                             {1, 31, 1, 1, 4, 3},
                             {2, 65, 6, 2, 7, 8},
                             {1, 101, 4, 1, 70, 16}}) {
    SCOPED_TRACE(shape);
    expect_equal_to_twin(with(true), twin, random_arguments(shape), 1e-12);
  }
}

TEST(SsdOp, SingleAndHalfPrecision) {
  const Shape shape{2, 67, 4, 2, 16, 24};
  expect_equal_to_twin(with(true), twin, random_arguments(shape, at::kFloat), 1e-5);
  const Named half = random_arguments(shape, at::kBFloat16);
  expect_equal_to_twin(with(true), twin, half, 1e-2);
  const auto [y, state] = with(true)(half);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_EQ(state.scalar_type(), at::kFloat);
}

// On GPUs other than Hopper, q and k times their decays are rounded to bf16, too.
double bf16_tolerance() { return on_hopper(at::kCUDA) ? 1e-2 : 1.5e-2; }

TEST(SsdOp, OnCudaEqualsItsTwin) {
  // bf16: the second on tensor cores
  for (const Shape& shape : {Shape{2, 67, 4, 2, 16, 24}, {2, 67, 4, 2, 64, 128}})
    expect_equal_to_twin_on_cuda(with(true), twin, random_arguments(shape), /*only_bf16=*/false,
                                 bf16_tolerance());
}
TEST(SsdOp, OnCudaTensorCoresEqualItsTwin) {
  for (const Shape& shape :
       {Shape{1, 1, 2, 1, 64, 64}, {2, 64, 3, 3, 32, 96}, {1, 330, 3, 1, 64, 128}}) {
    SCOPED_TRACE(shape);
    expect_equal_to_twin_on_cuda(with(true), twin, random_arguments(shape), /*only_bf16=*/true,
                                 bf16_tolerance());
  }
}

TEST(SsdOp, OnCudaLongSequencesMayBeCut) {
  expect_long_sequence_cut_on_cuda(with(true), random_arguments({1, 102437, 2, 1, 64, 64}),
                                   {"x", "dt", "B", "C", "z"}, bf16_tolerance());
}

TEST(SsdOp, OnCudaMisalignedArgumentsGiveTheSameBits) {
  expect_misaligned_alike_on_cuda(with(true), random_arguments({2, 67, 4, 2, 64, 128}));
}

TEST(SsdOp, MayBeCutAnywhere) {
  expect_cut_anywhere(with(true), random_arguments({2, 131, 4, 2, 6, 5}),
                      {"x", "dt", "B", "C", "z"}, {1, 64, 65, 130}, 1e-12);
}

TEST(SsdOp, TheChunkSizeChangesNothing) {
  const Named a = random_arguments({2, 101, 4, 2, 6, 5});
  for (const int64_t chunk_size : {1, 7, 16, 256})
    EXPECT_LE(worst_row_error(std::get<0>(with(true, chunk_size)(a)), std::get<0>(twin(a))), 1e-12)
        << chunk_size;
}

TEST(SsdOp, EqualsTheGoldenFiles) {
  const Operator op = with(true);
  for (const auto& [name, ssd] :
       golden_cases<Operator>({{"ssd_T128", op}, {"ssd_T65", op}, {"ssd_T67_plain", op}}))
    expect_equal_to_golden(name, ssd, "y");
}

// The minimal files hold the log decays themselves, as simple_gla takes them.
TEST(SsdOp, IsSimpleGlaWithTheStateTransposed) {
  const auto minimal = [](Named a) -> Outputs {
    const auto before = find(a, "initial_state");
    const auto [y, state] =
        simple_gla(a["C"], a["B"], a["X"], a["A"], 1,
                   before ? std::optional(before->squeeze(1).transpose(2, 3)) : before);
    return {y, state.transpose(2, 3)};
  };
  if (golden_data_is_complete())
    for (const auto& name : {"ssd_minimal_T128", "ssd_minimal_T64"})
      expect_equal_to_golden(name, minimal, "Y");
  Named a = random_arguments({2, 70, 4, 2, 6, 5});
  const auto [y, state] = ssd(a["x"], a["dt"].exp(), a["A"], a["B"], a["C"]);
  const auto [same, same_state] =
      simple_gla(a["C"], a["B"], a["dt"].exp().unsqueeze(-1) * a["x"], a["dt"].exp() * a["A"], 1);
  EXPECT_LE(worst_row_error(y, same), 1e-12);
  EXPECT_LE(worst_row_error(state, same_state.transpose(2, 3)), 1e-12);
}

TEST(SsdOp, NamesTheWrongArgument) {
  const Named good = random_arguments({2, 5, 4, 2, 3, 6});
  auto changed = [&](const std::string& name, auto change) {
    Named bad = good;
    bad[name] = change(bad[name]);
    return message_of(with(true), bad);
  };
  EXPECT_EQ(message_of(with(true), good), "no error");
  for (const auto& [name, tensor] : good) {
    EXPECT_THAT(changed(name, [](auto t) { return t.unsqueeze(0); }),
                testing::HasSubstr(name + " has shape"));
    EXPECT_THAT(changed(name, [](auto t) { return t.to(at::kInt); }),
                testing::HasSubstr(name + " holds Int"));
  }
  EXPECT_THAT(changed("x", [](auto t) { return t.narrow(1, 0, 0); }),
              testing::HasSubstr("x has shape"));
  EXPECT_THAT(changed("B", [](auto t) { return t.repeat({1, 1, 2, 1}).narrow(2, 0, 3); }),
              testing::HasSubstr("B has 3 groups"));
  EXPECT_THAT(message_of(with(true, 0), good), testing::HasSubstr("chunk_size is 0"));
}

}  // namespace
}  // namespace assay::ops
