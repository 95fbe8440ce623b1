#pragma once
// Which operators a piece of work calls: each operator says so, so that none has to be listed.
#include <set>
#include <string>

namespace assay::ops {

// By an operator that was called, with its name as `assay doctor` lists it. check_like() of
// tensors.h does it, too.
void record_call(const char* op);

// The names of the operators that this thread calls during the life of this object.
class CalledOps {
 public:
  CalledOps();
  ~CalledOps();
  CalledOps(const CalledOps&) = delete;
  std::set<std::string> names;
};

}  // namespace assay::ops
