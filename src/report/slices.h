#pragma once
// Losses of the last evaluation in slices: kinds of target token that a difference between
// architectures may come from.
#include "report/analysis.h"

namespace assay::report {

// That any run reports, in a readable order
std::vector<std::string> slice_names(const Setting& setting);
// Loss of a slice at the last evaluation, mean over runs and test domains that have it; NaN when
// none has.
double slice_loss(const std::vector<Run>& runs, const Setting& setting, const std::string& slice);
// Share of the test tokens whose loss is above 12 nats, in percent.
double share_above_12_nats(const std::vector<Run>& runs, const Setting& setting);
// Where tokens that are unseen in training, or tokens above 12 nats, make up more than half of a
// difference at the end, the difference shows how a model treats unknown formatting, and not what
// it is capable of. One sentence for each test domain where that is so, at equal tokens.
std::vector<std::string> slice_warnings(const Architecture& architecture, const Setting& setting);

}  // namespace assay::report
