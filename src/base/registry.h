#pragma once
// Things made by name. A file registers what it defines; nobody keeps a list.
#include <map>
#include <string>
#include <vector>

#include "base/error.h"

namespace assay {

template <class Entry>
class Registry {
 public:
  explicit Registry(std::string kind) : kind_(std::move(kind)) {}

  bool add(const std::string& name, Entry entry) {
    if (!entries_.emplace(name, std::move(entry)).second)
      fail<Error>("{} '{}' is registered twice", kind_, name);
    return true;
  }
  // Throws BadInput that names the nearest entry.
  const Entry& at(const std::string& name) const {
    const auto found = entries_.find(name);
    if (found == entries_.end())
      fail("unknown {} '{}'{}\n  There are: {}.", kind_, name, did_you_mean(name, names()),
           join(names()));
    return found->second;
  }
  bool contains(const std::string& name) const { return entries_.contains(name); }
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& [name, entry] : entries_) out.push_back(name);
    return out;
  }

 private:
  std::string kind_;
  std::map<std::string, Entry> entries_;
};

}  // namespace assay
