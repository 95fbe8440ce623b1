#pragma once
// Ladders and contenders whose differences are known by hand.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "stats/ladder.h"

namespace assay::stats {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A run whose four clusters of 100 targets have the given loss, 20 of them recall targets.
inline End end(int64_t seed, double held_out, double loss, double recall = 2) {
  EndLosses losses;
  for (const double shift : {-0.02, 0.01, 0.03, -0.02}) {
    losses.tokens.push_back(100);
    losses.recall_tokens.push_back(20);
    losses.nll.push_back(100 * (loss + shift));
    losses.recall_nll.push_back(20 * recall);
  }
  return {seed, held_out, {{"arxiv", losses}, {"github", losses}}};
}

// Two seeds around (held_out, loss).
inline Budget budget(double tokens, double held_out, double loss, double spread = 0.01,
                     double recall = 2) {
  return {tokens,
          {end(1, held_out - 0.01, loss - 0.01 + spread, recall),
           end(2, held_out + 0.01, loss + 0.01 - spread, recall)}};
}

// f(h) = h + 0.5, so that every difference is known by hand.
inline std::vector<Budget> straight_ladder(double spread = 0.01) {
  return {budget(10e6, 4.0, 4.5, spread), budget(20e6, 3.6, 4.1, spread),
          budget(40e6, 3.3, 3.8, spread), budget(80e6, 3.1, 3.6, spread)};
}

inline Contender contender(double held_out, double delta, double spread = 0.01,
                           double tokens = 40e6) {
  return {"x", {budget(tokens, held_out, held_out + 0.5 + delta, spread)}};
}

inline EndResult only(const LadderResult& result) {
  EXPECT_EQ(result.problem, "");
  EXPECT_EQ(result.results.size(), 1u);
  return result.results.at(0);
}

inline std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const BadInput& error) {
    return error.what();
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace assay::stats
