#pragma once
// Generated texts compared with accepted answers.
#include <string>
#include <vector>

namespace assay::tasks {

struct ExactMatch {
  std::vector<std::string>
      ignore_words;  // deleted where they begin at the edge of a word, the first that fits
  bool ignore_case = false;
  bool ignore_punctuation = false;
};
// Both texts with the ignored parts taken out, in this order: words, case, ASCII punctuation.
bool exact_match(const std::string& text, const std::string& answer, const ExactMatch& rule);
// The answer occurs in the text, case ignored.
bool contains_text(const std::string& text, const std::string& answer);
// The text up to the first of each stop string.
std::string cut_at(std::string text, const std::vector<std::string>& stops);

}  // namespace assay::tasks
