#pragma once
// Passkey retrieval, S-NIAH-1, -2, -3 of RULER [Hsieh et al. 2024]: one sentence with a key and a
// value (the needle) in a long text (the haystack), then a question for the value.
//
//   variant  haystack                    value
//   1        one line over and over      7-digit number
//   2        text of a book              7-digit number
//   3        text of a book              UUID (version 4)
//
// The haystack has as many units (lines; words of the book) as fit: the largest n for which prompt
// and reserved tokens fill at most the length, found by bisection. One n serves all samples of a
// length; a sample that still does not fit has fewer. In variant 1 the needle is put before line
// floor(n · depth), at most n − 1, so it never follows the last line. In variants 2 and 3 it stands
// between sentences, at floor(sentences · depth). Depths are spread evenly over 0 … 1: sample i of
// s has depth i / (s − 1), where RULER draws one of 40.
#include <functional>
#include <string>
#include <vector>

#include "tasks/scorer.h"

namespace assay::tasks {

struct NeedleSample {
  std::string prompt;  // with the beginning of the answer
  std::string answer;
  std::string key;
  double depth = 0;    // as asked for, 0 … 1
  int64_t units = 0;   // of the haystack
  int64_t tokens = 0;  // of the prompt
};

struct NiahOptions {
  int variant = 1;
  int64_t length = 1024;   // tokens of prompt and answer, at most
  int64_t reserved = 128;  // of these for the answer
  int64_t samples = 40;
  uint64_t seed = 42;
  std::string haystack;  // text of variants 2 and 3
};

// The text of a file, at most 64 MiB of it; of a JSON Lines file, the field "text" of its first
// document. BadInput when there is none.
std::string read_haystack(const fs::path& file);

using CountTokens = std::function<int64_t(const std::string& text)>;

// The prompt for a needle at `place` (a line, or a number of sentences before it) of a
// haystack of `units`.
NeedleSample needle_sample(const NiahOptions& options, int64_t units, int64_t place,
                           const std::string& key, const std::string& value);
// Units that fit. BadInput when not even the smallest haystack does.
int64_t haystack_units(const NiahOptions& options, const CountTokens& count);
std::vector<NeedleSample> needle_samples(const NiahOptions& options, const CountTokens& count);

// White space collapsed, cut after '.', '!' or '?' (and closing quotes) before white space.
std::vector<std::string> sentences(const std::string& text);

// 1 when the answer occurs in the text, case ignored, control characters taken as newlines.
double needle_score(const std::string& generated, const std::string& answer);

}  // namespace assay::tasks
