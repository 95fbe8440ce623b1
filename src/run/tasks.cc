#include "run/tasks.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string_view>

#include "base/error.h"

namespace assay::run {
namespace {

constexpr std::string_view kDigits = "0123456789abcdef";
constexpr std::string_view kBitsPerByte = "bits_per_byte";

}  // namespace

std::string bits_of(const std::vector<double>& values) {
  std::string out;
  for (size_t begin = 0; begin < values.size(); begin += 4) {
    size_t digit = 0;
    for (size_t i = begin; i < begin + 4; ++i)
      digit = 2 * digit + size_t(i < values.size() && values[i] > 0);
    out += kDigits[digit];
  }
  return out;
}

std::vector<double> values_of(const std::string& bits, int64_t items) {
  if (items < 0 || 4 * int64_t(bits.size()) < items)
    fail("results of a task have {} items and only {} bits", items, 4 * bits.size());
  std::vector<double> out;
  out.reserve(size_t(items));
  for (int64_t i = 0; i < items; ++i) {
    const size_t digit = kDigits.find(bits[size_t(i / 4)]);
    if (digit == std::string_view::npos)
      fail("results of a task hold '{}', which is not a hexadecimal digit", bits[size_t(i / 4)]);
    out.push_back(double(digit >> (3 - i % 4) & 1));
  }
  return out;
}

bool is_likelihood(const std::string& metric) {
  return metric.ends_with("perplexity") || metric == kBitsPerByte;
}

double likelihood_metric(const std::string& metric, double mean) {
  return metric == kBitsPerByte ? -mean / std::numbers::ln2 : std::exp(-mean);
}

double likelihood_difference(const std::string& metric, double difference) {
  return metric == kBitsPerByte ? -difference / std::numbers::ln2 : -difference;
}

std::vector<double> block_sums(const std::vector<double>& values) {
  const auto count = std::min<int64_t>(TaskMetric::kBlocks, int64_t(values.size()));
  std::vector<double> out(size_t(count), 0.0);
  for (size_t i = 0; i < values.size(); ++i) out[i * size_t(count) / values.size()] += values[i];
  for (double& sum : out) sum = std::stod(fmt::format("{:.7g}", sum));
  return out;
}

}  // namespace assay::run
