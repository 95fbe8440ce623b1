#pragma once
// Losses of the last evaluation in slices: kinds of target token that a difference between architectures may come from.
#include "report/analysis.h"

namespace assay::report {

std::vector<std::string> slice_names(const Setting& setting);  // that any run reports, in a readable order
// Loss of a slice at the last evaluation, mean over runs and test domains that have it; NaN when none has.
double slice_loss(const Architecture& architecture, const Setting& setting, const std::string& slice);
// Share of the test tokens whose loss is above 12 nats, in percent.
double share_above_12_nats(const Architecture& architecture, const Setting& setting);
// A difference that tokens unseen in training, or tokens above 12 nats, carry to more than a half says how a model
// treats formatting it never met, not what it can do. One line for each test domain where that is so.
std::vector<std::string> slice_warnings(const Architecture& architecture, const Setting& setting);

}  // namespace assay::report
