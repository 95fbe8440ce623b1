#pragma once
// The reference's out-of-domain loss as a function of its held-out loss, read between the rungs of
// a ladder. (H_b, O_b) are the means over the seeds of rung b.
//   f(h) = sum_b w_b(h) O_b,    sum_b w_b(h) = 1
// f is a cubic Hermite interpolant whose slope at a rung is that of the parabola through the rung
// and its two neighbours. Slopes are limited so that f does not overshoot [Fritsch & Carlson, SIAM
// J. Numer. Anal. 1980]. Beyond the end rungs f continues as a straight line.
// The limits are chosen once, from the mean over the domains. The weights are therefore the same
// for all domains, targets and documents, and every difference adds up exactly over its parts.
#include <cstddef>
#include <functional>
#include <vector>

namespace assay::stats {

class RungCurve {
 public:
  // How the slope at a rung is obtained.
  enum class Slope { parabola, zero, three_times_before, three_times_after };

  // Weights of a reading at h: f and its derivatives are sums over the rungs with these weights.
  struct Reading {
    std::vector<double> weights;               // w_b(h)
    std::vector<double> slope;                 // dw_b / dh
    std::vector<std::vector<double>> by_rung;  // [b][k] = dw_k / dH_b
  };

  // The slope at a rung: of the parabola through the rung and its neighbours if both segments next
  // to it are used, or of the line through one segment. A sum over the rungs with `weights`.
  struct RungSlope {
    std::vector<double> weights;
    std::vector<std::vector<double>> by_rung;  // [b][k] = d weights_k / dH_b
  };

  // held_out falls strictly from rung to rung; there are at least two rungs.
  RungCurve(std::vector<double> held_out, const std::vector<double>& loss);

  std::vector<double> weights(double held_out) const { return weights(held_out_, held_out); }
  // The curve through `values` of the rungs.
  double at(double held_out, const std::vector<double>& values) const;
  Reading read(double held_out) const;
  // At least one of the two segments is used, and it exists.
  RungSlope rung_slope(size_t rung, bool before, bool after) const;
  // Weights for the slope of the line through the rungs `segment` and `segment` + 1.
  std::vector<double> secant(size_t segment) const { return secant_weights(held_out_, segment); }
  // The segment (b, b + 1) that holds h; beyond the ends the first or the last one.
  size_t segment(double held_out) const { return segment(held_out_, held_out); }

 private:
  static size_t segment(const std::vector<double>& rungs, double held_out);
  // [b][k]: derivative by H_b of weight k, which is a function of all H.
  std::vector<std::vector<double>> by_rung(
      const std::function<std::vector<double>(const std::vector<double>&)>& weights) const;
  double step() const { return 1e-5 * (held_out_.front() - held_out_.back()); }
  std::vector<double> weights(const std::vector<double>& rungs, double held_out) const;
  std::vector<double> slope_weights(const std::vector<double>& rungs, size_t rung) const;
  std::vector<double> parabola_weights(const std::vector<double>& rungs, size_t rung) const;
  std::vector<double> secant_weights(const std::vector<double>& rungs, size_t segment) const;

  std::vector<double> held_out_;
  std::vector<Slope> slopes_;
};

// sum_b weights[b] values[b]
double weighted_sum(const std::vector<double>& weights, const std::vector<double>& values);
// sum + factor x; an empty sum is zero.
void add(std::vector<double>& sum, const std::vector<double>& x, double factor);

}  // namespace assay::stats
