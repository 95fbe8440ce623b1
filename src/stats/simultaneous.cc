#include "stats/simultaneous.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>

#include "base/random.h"
#include "stats/student.h"

namespace assay::stats {
namespace {

constexpr double kLargestError = 0.007;  // standard error of a factor, as a share of it

// Quantiles of Student's t from a table over 1 / v, because a quantile is needed for every draw.
class Quantiles {
 public:
  explicit Quantiles(double level) {
    for (size_t i = 0; i <= kSteps; ++i)
      table_.push_back(student_quantile(level, double(kSteps) / std::max<double>(double(i), 1e-3)));
  }
  double operator()(double freedom) const {
    const double at = std::clamp(1 / freedom, 0.0, 1.0) * kSteps;
    const size_t below = std::min<size_t>(size_t(at), kSteps - 1);
    return table_[below] + (at - double(below)) * (table_[below + 1] - table_[below]);
  }

 private:
  static constexpr size_t kSteps = 256;
  std::vector<double> table_;
};

const Quantiles& quantiles(double level) {
  static thread_local std::map<double, Quantiles> tables;
  return tables.try_emplace(level, level).first->second;
}

// A gamma variable of any shape [Marsaglia & Tsang, ACM TOMS 2000].
double gamma(Random& random, double shape) {
  if (shape < 1) {
    const double boost = std::pow(1 - random.uniform(), 1 / shape);
    return boost * gamma(random, shape + 1);
  }
  const double d = shape - 1.0 / 3;
  const double c = 1 / std::sqrt(9 * d);
  while (true) {
    const double x = random.normal();
    const double v = std::pow(1 + c * x, 3);
    if (v <= 0) continue;
    if (std::log1p(-random.uniform()) < x * x / 2 + d - d * v + d * std::log(v)) return d * v;
  }
}

// Draws are columns of numbers that depend on the column's index only. They are kept, because the
// same ones serve every call.
const std::vector<double>& normal_column(size_t column, size_t draws) {
  static thread_local std::map<std::pair<size_t, size_t>, std::vector<double>> columns;
  auto& values = columns[{column, draws}];
  if (!values.empty()) return values;
  Random random(1, "simultaneous intervals: normal", column);
  for (size_t draw = 0; draw < draws; ++draw) values.push_back(random.normal());
  return values;
}

// Estimated over true variance: chi-square over its degrees of freedom.
const std::vector<double>& relative_variance_column(size_t column, double freedom, size_t draws) {
  static thread_local std::map<std::tuple<size_t, double, size_t>, std::vector<double>> columns;
  if (columns.size() > 64) columns.clear();
  auto& values = columns[{column, freedom, draws}];
  if (!values.empty()) return values;
  Random random(1, "simultaneous intervals: chi-square", column);
  for (size_t draw = 0; draw < draws; ++draw)
    values.push_back(2 * gamma(random, freedom / 2) / freedom);
  return values;
}

// The lower triangle L with L L' = matrix; rows without variance left are zero.
std::vector<std::vector<double>> cholesky(const std::vector<std::vector<double>>& matrix) {
  auto lower = matrix;
  for (size_t i = 0; i < matrix.size(); ++i)
    for (size_t j = 0; j <= i; ++j) {
      double rest = matrix[i][j];
      for (size_t k = 0; k < j; ++k) rest -= lower[i][k] * lower[j][k];
      if (i == j) lower[i][i] = std::sqrt(std::max(0.0, rest));
      else lower[i][j] = lower[j][j] > 1e-9 ? rest / lower[j][j] : 0;
    }
  return lower;
}

// Student's reach of one member in one draw: t_v sqrt(V) with V and v as in interval().
double reach(const std::vector<double>& seeds, Variance documents,
             const std::vector<double>& freedom, const Quantiles& quantile) {
  double value = 0;
  double square = 0;
  for (size_t e = 0; e < seeds.size(); ++e) {
    value += seeds[e];
    square += seeds[e] * seeds[e] / freedom[e];
  }
  const double variance = value + documents.value;
  if (!(variance > 0)) return 0;
  const double of_documents = documents.value / variance;
  const double of_seeds = value > 0 ? square / (value * variance) : 0;
  const double inverse = of_seeds + of_documents * of_documents / documents.freedom;
  return quantile(1 / inverse) * std::sqrt(variance);
}

}  // namespace

Variance seed_variance(const Member& member, const std::vector<double>& freedom) {
  std::vector<double> by_estimator(freedom.size());
  for (const Noise& noise : member.seeds)
    by_estimator[noise.estimator] += noise.amplitude * noise.amplitude;
  std::vector<Variance> parts;
  for (size_t e = 0; e < freedom.size(); ++e)
    if (by_estimator[e] > 0) parts.push_back({by_estimator[e], freedom[e]});
  return sum(parts);
}

namespace {

// max |T_a| / t_a over the members, by draw, in ascending order.
std::vector<double> largest_ratios(const Family& family, double level, size_t draws) {
  const size_t members = family.members.size();
  size_t sources = 0;
  for (const Member& member : family.members)
    for (const Noise& noise : member.seeds) sources = std::max(sources, noise.source + 1);
  const auto link = cholesky(family.document_link);
  const Quantiles& quantile = quantiles(level);
  using Column = const std::vector<double>*;
  std::vector<Column> noise;
  std::vector<Column> document_noise;
  for (size_t k = 0; k < sources; ++k) noise.push_back(&normal_column(2 * k, draws));
  for (size_t a = 0; a < members; ++a) document_noise.push_back(&normal_column(2 * a + 1, draws));
  const size_t estimators = family.freedom.size();
  // The documents are the same for all members, so their variances are wrong together. Their
  // degrees of freedom are rounded, so that the same column serves many calls.
  const double document_freedom = std::round(8 * family.members[0].documents.freedom) / 8;
  const std::vector<double> relative_documents =
      relative_variance_column(0, std::max(1.0, document_freedom), draws);
  const std::vector<std::vector<double>> relative = [&] {
    std::vector<std::vector<double>> columns;
    for (size_t e = 0; e < estimators; ++e)
      columns.push_back(relative_variance_column(e + 1, family.freedom[e], draws));
    return columns;
  }();
  std::vector<double> seeds(estimators);
  std::vector<double> largest;
  for (size_t draw = 0; draw < draws; ++draw) {
    double worst = 0;
    for (size_t a = 0; a < members; ++a) {
      const Member& member = family.members[a];
      double error = 0;
      for (size_t k = 0; k <= a; ++k) error += link[a][k] * (*document_noise[k])[draw];
      error *= std::sqrt(member.documents.value);
      std::ranges::fill(seeds, 0.0);
      for (const Noise& part : member.seeds) {
        error += part.amplitude * (*noise[part.source])[draw];
        seeds[part.estimator] += part.amplitude * part.amplitude * relative[part.estimator][draw];
      }
      const Variance documents{member.documents.value * relative_documents[draw],
                               member.documents.freedom};
      const double half_width = reach(seeds, documents, family.freedom, quantile);
      if (half_width > 0) worst = std::max(worst, std::abs(error) / half_width);
    }
    largest.push_back(worst);
  }
  std::ranges::sort(largest);
  return largest;
}

}  // namespace

double simultaneous_factor(const Family& family, double level, size_t draws) {
  if (family.members.size() < 2) return 1;
  for (const size_t most = 16 * draws;; draws *= 4) {
    const std::vector<double> largest = largest_ratios(family, level, draws);
    const auto rank = size_t(level * double(draws));
    const double factor = std::max(1.0, largest[rank]);
    // The rank of the true quantile has a binomial distribution
    const auto error_of_rank = size_t(std::sqrt(level * (1 - level) * double(draws)));
    const size_t high = std::min(rank + error_of_rank, draws - 1);
    const double error = (largest[high] - largest[rank - error_of_rank]) / 2;
    if (error <= kLargestError * factor || draws == most) return factor;
  }
}

}  // namespace assay::stats
