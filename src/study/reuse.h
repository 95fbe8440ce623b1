#pragma once
// Finished runs of other studies and records, which a plan need not train again.
#include "study/prepare.h"

namespace assay::study {

class Reusable {
 public:
  struct Found {
    run::RunRecord record;
    std::string folder;  // where it was found
  };
  // BadInput when a folder holds neither records nor a study.
  explicit Reusable(const std::vector<fs::path>& folders);
  const Found* find(const std::string& key) const;  // null for none
  // Why runs are not found although there are records of the same names; "" when all are found or
  // no record has the name of one. For people.
  std::string explain_missing(const std::vector<PlannedRun>& runs) const;

 private:
  std::map<std::string, Found> by_key_;
};

}  // namespace assay::study
