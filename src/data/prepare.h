#pragma once
// From text files to a token store: one thread reads and decompresses, all cores parse and
// tokenise, one writes in the order of the input. The store does not depend on the number of
// threads. Memory is bounded whatever the input.
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/files.h"

namespace assay::data {

struct PrepareOptions {
  std::vector<fs::path> inputs;  // files and folders, as data/reader.h reads them
  // to write; the SentencePiece model
  fs::path store;
  fs::path tokenizer;
  // The domain of a document: the NAME of the first glob that matches its file (whole path or
  // file name); else what `field` says, SlimPajama's set names shortened (RedPajamaCommonCrawl →
  // cc, …, RedPajamaStackExchange → stack), in other names characters that are neither letters,
  // digits nor '-' replaced by '_'. Names of more than 100 bytes are left out and counted as
  // unknown.
  std::vector<std::pair<std::string, std::string>> domains = {};  // NAME, GLOB
  std::string field = {};  // "": meta.redpajama_set_name, where only those seven count
  // Where a document names its source: a string, dots between levels. "": sources are not kept.
  std::string source_field = "meta.source";
  // Share of the training documents that goes to split valid, chosen by a hash of their text
  double valid_fraction = 0.01;
  int threads = 0;         // that tokenise, at most 1024; 0: one a core
  bool overwrite = false;  // replaces a token store that is there
};

// Writes the store and returns the report that its manifest keeps: "sources" (the input files:
// counts of each, and what was left out of it), "total", and "warnings" (sentences for the user;
// absent when there are none): files of which every document was left out, paths with unclear
// splits, patterns that took no file, names that became one domain, domains without a valid split.
// BadInput for wrong options, an unreadable or corrupt file, or no document at all; Interrupted on
// Ctrl-C. Then nothing is left behind.
nlohmann::json prepare(const PrepareOptions& options);

}  // namespace assay::data
