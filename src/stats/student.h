#pragma once
// Student's t distribution with any real number of degrees of freedom.

namespace assay::stats {

// P(|T| > t) for T with `freedom` > 0 degrees of freedom and t ≥ 0.
double student_two_sided(double t, double freedom);
// The t for which P(|T| ≤ t) = level, 0 < level < 1: student_quantile(0.95, 2) = 4.3027.
// To 1e-10 relative.
double student_quantile(double level, double freedom);

}  // namespace assay::stats
