#include "study/compact.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"

namespace assay::study {
namespace {

using Json = nlohmann::json;
using Integers = std::vector<int64_t>;

constexpr std::string_view kDigits =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
constexpr int kMostDecimals = 9;
constexpr double kLargest = 0x1p50;    // of the integers
constexpr int64_t kLongest = 1 << 20;  // elements of a list
constexpr const char* kIndex = "";     // names, or the length, of what became columns
constexpr const char* kLists = "columns";
constexpr const char* kItself = "=";
constexpr const char* kElements = "*";

std::string text_of(const Integers& values) {
  std::string out;
  for (const int64_t value : values) {
    uint64_t rest = uint64_t(std::abs(value)) << 1 | uint64_t(value < 0);
    do {
      const uint64_t digit = rest & 31;
      rest >>= 5;
      out += kDigits[digit | (rest > 0 ? 32 : 0)];
    } while (rest > 0);
  }
  return out;
}

Integers integers_of(std::string_view text) {
  Integers out;
  uint64_t value = 0;
  int shift = 0;
  for (const char c : text) {
    const size_t digit = kDigits.find(c);
    if (digit == std::string_view::npos || shift > 55) fail("'{}' is not a list of numbers", text);
    value |= uint64_t(digit & 31) << shift;
    shift += 5;
    if (digit & 32) continue;
    const auto size = int64_t(value >> 1);
    out.push_back(value & 1 ? -size : size);
    value = 0;
    shift = 0;
  }
  if (shift > 0) fail("'{}' ends inside of a number", text);
  return out;
}

bool all(const Json& value, auto&& condition) {
  return value.is_array() && std::all_of(value.begin(), value.end(), condition);
}
bool is_numbers(const Json& value) {
  return value.size() > 1 && all(value, [](const Json& one) { return one.is_number(); });
}
bool is_structures(const Json& value) {
  return !value.empty() && all(value, [](const Json& one) { return one.is_structured(); });
}
bool is_texts(const Json& value) {
  return !value.empty() && all(value, [](const Json& one) { return one.is_string(); });
}

Integers scaled(const Json& values, int decimals) {
  Integers out;
  for (const Json& value : values) {
    const double number = value.get<double>() * std::pow(10.0, decimals);
    out.push_back(std::llround(std::clamp(number, -kLargest, kLargest)));
  }
  return out;
}

// The fewest decimals that say the numbers exactly.
std::optional<int> decimals_of(const Json& values) {
  const auto has = [](double value, int decimals) {
    const double scale = std::pow(10.0, decimals);
    return std::abs(value * scale) < kLargest && std::round(value * scale) / scale == value;
  };
  for (int decimals = 0; decimals <= kMostDecimals; ++decimals)
    if (all(values, [&](const Json& one) { return has(one.get<double>(), decimals); }))
      return decimals;
  return std::nullopt;
}

bool has_keys_of(const Json& first, const Json& value) {
  if (!value.is_object() || value.empty() || value.size() != first.size()) return false;
  for (const auto& [key, one] : value.items())
    if (!first.contains(key)) return false;
  return true;
}
bool have_equal_keys(const std::vector<const Json*>& values) {
  if (values.size() < 2) return false;
  for (const Json* one : values)
    if (!has_keys_of(*values[0], *one)) return false;
  return true;
}

Json columns(const Json& value);

Json columns_of(const std::vector<const Json*>& values, const Json& index) {
  Json out{{kIndex, index}};
  for (const auto& [key, first] : values[0]->items()) {
    Json column = Json::array();
    for (const Json* one : values) column.push_back(one->at(key));
    out[key] = columns(column);
  }
  return out;
}

Json columns(const Json& value) {
  if (!value.is_structured()) return value;
  std::vector<const Json*> elements;
  for (const Json& one : value) elements.push_back(&one);
  if (value.is_object()) {
    Json names = Json::array();
    for (const auto& [key, one] : value.items()) names.push_back(key);
    if (have_equal_keys(elements)) return columns_of(elements, names);
    Json out = Json::object();
    for (const auto& [key, one] : value.items()) out[key] = columns(one);
    return out;
  }
  if (have_equal_keys(elements)) return columns_of(elements, value.size());
  const auto as_first = [&](const Json& one) {
    return one.is_array() && !one.empty() && one.size() == value[0].size();
  };
  Json out = Json::array();
  if (value.size() < 2 || !all(value, as_first)) {
    for (const Json& one : value) out.push_back(columns(one));
    return out;
  }
  for (size_t i = 0; i < value[0].size(); ++i) {
    Json column = Json::array();
    for (const Json& one : value) column.push_back(one[i]);
    out.push_back(columns(column));
  }
  return {{kIndex, value.size()}, {kLists, out}};
}

// The element `at` of every column.
Json row_of(const Json& columns, size_t at) {
  Json out = columns.is_object() ? Json::object() : Json::array();
  for (const auto& [key, column] : columns.items()) {
    if (key == kIndex && columns.is_object()) continue;
    if (columns.is_object()) out[key] = column.at(at);
    else out.push_back(column.at(at));
  }
  return out;
}

Json rows(const Json& value) {
  if (!value.is_structured()) return value;
  Json inner = value.is_object() ? Json::object() : Json::array();
  for (const auto& [key, one] : value.items()) {
    if (value.is_array()) inner.push_back(rows(one));
    else inner[key] = key == kIndex ? one : rows(one);
  }
  if (!value.is_object() || !value.contains(kIndex)) return inner;
  const Json& index = value[kIndex];
  const bool lists = inner.size() == 2 && inner.contains(kLists);
  const Json& source = lists ? inner[kLists] : inner;
  Json out = index.is_array() ? Json::object() : Json::array();
  const size_t count = index.is_array() ? index.size() : index.get<size_t>();
  if (count > size_t(kLongest)) fail("a list of {} elements", count);
  for (size_t i = 0; i < count; ++i) {
    if (index.is_array()) out[index[i].get<std::string>()] = row_of(source, i);
    else out.push_back(row_of(source, i));
  }
  return out;
}

Json compact_numbers(const Json& own, const Json& shared) {
  const auto decimals = decimals_of(own);
  if (!decimals) return own;
  const Integers values = scaled(own, *decimals);
  Integers steps{values[0]};
  for (size_t i = 1; i < values.size(); ++i) steps.push_back(values[i] - values[i - 1]);
  if (steps.size() > 3 &&
      std::all_of(steps.begin() + 1, steps.end(), [&](int64_t step) { return step == steps[1]; }))
    return fmt::format("+{}{}", *decimals, text_of({steps[0], steps[1], int64_t(values.size())}));
  const std::string by_steps = text_of(steps);
  if (is_numbers(shared) && shared.size() == own.size()) {
    const Integers others = scaled(shared, *decimals);
    Integers differences{0};
    int64_t sum = 0;
    for (size_t i = 0; i < values.size(); ++i) sum += values[i] - others[i];
    differences[0] = sum / int64_t(values.size());
    for (size_t i = 0; i < values.size(); ++i)
      differences.push_back(values[i] - others[i] - differences[0]);
    const std::string by_difference = text_of(differences);
    if (by_difference.size() <= by_steps.size())
      return fmt::format("={}{}", *decimals, by_difference);
  }
  return fmt::format("~{}{}", *decimals, by_steps);
}

Json expand_numbers(std::string_view text, const Json& shared) {
  const int decimals = text.size() > 1 ? text[1] - '0' : -1;
  if (decimals < 0 || decimals > kMostDecimals) fail("'{}' is not a list of numbers", text);
  Integers values = integers_of(text.substr(2));
  if (text[0] == '=') {
    if (!is_numbers(shared) || shared.size() + 1 != values.size())
      fail("'{}' has {} numbers, and the shared list has {}", text, values.size(), shared.size());
    const Integers others = scaled(shared, decimals);
    const int64_t mean = values[0];
    values.erase(values.begin());
    for (size_t i = 0; i < values.size(); ++i) values[i] += others[i] + mean;
  } else if (text[0] == '+') {
    if (values.size() != 3 || values[2] < 0 || values[2] > kLongest)
      fail("'{}' is not a list of numbers", text);
    const Integers parts = std::exchange(values, {});
    for (int64_t i = 0; i < parts[2]; ++i) values.push_back(parts[0] + i * parts[1]);
  } else {
    for (size_t i = 1; i < values.size(); ++i) values[i] += values[i - 1];
  }
  if (decimals == 0) return values;
  Json out = Json::array();
  for (const int64_t value : values) out.push_back(double(value) / std::pow(10.0, decimals));
  return out;
}

Json compact_lines(const Json& own, const Json& shared) {
  Json out = Json::array();
  for (const Json& line : own) {
    if (!out.empty() && out.back().is_array()) {
      const size_t next = out.back()[0].get<size_t>() + out.back()[1].get<size_t>();
      if (next < shared.size() && shared[next] == line) {
        out.back()[1] = out.back()[1].get<size_t>() + 1;
        continue;
      }
    }
    const auto found = std::find(shared.begin(), shared.end(), line);
    if (found == shared.end()) out.push_back(line);
    else out.push_back({found - shared.begin(), 1});
  }
  return out;
}

Json expand_lines(const Json& lines, const Json& shared) {
  Json out = Json::array();
  for (const Json& line : lines) {
    if (line.is_string()) {
      out.push_back(line);
      continue;
    }
    const size_t first = line.at(0).get<size_t>();
    for (size_t i = 0; i < line.at(1).get<size_t>(); ++i) out.push_back(shared.at(first + i));
  }
  return out;
}

bool marked(const Json& value) {
  if (!value.is_string()) return false;
  const auto& text = value.get_ref<const std::string&>();
  return !text.empty() && std::string_view("=~+").find(text[0]) != std::string_view::npos;
}

Json differences(const Json& own, const Json& shared) {
  if (own.is_object()) {
    Json out = Json::object();
    for (const auto& [key, value] : own.items()) {
      const bool known = shared.is_object() && shared.contains(key);
      if (known && shared[key] == value) continue;
      out[key] = differences(value, known ? shared[key] : Json());
    }
    if (shared.is_object())
      for (const auto& [key, value] : shared.items())
        if (!own.contains(key)) out[key] = nullptr;
    return out;
  }
  if (is_numbers(own)) return compact_numbers(own, shared);
  if (is_structures(own)) {
    const bool alike = is_structures(shared) && shared.size() == own.size();
    Json out = Json::array();
    for (size_t i = 0; i < own.size(); ++i)
      out.push_back(differences(own[i], alike ? shared[i] : Json()));
    return {{kElements, out}};
  }
  if (is_texts(own) && is_texts(shared)) return compact_lines(own, shared);
  const bool looks_like_lines = own.is_array() && is_texts(shared);
  if (own.is_null() || marked(own) || looks_like_lines) return {{kItself, own}};
  return own;
}

Json together(const Json& text, const Json& shared) {
  if (marked(text)) return expand_numbers(text.get_ref<const std::string&>(), shared);
  if (text.is_array() && is_texts(shared)) return expand_lines(text, shared);
  if (!text.is_object()) return text;
  if (text.size() == 1 && text.contains(kItself)) return text[kItself];
  if (text.size() == 1 && text.contains(kElements)) {
    const Json& elements = text[kElements];
    const bool alike = is_structures(shared) && shared.size() == elements.size();
    Json out = Json::array();
    for (size_t i = 0; i < elements.size(); ++i)
      out.push_back(together(elements.at(i), alike ? shared[i] : Json()));
    return out;
  }
  Json out = shared.is_object() ? shared : Json::object();
  for (const auto& [key, value] : text.items()) {
    if (value.is_null()) out.erase(key);
    else out[key] = together(value, out.contains(key) ? out[key] : Json());
  }
  return out;
}

}  // namespace

Json compact(const Json& value, const Json& shared) {
  return differences(columns(value), columns(shared));
}

Json expand(const Json& text, const Json& shared) {
  try {
    return rows(together(text, columns(shared)));
  } catch (const Json::exception& error) {
    fail("The record does not belong to this shared record: {}", error.what());
  }
}

}  // namespace assay::study
