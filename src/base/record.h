#pragma once
// Typed JSON. A record is a struct that lists its keys once; that list serves reading and writing.
//
//   struct Outcome {
//     int64_t steps = 0;
//     std::optional<double> held_out_loss;
//     ASSAY_FIELDS(steps, held_out_loss)
//   };
//
// A key is the name of its member; for others, a record has a function
// `void fields(auto&& field) { field("2048", at_short); … }`.
// A member is a bool, int64_t, double or std::string, a record, or a std::vector, std::map by
// std::string or std::optional of these. A double that is not finite is null. An empty optional has
// no key. Keys that a record does not list are ignored.
#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/files.h"
#include "base/json.h"

namespace assay {

#define ASSAY_FIELDS(...) \
  void fields(auto&& field) { assay::call_with_names(field, #__VA_ARGS__, __VA_ARGS__); }

// ASSAY_FIELDS for a record with a base class: its fields follow those of the base class.
#define ASSAY_MORE_FIELDS(Base, ...)                          \
  void fields(auto&& field) {                                 \
    Base::fields(field);                                      \
    assay::call_with_names(field, #__VA_ARGS__, __VA_ARGS__); \
  }

// field("a", a), field("b", b) for the names "a, b".
template <class... Members>
void call_with_names(auto&& field, std::string_view names, Members&... members) {
  const auto next = [&] {
    const std::string_view name = names.substr(0, names.find(','));
    names.remove_prefix(std::min(names.size(), name.size() + 2));
    return name;
  };
  (field(next(), members), ...);
}

template <class T>
concept Record = requires(T& record) { record.fields([](std::string_view, auto&) {}); };

// The problem of a value, and where the value is in its document ("sets.arxiv.test.loss").
struct RecordError {
  std::string place;
  std::string problem;

  // The value is inside of `key`.
  void move_into(const std::string& key) { place = key + (place.empty() ? "" : "." + place); }
};

class RecordReader {
 public:
  using Json = nlohmann::json;

  static void read(const Json& json, bool& out) {
    expect(json.is_boolean(), "true or false");
    out = json.get<bool>();
  }
  static void read(const Json& json, int64_t& out) {  // 1e6 is an integer, too
    constexpr double kTooLarge = 0x1p63;
    expect(json.is_number() && std::abs(json.get<double>()) < kTooLarge, "an integer");
    out = json.get<int64_t>();
    expect(json.get<double>() == double(out), "an integer");
  }
  static void read(const Json& json, double& out) {
    expect(json.is_number() || json.is_null(), "a number");
    out = json.is_null() ? std::numeric_limits<double>::quiet_NaN() : json.get<double>();
  }
  static void read(const Json& json, std::string& out) {
    expect(json.is_string(), "a string");
    out = json.get<std::string>();
  }
  template <class T>
  static void read(const Json& json, std::optional<T>& out) {
    read(json, out.emplace());
  }
  template <class T>
  static void read(const Json& json, std::vector<T>& out) {
    expect(json.is_array(), "a list");
    out.clear();
    out.reserve(json.size());
    for (const Json& element : json)
      within([&] { return std::to_string(out.size() - 1); },
             [&] { read(element, out.emplace_back()); });
  }
  template <class T>
  static void read(const Json& json, std::map<std::string, T>& out) {
    expect(json.is_object(), "an object");
    out.clear();
    for (const auto& [key, value] : json.items())
      within([&] { return key; }, [&] { read(value, out[key]); });
  }
  template <Record T>
  static void read(const Json& json, T& out) {
    expect(json.is_object(), "an object");
    out.fields([&](std::string_view key, auto& member) {
      within([&] { return std::string(key); }, [&] { read_member(json, key, member); });
    });
  }

 private:
  static void expect(bool good, const char* expected) {
    if (!good) throw RecordError{"", fmt::format("must be {}", expected)};
  }
  template <class T>
  static void read_member(const Json& json, std::string_view key, T& member) {
    const auto found = json.find(key);
    if (found != json.end()) return read(*found, member);
    constexpr bool is_optional = requires { member.has_value(); };
    if constexpr (is_optional) member.reset();
    else throw RecordError{"", "is missing"};
  }
  template <class Key, class Read>
  static void within(Key&& key, Read&& read) try {
    read();
  } catch (RecordError& error) {
    error.move_into(key());
    throw;
  }
};

// The record in a JSON value. BadInput names `source` and the key.
template <class T>
T from_json(const nlohmann::json& json, const std::string& source) try {
  T out{};
  RecordReader::read(json, out);
  return out;
} catch (const RecordError& error) {
  if (error.place.empty()) fail("{}: {}", source, error.problem);
  fail("{}: the key '{}' {}", source, error.place, error.problem);
}

template <class T>
nlohmann::json to_json(const T& value) {
  if constexpr (Record<T>) {
    nlohmann::json out = nlohmann::json::object();
    const_cast<T&>(value).fields([&](std::string_view key, const auto& member) {  // changes nothing
      if constexpr (requires { member.has_value(); }) {
        if (member) out[std::string(key)] = to_json(*member);
      } else {
        out[std::string(key)] = to_json(member);
      }
    });
    return out;
  } else if constexpr (requires { typename T::mapped_type; }) {
    nlohmann::json out = nlohmann::json::object();
    for (const auto& [key, element] : value) out[key] = to_json(element);
    return out;
  } else if constexpr (requires { value.begin(); } && !std::convertible_to<T, std::string>) {
    nlohmann::json out = nlohmann::json::array();
    for (const auto& element : value) out.push_back(to_json(element));
    return out;
  } else {
    return value;
  }
}

template <class T>
T parse_record(std::string_view text, const std::string& source) {
  return from_json<T>(parse_json(text, source), source);
}
template <class T>
T read_record(const fs::path& file) {
  return parse_record<T>(read_file(file), file.string());
}

}  // namespace assay
