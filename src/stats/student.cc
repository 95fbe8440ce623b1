#include "stats/student.h"

#include <cmath>
#include <initializer_list>

namespace assay::stats {
namespace {

// The continued fraction of the incomplete beta function, by the modified method of Lentz; it
// converges fast for x < (a + 1) / (a + b + 2).
double beta_fraction(double a, double b, double x) {
  constexpr double tiny = 1e-300;
  const auto away_from_zero = [](double value) { return std::abs(value) < tiny ? tiny : value; };
  double c = 1;
  double d = 1 / away_from_zero(1 - (a + b) * x / (a + 1));
  double fraction = d;
  for (int m = 1; m < 100000; ++m) {
    double last = 1;
    for (const double term : {m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
                              -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))}) {
      d = 1 / away_from_zero(1 + term * d);
      c = away_from_zero(1 + term / c);
      fraction *= last = c * d;
    }
    if (std::abs(last - 1) < 1e-15) break;
  }
  return fraction;
}

// I_x(a, b), the regularised incomplete beta function; `rest` is 1 − x, given apart because it
// may be tiny.
double incomplete_beta(double a, double b, double x, double rest) {
  if (x <= 0) return 0;
  if (rest <= 0) return 1;
  const double front = std::exp(std::lgamma(a + b) - std::lgamma(a) - std::lgamma(b) +
                                a * std::log(x) + b * std::log(rest));
  if (x < (a + 1) / (a + b + 2)) return front * beta_fraction(a, b, x) / a;
  return 1 - front * beta_fraction(b, a, rest) / b;
}

}  // namespace

double student_two_sided(double t, double freedom) {
  const double square = t * t;
  return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + square),
                         square / (freedom + square));
}

double student_quantile(double level, double freedom) {
  double low = 0;
  double high = 1;
  while (student_two_sided(high, freedom) > 1 - level) {
    low = high;
    high *= 2;
  }
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (student_two_sided(middle, freedom) > 1 - level ? low : high) = middle;
  }
  return (low + high) / 2;
}

}  // namespace assay::stats
