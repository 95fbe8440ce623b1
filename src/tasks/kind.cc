#include "tasks/kind.h"

#include <algorithm>
#include <charconv>

namespace assay::tasks {

Registry<KindEntry>& kinds() {
  static Registry<KindEntry> registry("kind of task");
  return registry;
}

Template template_of(const ConfigNode& file, const std::string& field, const std::string& source,
                     bool required) {
  if (source.empty() && required)
    fail("{}: the task needs '{}', a template over the fields of a document. Nothing was run.",
         file.where("kind"), field);
  return Template(source, file.has(field) ? file.where(field) : field);
}

int64_t index_of_answer(const Json& answer, const std::vector<std::string>& choices) {
  int64_t index = -1;
  if (answer.is_number_integer()) {
    index = answer.get<int64_t>();
  } else if (answer.is_string()) {
    const std::string& text = answer.get_ref<const std::string&>();
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
    if (error != std::errc() || end != text.data() + text.size())
      index = std::ranges::find(choices, text) - choices.begin();
  }
  if (index < 0 || index >= int64_t(choices.size()))
    fail("the answer {} is not one of {} choices", answer.dump(), choices.size());
  return index;
}

std::vector<std::string> strings_of(const Json& value, const std::string& field) {
  if (!value.is_array() || value.empty())
    fail("'{}' gives {}, not a list of strings", field, value.dump().substr(0, 80));
  std::vector<std::string> out;
  for (const Json& element : value) out.push_back(to_text(element));
  return out;
}

size_t largest(const std::vector<double>& values) {
  return size_t(std::ranges::max_element(values) - values.begin());
}

}  // namespace assay::tasks
