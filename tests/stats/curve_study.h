#pragma once
// Runs along training, for the estimator that averages over the shared range (degradation.h).
// A run at share x of its tokens has the held-out loss of a finished run of that many tokens, plus
// what its learning rate still has to bring: anneal_in * (1 - x) in domain, anneal_out * (1 - x)
// out of domain.
#include <algorithm>

#include "ladder_simulation.h"

namespace assay::stats {

struct CurveSetting {
  LadderSetting ends;
  double power = 0;  // Delta at share x is Delta_end x^power
  // nats per token
  double anneal_in = 0;
  double anneal_out = 0;
  bool trailing_loss = false;  // training loss, mean since the last evaluation
  // of evaluations along a run
  double noise = 0.005;
  double correlation = 0.8;
  int evaluations = 20;
};

class CurveStudy : public LadderStudy {
 public:
  CurveStudy(const CurveSetting& setting, uint64_t replication)
      : LadderStudy(setting.ends, replication), c(setting) {
    const double spread = std::sqrt(s.reference_variance);
    for (int seed = 0; seed < s.rung_seeds; ++seed)
      reference.push_back(run(seed, 0, spread, 0, {}));
    const auto differences = draw_differences();
    const double effect = effect_at(s, 0, s.rungs - 1);
    for (int seed = 0; seed < s.seeds; ++seed)
      architecture.push_back(run(seed, s.speed, 1, effect, differences));
    for (int other = 0; other < 6; ++other) {
      others.emplace_back();
      for (int seed = 0; seed < s.seeds; ++seed)
        others.back().push_back(run(seed, s.speed, 1, 0, draw_differences()));
    }
  }

  Runs architecture;
  Runs reference;
  std::vector<Runs> others;  // lend their variance between seeds

 private:
  double stable_at(double share, double speed) const {
    return held_out_at(s.rungs - 1 + std::log2(share) + speed);
  }

  Run run(int64_t seed, double speed, double spread, double effect,
          const std::vector<std::vector<double>>& differences) {
    const double shift = s.seed_loss * random.normal();
    const double common = random.normal();
    std::vector<double> luck;
    std::vector<std::vector<double>> own;
    for (size_t d = 0; d < texts.size(); ++d) {
      luck.push_back(spread * s.seed_spread * (common + random.normal()) / std::sqrt(2.0));
      own.emplace_back();
      for (size_t i = 0; i < texts[d].tokens.size(); ++i)
        own.back().push_back(texts[d].level[i] + (differences.empty() ? 0 : differences[d][i]) +
                             s.seed_document * random.normal());
    }
    Run run{seed, {}};
    double drift = c.noise * random.normal();
    for (int k = 1; k <= c.evaluations; ++k) {
      const double share = double(k) / c.evaluations;
      drift = c.correlation * drift +
              std::sqrt(1 - c.correlation * c.correlation) * c.noise * random.normal();
      const double stable = stable_at(share, speed) + shift;
      Point point{share * tokens_at(s.rungs - 1), stable + c.anneal_in * (1 - share), {}};
      if (c.trailing_loss) point.pretraining_loss = trailing(k, speed) + shift;
      for (size_t d = 0; d < texts.size(); ++d) {
        const double delta = effect * domain_factor(s, d) * std::pow(share, c.power);
        const double loss =
            reference_at(s, d, stable) + c.anneal_out * (1 - share) + delta + luck[d] + drift;
        DomainLosses& losses = point.out_of_domain["domain " + std::to_string(d)];
        losses.tokens = texts[d].tokens;
        for (size_t i = 0; i < losses.tokens.size(); ++i)
          losses.nll.push_back(losses.tokens[i] * (loss + own[d][i]));
      }
      run.curve.push_back(std::move(point));
    }
    return run;
  }

  double trailing(int evaluation, double speed) const {
    constexpr int kSteps = 20;
    double sum = 0;
    for (int i = 0; i < kSteps; ++i) {
      const double share = (evaluation - 1 + (i + 0.5) / kSteps) / c.evaluations;
      sum += stable_at(share, speed) + c.anneal_in * (1 - share);
    }
    return sum / kSteps;
  }

  CurveSetting c;
};

}  // namespace assay::stats
