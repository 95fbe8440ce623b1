#pragma once
// Writing a token store (data/token_store.h has the layout).
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "data/token_store.h"

namespace assay::data {

// Names of domains and splits become parts of file names: letters and digits of any script, '_' and
// '-', in valid UTF-8.
constexpr int64_t kLongestPartName = 100;  // bytes
// Replaces other ASCII characters by '_'.
std::string as_part_name(std::string text);
// BadInput for a name that is not allowed; `kind` is "domain" or "split".
void check_part_name(const std::string& kind, const std::string& name);

// Writes a store into a temporary folder beside its place; commit() publishes it whole. Without
// commit() nothing is left. Memory grows with the number of different sources, not with the
// number of documents.
class StoreWriter {
 public:
  // BadInput when `folder` exists, unless `overwrite` and it is empty or a token store that holds
  // no other file. A symbolic link is kept, and the store is written behind it.
  StoreWriter(fs::path folder, TokenizerInfo tokenizer, bool overwrite = false);
  ~StoreWriter();
  StoreWriter(const StoreWriter&) = delete;

  // One document. The separator is appended here.
  // `source`: what the document was taken from, "" when that is not known.
  void add(const std::string& domain, const std::string& split, std::span<const int32_t> tokens,
           int64_t bytes, std::string_view source = {});
  void set_tokenizer_file(std::string_view contents);
  // Kept in the manifest
  void note(const std::string& key, nlohmann::json value) { notes_[key] = std::move(value); }
  int64_t tokens() const { return tokens_; }
  void commit();

 private:
  class Part;
  void check_place() const;
  Part& part(const std::string& domain, const std::string& split);
  nlohmann::json manifest();
  fs::path folder_;
  bool overwrite_;
  std::optional<TemporaryFolder> temporary_;
  TokenizerInfo tokenizer_;
  nlohmann::json notes_ = nlohmann::json::object();
  std::map<std::pair<std::string, std::string>, std::unique_ptr<Part>> parts_;
  int64_t tokens_ = 0;
};

}  // namespace assay::data
