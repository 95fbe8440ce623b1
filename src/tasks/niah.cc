#include "tasks/niah.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/random.h"
#include "data/bytes.h"
#include "tasks/matching.h"
#include "tasks/text.h"

namespace assay::tasks {
namespace {

constexpr const char* kLine =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

constexpr std::array kAdjectives = {
    "amber",   "ancient", "brave",  "bright",  "broken", "calm",   "careful", "clever", "cold",
    "crimson", "curly",   "deep",   "distant", "dusty",  "eager",  "early",   "empty",  "faint",
    "famous",  "fierce",  "frozen", "gentle",  "golden", "grand",  "happy",   "heavy",  "hidden",
    "hollow",  "honest",  "humble", "icy",     "jolly",  "keen",   "late",    "lively", "lonely",
    "loud",    "lucky",   "mellow", "mighty",  "misty",  "modern", "narrow",  "noble",  "odd",
    "pale",    "patient", "plain",  "polite",  "proud",  "quick",  "quiet",   "rapid",  "rough",
    "royal",   "rusty",   "salty",  "sharp",   "shy",    "silent", "silver",  "simple", "sleepy",
    "slow",    "smooth",  "solid",  "spicy",   "steep",  "stormy", "strange", "sunny",  "sweet",
    "tall",    "tender",  "thick",  "tiny",    "tired",  "tough",  "velvet",  "warm",   "weary",
    "wild",    "wise",    "wooden", "young",   "zealous"};
constexpr std::array kNouns = {
    "anchor", "apple",   "arrow",    "barrel",  "basket",  "beacon",  "bell",   "bird",
    "bottle", "branch",  "bridge",   "bucket",  "button",  "cabin",   "camera", "candle",
    "canyon", "carpet",  "castle",   "chair",   "cherry",  "circle",  "clock",  "cloud",
    "coin",   "copper",  "corner",   "cotton",  "cradle",  "desert",  "diary",  "dragon",
    "engine", "falcon",  "farmer",   "feather", "fence",   "ferry",   "flute",  "forest",
    "garden", "glacier", "hammer",   "harbour", "helmet",  "island",  "jacket", "journey",
    "kettle", "ladder",  "lantern",  "lemon",   "library", "magnet",  "market", "meadow",
    "mirror", "monkey",  "mountain", "needle",  "ocean",   "orchard", "paddle", "painter",
    "palace", "pencil",  "pepper",   "piano",   "pillow",  "planet",  "pocket", "rabbit",
    "ribbon", "river",   "rocket",   "saddle",  "sailor",  "shadow",  "spoon",  "station",
    "stone",  "temple",  "ticket",   "tiger",   "tower",   "tunnel",  "valley", "village",
    "violin", "window"};

std::string random_key(Random& random) {
  return fmt::format("{}-{}", kAdjectives[random.below(kAdjectives.size())],
                     kNouns[random.below(kNouns.size())]);
}

std::string random_value(Random& random, int variant) {
  if (variant < 3) return std::to_string(1'000'000 + random.below(9'000'000));
  const uint64_t high = (random.next() & ~uint64_t{0xF000}) | 0x4000;  // version 4
  const uint64_t low = (random.next() & ~(uint64_t{3} << 62)) | uint64_t{2}
                                                                    << 62;  // variant of RFC 9562
  return fmt::format("{:08x}-{:04x}-{:04x}-{:04x}-{:012x}", high >> 32, high >> 16 & 0xFFFF,
                     high & 0xFFFF, low >> 48, low & 0xFFFFFFFFFFFF);
}

const char* singular(int variant) { return variant < 3 ? "number" : "uuid"; }

// The first `count` words of the text, which begins again where it ends.
std::string words_of(const std::string& haystack, int64_t count) {
  const std::vector<std::string> words = split(haystack, "");
  if (words.empty()) fail("the haystack holds no words");
  std::string out;
  for (int64_t i = 0; i < count; ++i) out += (i ? " " : "") + words[size_t(i) % words.size()];
  return out;
}

std::string context_of(const NiahOptions& options, int64_t units, int64_t place,
                       const std::string& needle) {
  std::vector<std::string> parts;
  if (options.variant == 1) parts.assign(size_t(units), kLine);
  else parts = sentences(words_of(options.haystack, units));
  parts.insert(parts.begin() + std::min<int64_t>(place, int64_t(parts.size())), needle);
  return join(parts, options.variant == 1 ? "\n" : " ");
}

int64_t step_of(const NiahOptions& options) {
  return options.variant > 1 ? 500 : options.length < 4096 ? 5 : 25;
}

int64_t place_of(const NiahOptions& options, int64_t units, double depth) {
  if (options.variant == 1) return std::min<int64_t>(units - 1, int64_t(double(units) * depth));
  return int64_t(double(sentences(words_of(options.haystack, units)).size()) * depth);
}

}  // namespace

std::string read_haystack(const fs::path& file) {
  const auto source = data::open_bytes(file);
  constexpr size_t kMost = size_t{64} << 20;
  std::string text;
  std::string block(1 << 20, '\0');
  while (text.size() < kMost) {
    const size_t count = source->read(block.data(), block.size());
    if (count == 0) break;
    text.append(block, 0, count);
  }
  if (text.size() >= kMost) text.erase(text.find_last_of(" \n") + 1);  // the last word can be cut
  if (!data::is_utf8(text)) fail("{}: the text is not valid UTF-8", file.string());
  if (file.string().find(".jsonl") == std::string::npos) return text;
  const Json document =
      Json::parse(text.substr(0, text.find('\n')), nullptr, /*allow_exceptions=*/false);
  if (!document.is_object() || !document.contains("text") || !document["text"].is_string())
    fail("{}:1: not a JSON object with a 'text'", file.string());
  return document["text"];
}

std::vector<std::string> sentences(const std::string& text) {
  std::vector<std::string> out;
  std::string current;
  for (const std::string& word : split(text, "")) {
    current += (current.empty() ? "" : " ") + word;
    const size_t last = word.find_last_not_of("\"')]");
    if (last == std::string::npos || (word[last] != '.' && word[last] != '!' && word[last] != '?'))
      continue;
    out.push_back(std::move(current));
    current.clear();
  }
  if (!current.empty()) out.push_back(current);
  return out;
}

NeedleSample needle_sample(const NiahOptions& options, int64_t units, int64_t place,
                           const std::string& key, const std::string& value) {
  const std::string type = singular(options.variant);
  const std::string needle =
      fmt::format("One of the special magic {}s for {} is: {}.", type, key, value);
  NeedleSample sample;
  sample.key = key;
  sample.answer = value;
  sample.units = units;
  sample.prompt = fmt::format(
      "A special magic {0} is hidden within the following text. Make sure to memorize it. "
      "I will quiz you about the {0} afterwards.\n{1}\n"
      "What is the special magic {0} for {2} mentioned in the provided text? "
      "The special magic {0} for {2} mentioned in the provided text is",
      type, context_of(options, units, place, needle), key);
  return sample;
}

int64_t haystack_units(const NiahOptions& options, const CountTokens& count) {
  Random random(options.seed, "niah length");
  const std::string key = random_key(random);
  const std::string value = random_value(random, options.variant);
  const auto tokens = [&](int64_t units) {
    return count(needle_sample(options, units, place_of(options, units, 0.5), key, value).prompt) +
           options.reserved;
  };
  const int64_t least = tokens(1);
  if (least > options.length)
    fail(
        "a length of {} tokens is too short: the question, "
        "one unit of the haystack and {} tokens for the answer take {}",
        options.length, options.reserved, least);
  int64_t low = 1;
  int64_t high = step_of(options);
  while (tokens(high) <= options.length) {
    low = high;
    high *= 2;
  }
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (tokens(middle) <= options.length ? low : high) = middle;
  }
  return low;
}

std::vector<NeedleSample> needle_samples(const NiahOptions& options, const CountTokens& count) {
  const int64_t most = haystack_units(options, count);
  const int64_t step = step_of(options);
  std::vector<NeedleSample> out;
  for (int64_t i = 0; i < options.samples; ++i) {
    Random random(options.seed, "niah sample", uint64_t(i));
    const std::string key = random_key(random);
    const std::string value = random_value(random, options.variant);
    const double depth = options.samples > 1 ? double(i) / double(options.samples - 1) : 0.5;
    int64_t units = most;
    NeedleSample sample;
    while (true) {
      sample = needle_sample(options, units, place_of(options, units, depth), key, value);
      sample.tokens = count(sample.prompt);
      if (sample.tokens + options.reserved <= options.length || units == 1) break;
      units = std::max<int64_t>(1, units - (units > step ? step : 1));
    }
    sample.depth = depth;
    out.push_back(std::move(sample));
  }
  return out;
}

double needle_score(const std::string& generated, const std::string& answer) {
  std::string text = strip(generated);
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 32) c = '\n';
  return contains_text(text, answer);
}

}  // namespace assay::tasks
