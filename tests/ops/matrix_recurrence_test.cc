// The recurrence's two ways, the kernel and the batched products, against one another and against
// finite differences; and that long sequences in segments change nothing.
#include "ops/recurrence/matrix_recurrence/matrix_recurrence.h"

#include "ops/recurrence/checkpointed_scan.h"
#include "ops/recurrences.h"

namespace assay::ops {
namespace {

enum class Kind { plain, scalar, undecayed, bonus, gated, general };

Prepare prepare(Kind kind) {
  return [=](const std::vector<at::Tensor>& s) {  // q, k, v, decay, a, b, u
    MatrixRecurrence m{.q = s[0], .k = s[1], .v = s[2], .decay = s[3]};
    if (kind == Kind::scalar) m.decay = s[3].narrow(-1, 0, 1).contiguous();
    if (kind == Kind::undecayed) m.decay = at::Tensor();
    if (kind == Kind::bonus) m.u = s[6].squeeze(0).squeeze(0);
    if (kind == Kind::gated || kind == Kind::general) {
      m.transition = Transition::rank_one;
      m.a = s[4];
      m.b = s[5];
    }
    if (kind == Kind::gated) {
      m.c = s[2];
      m.k = m.v = at::Tensor();
      m.decay = s[3].narrow(-1, 0, 1).contiguous();
    }
    return m;
  };
}

std::vector<at::Tensor> random_arguments(int64_t time, int64_t heads, int64_t K, int64_t V,
                                         int64_t batch = 2) {
  torch::manual_seed(7);
  auto normal = [&](int64_t dim) { return at::randn({batch, time, heads, dim}, at::kDouble); };
  const at::Tensor kappa = normal(K);
  const at::Tensor unit = kappa / kappa.norm(2, -1, true);
  return {normal(K),
          normal(K),
          normal(V),
          1 - 0.3 * at::rand({batch, time, heads, K}, at::kDouble),
          -unit,
          unit * at::rand({batch, time, heads, K}, at::kDouble),
          at::randn({1, 1, heads, K}, at::kDouble),
          at::randn({batch, heads, K, V}, at::kDouble)};
}

Named named(const std::vector<at::Tensor>& tensors) {
  Named result;
  for (size_t i = 0; i < tensors.size(); ++i) result[std::to_string(i)] = tensors[i];
  return result;
}
std::vector<at::Tensor> arguments(const Named& named, size_t first, size_t last) {
  std::vector<at::Tensor> result;
  for (size_t i = first; i < last; ++i) result.push_back(named.at(std::to_string(i)));
  return result;
}

Operator kernel(Kind kind) {
  return [=](Named n) {
    return recurrence(prepare(kind), arguments(n, 0, 7), n["7"], n["0"].size(1));
  };
}
// Segments of `length` steps, so that a short test has several.
Operator products(Kind kind, int64_t chunk_size, int64_t length) {
  return [=](Named n) {
    const Piece piece = [=](const std::vector<at::Tensor>& part, const at::Tensor& state) {
      return chunked(prepare(kind)(part), state, chunk_size);
    };
    return scan_with_recompute(piece, arguments(n, 0, 7), n["7"], n["0"].size(1), length);
  };
}

struct MatrixRecurrenceKinds : testing::TestWithParam<Kind> {};
const char* const kNames[] = {"plain", "scalar", "undecayed", "bonus", "gated", "general"};
INSTANTIATE_TEST_SUITE_P(, MatrixRecurrenceKinds,
                         testing::Values(Kind::plain, Kind::scalar, Kind::undecayed, Kind::bonus,
                                         Kind::gated, Kind::general),
                         [](auto& i) { return kNames[int(i.param)]; });

TEST_P(MatrixRecurrenceKinds, KernelAndProductsAreOneFunction) {
  for (const auto& [time, K, V] :
       {std::tuple{1, 3, 4}, {2, 5, 3}, {33, 20, 6}, {65, 7, 70}, {101, 6, 100}})
    for (const auto& [chunk_size, length] : {std::pair{16, 64}, {64, 4096}}) {
      SCOPED_TRACE(testing::Message() << "T " << time << " K " << K << " V " << V << " chunks of "
                                      << chunk_size << " segments of " << length << " seed 7");
      expect_equal_to_twin(products(GetParam(), chunk_size, length), kernel(GetParam()),
                           named(random_arguments(time, 2, K, V)), 1e-10);
    }
}

TEST_P(MatrixRecurrenceKinds, ProductsInSinglePrecision) {
  Named given = named(random_arguments(131, 4, 16, 20));
  for (auto& [name, tensor] : given) tensor = tensor.to(at::kFloat);
  expect_equal_to_twin(products(GetParam(), 64, 128), kernel(GetParam()), given, 1e-5);
}

TEST_P(MatrixRecurrenceKinds, GradientsEqualFiniteDifferences) {
  const Named given = leaves(named(random_arguments(5, 2, 3, 4, 1)), at::kDouble);
  const Outputs out = kernel(GetParam())(given);
  const at::Tensor weights = at::randn_like(std::get<0>(out));
  const at::Tensor state_weights = at::randn_like(std::get<1>(out));
  const Named exact = gradients(given, out, weights, state_weights);
  const at::NoGradGuard guard;
  auto loss = [&](const Named& at) {
    const auto [y, state] = kernel(GetParam())(at);
    return ((y * weights).sum() + (state * state_weights).sum()).item<double>();
  };
  for (const auto& [name, tensor] : given)
    for (int64_t i = 0; i < tensor.numel(); i += 7) {
      auto moved = [&](double step) {
        Named there = given;
        there[name] = tensor.detach().clone();
        there[name].view(-1)[i] += step;
        return loss(there);
      };
      const double slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
      EXPECT_NEAR(exact.at(name).reshape(-1)[i].item<double>(), slope, 1e-7 * (1 + std::abs(slope)))
          << "argument " << name << ", number " << i << ", seed 7";
    }
}

TEST_P(MatrixRecurrenceKinds, TheBitsDoNotDependOnThreads) {
  Named given = named(random_arguments(70, 3, 20, 100));
  for (auto& [name, tensor] : given) tensor = tensor.to(at::kFloat).requires_grad_();
  auto bits = [&](int threads) {
    at::set_num_threads(threads);
    const Outputs out = kernel(GetParam())(given);
    Named all =
        gradients(given, out, at::ones_like(std::get<0>(out)), at::ones_like(std::get<1>(out)));
    all["out"] = std::get<0>(out);
    all["state"] = std::get<1>(out);
    return all;
  };
  const int threads = at::get_num_threads();
  const Named one = bits(1);
  const Named three = bits(3);
  at::set_num_threads(threads);
  for (const auto& [name, tensor] : one) EXPECT_TRUE(at::equal(tensor, three.at(name))) << name;
}

TEST_P(MatrixRecurrenceKinds, WithoutGradientGivesTheSameBits) {
  const Named given = leaves(named(random_arguments(70, 2, 6, 5)), at::kDouble);
  const auto with = kernel(GetParam())(given);
  const at::NoGradGuard guard;
  const auto without = kernel(GetParam())(given);
  EXPECT_TRUE(at::equal(std::get<0>(with), std::get<0>(without)));
  EXPECT_TRUE(at::equal(std::get<1>(with), std::get<1>(without)));
  EXPECT_FALSE(std::get<0>(without).requires_grad());
}

}  // namespace
}  // namespace assay::ops
