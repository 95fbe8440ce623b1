#pragma once
// Prompts as templates: text with expressions in {{ }}, over the fields of a document. The language
// is the part of Jinja2 that task definitions use, and a template means here what it means there:
//   values      fields, strings, integers, lists [a, b], true, false
//   access      a.b  a['b']  a[0]  a[-1]  a[:-1]  a[2:5]        strings are indexed by code points
//   operators   + - * ~ == != < <= > >= in, not in, not, and, or, x if condition else y
//   methods     strip lstrip rstrip split replace lower upper capitalize startswith endswith index
//               count find
//   filters     join(' ') length count int string trim lower upper capitalize replace(a, b) first
//               last
// Everything else is refused, also a statement {% %}, a comment {# #} and {{- -}}.
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace assay::tasks {

using Json = nlohmann::json;

class Template {
 public:
  Template() = default;
  // `where`: the place in a file, for messages. BadInput says what cannot be read.
  Template(const std::string& source, std::string where);

  // BadInput names a field that the document does not have, and the fields that it has.
  std::string render(const Json& document) const;
  // The value of the only expression of "{{ … }}"; of other templates the rendered text.
  Json value(const Json& document) const;

 private:
  using Expression = std::function<Json(const Json& document)>;
  struct Piece {
    std::string text;       // as it is, when there is no expression
    Expression expression;  // else its value
  };
  std::string where_;
  std::vector<Piece> pieces_;
};

// As a template prints it, which is str() of Python. BadInput on a table of several fields.
std::string to_text(const Json& value);

}  // namespace assay::tasks
