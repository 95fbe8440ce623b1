#pragma once
// Properties of every operator with a state, as functions that a test calls with the operator, its
// arguments by name and, for the comparison, its naive twin.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <set>
#include <tuple>

#include "ops/golden.h"

namespace assay::ops {

using Named = std::map<std::string, at::Tensor>;
using Outputs = std::tuple<at::Tensor, at::Tensor>;
using Operator = std::function<Outputs(Named)>;

inline std::optional<at::Tensor> find(const Named& arguments, const std::string& name) {
  const auto found = arguments.find(name);
  return found == arguments.end() ? std::nullopt : std::optional(found->second);
}

inline Named leaves(const Named& arguments, at::ScalarType dtype, bool as_they_are = false) {
  Named result;
  for (const auto& [name, tensor] : arguments)
    result[name] =
        (as_they_are ? tensor.detach() : tensor.detach().to(dtype)).clone().requires_grad_();
  return result;
}

// Gradients of Σ weights ⊙ out + Σ state_weights ⊙ state by name; an undefined weight leaves
// that output out.
inline Named gradients(const Named& arguments, const Outputs& out, const at::Tensor& weights,
                       const at::Tensor& state_weights) {
  at::Tensor loss = at::zeros({}, std::get<1>(out).options().dtype(at::kDouble));
  if (weights.defined()) loss = loss + (std::get<0>(out).to(at::kDouble) * weights).sum();
  if (state_weights.defined())
    loss = loss + (std::get<1>(out).to(at::kDouble) * state_weights).sum();
  std::vector<at::Tensor> inputs;
  for (const auto& [name, tensor] : arguments) inputs.push_back(tensor);
  const auto grads = torch::autograd::grad({loss}, inputs, {}, /*retain_graph=*/true, false,
                                           /*allow_unused=*/true);
  Named result;
  for (size_t i = 0; const auto& [name, tensor] : arguments) {
    result[name] = grads[i].defined() ? grads[i] : at::zeros_like(tensor);
    EXPECT_EQ(result[name].scalar_type(), tensor.scalar_type()) << name;
    ++i;
  }
  return result;
}

// The root mean square of a tensor's rows, of the largest: what a row counts at least where
// products sum in blocks.
inline double mean_row(const at::Tensor& expected) {
  const at::Tensor rows = expected.to(at::kDouble).norm(2, -1);
  return (rows.square().mean().sqrt() / rows.max()).nan_to_num(0).item<double>();
}

// A gradient may be a sum of numbers far larger than itself (of steps long forgotten, of a gate
// that hardly matters): its rows count at least a hundredth of the largest. On a GPU, whose
// products sum in blocks, they count at least their root mean square. The gradient of a gate or
// rate is one number per step that is the sum over a whole state, with terms of both signs; in less
// than float64 it is allowed 2.5 times as much.
inline void expect_close(const Named& actual, const Named& expected, double tolerance) {
  static const std::set<std::string> gates{"beta", "g", "gk", "w", "dt"};
  for (const auto& [name, tensor] : expected) {
    double allowed = tolerance;
    if (actual.at(name).scalar_type() != at::kDouble && gates.contains(name)) allowed *= 2.5;
    EXPECT_LE(worst_row_error(actual.at(name), tensor, tensor.is_cuda() ? mean_row(tensor) : 0.01),
              allowed)
        << "gradient of " << name;
  }
}

// Output, state and every gradient against the twin in float64 on the same numbers. Tensor cores
// round what they multiply to bf16, which moves every row as much: rows of the output in bf16 on a
// GPU count at least half their root mean square.
inline void expect_equal_to_twin(const Operator& op, const Operator& twin, const Named& given,
                                 double tolerance) {
  const Named arguments = leaves(given, at::kDouble, true);
  const Named exact = leaves(given, at::kDouble);
  const Outputs out = op(arguments);
  const Outputs expected = twin(exact);
  const auto& [y, state] = expected;
  const double least =
      y.is_cuda() && std::get<0>(out).scalar_type() == at::kBFloat16 ? mean_row(y) / 2 : 0;
  EXPECT_LE(worst_row_error(std::get<0>(out), y, least), tolerance);
  EXPECT_LE(worst_row_error(std::get<1>(out), state), tolerance);
  // Numbers that the output's dtype holds
  const at::Tensor weights = at::randn_like(std::get<0>(out)).to(at::kDouble);
  const at::Tensor state_weights = at::randn_like(std::get<1>(out)).to(at::kDouble);
  for (const auto& [w, s] :
       {std::pair(weights, state_weights), {weights, at::Tensor()}, {at::Tensor(), state_weights}})
    expect_close(gradients(arguments, out, w, s), gradients(exact, expected, w, s), tolerance);
}

// expect_equal_to_twin on a GPU, where there is one, in every precision or in bf16 alone.
inline void expect_equal_to_twin_on_cuda(const Operator& op, const Operator& twin,
                                         const Named& given, bool only_bf16 = false,
                                         double bf16_tolerance = 1e-2) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  for (const auto& [dtype, tolerance] :
       {std::pair{at::kDouble, 1e-10}, {at::kFloat, 1e-5}, {at::kBFloat16, bf16_tolerance}}) {
    if (only_bf16 && dtype != at::kBFloat16) continue;
    SCOPED_TRACE(dtype);
    Named there;
    for (const auto& [name, tensor] : given) there[name] = tensor.to(at::kCUDA, dtype);
    expect_equal_to_twin(op, twin, there, tolerance);
  }
}

// Arguments and gradients of the results that do not begin at multiples of 16 bytes give the bits
// of those that do.
inline void expect_misaligned_alike(const Operator& op, const Named& given) {
  const Named aligned = leaves(given, at::kDouble, true);
  Named other;
  for (const auto& [name, tensor] : given)
    other[name] = misaligned(tensor.detach()).requires_grad_();
  const Outputs expected = op(aligned);
  const Outputs found = op(other);
  EXPECT_TRUE(at::equal(std::get<0>(found), std::get<0>(expected)));
  EXPECT_TRUE(at::equal(std::get<1>(found), std::get<1>(expected)));
  const at::Tensor dy = at::randn_like(std::get<0>(expected));
  const at::Tensor dstate = at::randn_like(std::get<1>(expected));
  const auto gradients = [](const Named& arguments, const Outputs& out, const at::Tensor& dy,
                            const at::Tensor& dstate) {
    std::vector<at::Tensor> inputs;
    for (const auto& [name, tensor] : arguments) inputs.push_back(tensor);
    return torch::autograd::grad({std::get<0>(out), std::get<1>(out)}, inputs, {dy, dstate});
  };
  const auto wanted = gradients(aligned, expected, dy, dstate);
  const auto got = gradients(other, found, misaligned(dy), misaligned(dstate));
  for (size_t i = 0; const auto& [name, tensor] : given) {
    EXPECT_TRUE(at::equal(got[i], wanted[i])) << "gradient of " << name;
    ++i;
  }
}
inline void expect_misaligned_alike_on_cuda(const Operator& op, const Named& given) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  Named there;
  for (const auto& [name, tensor] : given)
    there[name] = tensor.to(at::kCUDA, name == "initial_state" ? at::kFloat : at::kBFloat16);
  expect_misaligned_alike(op, there);
}

// The sequences cut in two, the second with the first's state: one output, one set of gradients.
inline void expect_cut_anywhere(const Operator& op, const Named& given,
                                const std::set<std::string>& sequences,
                                std::initializer_list<int64_t> cuts, double tolerance) {
  const Named arguments = leaves(given, at::kDouble);
  const Outputs whole = op(arguments);
  const int64_t time = std::get<0>(whole).size(1);
  const at::Tensor weights = at::randn_like(std::get<0>(whole));
  const at::Tensor state_weights = at::randn_like(std::get<1>(whole));
  const Named expected = gradients(arguments, whole, weights, state_weights);
  for (const int64_t cut : cuts) {
    SCOPED_TRACE(testing::Message() << "cut at " << cut);
    Named first = arguments;
    Named second = arguments;
    for (const auto& name : sequences)
      if (arguments.contains(name)) {
        first[name] = arguments.at(name).narrow(1, 0, cut);
        second[name] = arguments.at(name).narrow(1, cut, time - cut);
      }
    const auto [out, state] = op(first);
    second["initial_state"] = state;
    const auto [rest, last] = op(second);
    const Outputs joined{at::cat({out, rest}, 1), last};
    EXPECT_LE(worst_row_error(std::get<0>(joined), std::get<0>(whole)), tolerance);
    EXPECT_LE(worst_row_error(last, std::get<1>(whole)), tolerance);
    expect_close(gradients(arguments, joined, weights, state_weights), expected, tolerance);
  }
}

// The end of a sequence of 102,400 steps or more in bf16 on a GPU, read in one part or in two.
// Tensor cores round the state that they multiply, so outputs differ by roundings of bf16 (2^-8).
inline void expect_long_sequence_cut_on_cuda(const Operator& op, const Named& given,
                                             const std::set<std::string>& sequences,
                                             double bf16_tolerance = 1e-2) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  Named whole;
  Named first;
  Named second;
  for (const auto& [name, tensor] : given) {
    whole[name] = tensor.to(at::kCUDA, name == "initial_state" ? at::kFloat : at::kBFloat16);
    first[name] = second[name] = whole[name];
    if (!sequences.contains(name) || tensor.dim() < 3) continue;  // a w [H, K] is constant
    const int64_t time = tensor.size(1);
    const int64_t cut = time / 2 + 19;
    first[name] = whole[name].narrow(1, 0, cut);
    second[name] = whole[name].narrow(1, cut, time - cut);
  }
  const auto [expected, last] = op(whole);
  second["initial_state"] = std::get<1>(op(first));
  const auto [out, end] = op(second);
  const at::Tensor tail = expected.slice(1, -64);
  EXPECT_LE(worst_row_error(out.slice(1, -64), tail, mean_row(tail) / 2), bf16_tolerance);
  EXPECT_LE(worst_row_error(end, last, mean_row(last)), 1e-2);
}

// A golden file whose in.* are the arguments; `output` names the first output, out.state is the
// second where it stands. Files that hold the gradient through the state too (grad_with_state.*)
// are held to it.
inline void expect_equal_to_golden(const std::string& name, const Operator& op,
                                   const std::string& output, double single = 1e-5) {
  SCOPED_TRACE(name);
  const Named golden = read_golden(golden_file(name));
  auto part = [&](const std::string& prefix) {
    Named found;
    for (const auto& [key, tensor] : golden)
      if (key.starts_with(prefix)) found[key.substr(prefix.size())] = tensor;
    return found;
  };
  for (const auto& [dtype, tolerance] : {std::pair{at::kDouble, 1e-12}, {at::kFloat, single}}) {
    SCOPED_TRACE(dtype);
    const Named arguments = leaves(part("in."), dtype);
    const Outputs out = op(arguments);
    EXPECT_LE(worst_row_error(std::get<0>(out), golden.at("out." + output)), tolerance);
    if (golden.contains("out.state"))
      EXPECT_LE(worst_row_error(std::get<1>(out), golden.at("out.state")), tolerance);
    if (golden.contains("cot." + output))
      expect_close(gradients(arguments, out, golden.at("cot." + output), {}), part("grad."),
                   tolerance);
    if (golden.contains("cot.state"))
      expect_close(gradients(arguments, out, golden.at("cot." + output), golden.at("cot.state")),
                   part("grad_with_state."), tolerance);
  }
}

// The error message of the operator for bad arguments; "no error" when it takes them.
inline std::string message_of(const Operator& op, const Named& arguments) {
  try {
    op(arguments);
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

}  // namespace assay::ops
