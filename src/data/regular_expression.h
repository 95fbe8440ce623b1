#pragma once
// Regular expressions of tokenizer.json, which are written for Oniguruma. PCRE2 matches them.
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace assay::data {

class RegularExpression {
 public:
  // BadInput that names `source` if the pattern is wrong, or uses something whose meaning differs
  // between the two libraries.
  RegularExpression(const std::string& pattern, const std::string& source);
  // The matches in the UTF-8 text and the text between them, in order.
  void for_each_part(std::string_view text,
                     const std::function<void(std::string_view)>& part) const;

 private:
  std::shared_ptr<const void> code_;
};

}  // namespace assay::data
