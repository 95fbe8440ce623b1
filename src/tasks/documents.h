#pragma once
// The documents of a task: JSON Lines, one object a line.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/files.h"

namespace assay::tasks {

using Json = nlohmann::json;

// Reads `name`, `name`.zst or `name`.gz in `folder`. BadInput when none is there (it names what was
// looked for), and with file and line when a line is not a JSON object.
std::vector<Json> read_documents(const fs::path& folder, const std::string& name);
fs::path find_documents(const fs::path& folder, const std::string& name);

// Documents of some data sets need more than a template can say. A preparation gives a document its
// further fields, in place.
//   hellaswag   query, choices            the tags of WikiHow removed
//   race        query, choices, gold
//       `problems` is the text of a Python list; all but the last are answered
//   wsc273      text, options             options in the form in which they replace the pronoun
//   swde        text                      what stands before "Summary of information above..."
using Preparation = void (*)(Json& document);
Preparation preparation(const std::string& name);  // BadInput names the nearest; "" does nothing

// The value that a Python literal of lists, dictionaries, strings and numbers stands for. BadInput
// when it is none.
Json python_literal(const std::string& text);

}  // namespace assay::tasks
