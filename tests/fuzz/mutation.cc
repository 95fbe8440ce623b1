#include "fuzz/mutation.h"

#include <cstring>
#include <nlohmann/json.hpp>

namespace assay::fuzz {
namespace {

using nlohmann::json;

const std::vector<uint64_t> kEdges = {0,          1,         127,        128,        255,
                                      256,        65535,     INT32_MAX,  1ull << 31, UINT32_MAX,
                                      1ull << 32, INT64_MAX, 1ull << 63, UINT64_MAX};

std::vector<json> make_replacements() {
  json deep = 1;
  for (int level = 0; level < 200; ++level) deep = json::array({deep});
  return {nullptr,
          true,
          0,
          -1,
          1e308,
          -0.5,
          INT64_MIN,
          UINT64_MAX,
          "",
          "x",
          "../x",
          "a/b",
          std::string(300, 'x'),
          "\u65e5\n\"",
          json::array(),
          json::object(),
          json::array({1, "a", nullptr}),
          {{"a", 1}},
          deep};
}

const std::vector<json>& replacements() {
  static const std::vector<json> all = make_replacements();
  return all;
}

// All values below `value`, itself included.
void collect(json& value, std::vector<json*>& found) {
  found.push_back(&value);
  if (value.is_structured())
    for (json& element : value) collect(element, found);
}

void rename_or_remove_key(json& object, Random& random) {
  auto entry = object.begin();
  std::advance(entry, random.below(object.size()));
  const std::string key = entry.key();
  json value = entry.value();
  object.erase(entry);
  if (random.below(2)) object[key + "x"] = std::move(value);
}

}  // namespace

std::string mutated_bytes(std::string input, Random& random) {
  for (uint64_t changes = 1 + random.below(4); changes > 0; --changes) {
    if (input.empty()) return std::string(random.below(20), char(random.below(256)));
    const size_t at = random.below(input.size());
    const size_t length = std::min<size_t>(1 + random.below(16), input.size() - at);
    const uint64_t edge = kEdges[random.below(kEdges.size())];
    switch (random.below(7)) {
      case 0:
        input[at] = char(input[at] ^ (1 << random.below(8)));
        break;
      case 1:
        input[at] = char(random.below(256));
        break;
      case 2:
        input.erase(at, length);
        break;
      case 3:
        input.insert(random.below(input.size()), input.substr(at, length));
        break;
      case 4:
        input.resize(at);
        break;
      case 5:
        std::memcpy(input.data() + at, &edge, std::min<size_t>(8, input.size() - at));
        break;
      default:
        input.insert(at, std::to_string(edge));
    }
  }
  return input;
}

std::string mutated_json(const std::string& input, Random& random) {
  json value = json::parse(input, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded() || random.below(4) == 0) return mutated_bytes(input, random);
  std::vector<json*> found;
  collect(value, found);
  json& chosen = *found[random.below(found.size())];
  if (chosen.is_object() && !chosen.empty() && random.below(2)) {
    rename_or_remove_key(chosen, random);
  } else if (chosen.is_array() && !chosen.empty() && random.below(2)) {
    const json copy = chosen[random.below(chosen.size())];
    chosen.push_back(copy);
  } else {
    chosen = replacements()[random.below(replacements().size())];
  }
  return value.dump();
}

}  // namespace assay::fuzz
