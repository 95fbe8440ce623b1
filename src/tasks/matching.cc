#include "tasks/matching.h"

#include <algorithm>
#include <cctype>

#include "tasks/text.h"

namespace assay::tasks {
namespace {

std::string without_words(const std::string& text, const std::vector<std::string>& words) {
  const std::u32string points = code_points(text);
  std::u32string out;
  for (size_t i = 0; i < points.size();) {
    const bool before = i > 0 && is_word(points[i - 1]);
    const bool edge = before != is_word(points[i]);
    const auto fits = [&](const std::string& word) {
      return points.compare(i, code_points(word).size(), code_points(word)) == 0;
    };
    const auto found = edge ? std::ranges::find_if(words, fits) : words.end();
    if (found == words.end()) out += points[i++];
    else i += code_points(*found).size();
  }
  return utf8(out);
}

std::string normal(std::string text, const ExactMatch& rule) {
  if (!rule.ignore_words.empty()) text = without_words(text, rule.ignore_words);
  if (rule.ignore_case) text = lower(text);
  if (rule.ignore_punctuation)
    std::erase_if(text, [](unsigned char c) { return c < 128 && std::ispunct(c); });
  return text;
}

}  // namespace

bool exact_match(const std::string& text, const std::string& answer, const ExactMatch& rule) {
  return normal(text, rule) == normal(answer, rule);
}

bool contains_text(const std::string& text, const std::string& answer) {
  return lower(text).find(lower(answer)) != std::string::npos;
}

std::string cut_at(std::string text, const std::vector<std::string>& stops) {
  for (const std::string& stop : stops)
    if (!stop.empty()) text = text.substr(0, text.find(stop));
  return text;
}

}  // namespace assay::tasks
