#pragma once
// How often intervals hold the truth, over simulated studies.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "simulation.h"

namespace assay::stats {

struct Coverage {
  // per cent, of the average over the domains and of domain 0
  double average = 0;
  double domain = 0;
  double half_width = 0;  // of the average, mean
};

inline bool holds(const Interval& x, double truth) { return x.low <= truth && truth <= x.high; }

// `others`: further architectures of the study, with the same number of seeds, that tell how
// much seeds differ.
inline Coverage coverage(const Setting& setting, int replications, int others = 0) {
  Coverage found;
  for (int r = 0; r < replications; ++r) {
    Simulation simulation(setting, uint64_t(r));
    const Study study = simulation.study();
    std::vector<Runs> rest;
    for (int o = 0; o < others; ++o) rest.push_back(simulation.runs(setting.seeds, 0));
    std::vector<const Runs*> pool;
    for (const Runs& runs : rest) pool.push_back(&runs);
    const Degradation delta = degradation(study.architecture, study.reference, {}, pool);
    EXPECT_EQ(delta.problem, "") << setting.name << ", replication " << r;
    const double share = 100.0 / replications;
    found.average +=
        share * holds(delta.average, Simulation::truth(setting, delta.loss_low, delta.loss_high));
    found.domain += share * holds(delta.domains.at("domain 0"),
                                  Simulation::truth(setting, 0, delta.loss_low, delta.loss_high));
    found.half_width += (delta.average.high - delta.average.low) / 2 / replications;
  }
  fmt::print("{:<44} average {:5.1f} %   domain {:5.1f} %   half-width {:.4f}\n", setting.name,
             found.average, found.domain, found.half_width);
  return found;
}

// `error` is what the number of replications leaves open.
inline void expect_nominal(const Setting& setting, int replications, int others = 0,
                           double error = 0) {
  const Coverage found = coverage(setting, replications, others);
  EXPECT_GE(found.average, 93 - error) << setting.name;
  EXPECT_LE(found.average, 97 + error) << setting.name;
  EXPECT_GE(found.domain, 93 - error) << setting.name << ", domain 0";
  EXPECT_LE(found.domain, 97 + error) << setting.name << ", domain 0";
}

}  // namespace assay::stats
