#pragma once
// Which operators a piece of work calls: their checks say so, so that none has to be listed.
#include <set>
#include <string>

namespace assay::ops {

// The names of the operators that this thread calls while it lives, as `assay doctor` lists them.
class CalledOps {
 public:
  CalledOps();
  ~CalledOps();
  CalledOps(const CalledOps&) = delete;
  std::set<std::string> names;
};

}  // namespace assay::ops
