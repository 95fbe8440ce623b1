#pragma once
// Studies whose truth is known: a ladder of references, contenders, and documents in sources.
// Losses follow the first pilot on real text: held-out 4.07, 3.54, 3.22, 3.03, 2.92 for budgets
// that double, and a recall loss that falls from 4.0 to 1.8 on the way.
#include <cmath>
#include <string>
#include <vector>

#include "base/random.h"
#include "stats/degradation.h"
#include "stats/ladder.h"

namespace assay::stats {

struct LadderSetting {
  std::string name;
  int rungs = 5, rung_seeds = 4;
  bool runs_lost = false;  // every rung but the last but one has lost all runs but its first
  int contenders = 4, seeds = 2, budgets = 2;
  double effect = 0.05;        // Delta_end of the first contender at the ladder's last budget
  double growth = 0.02;        // of Delta_end per doubling of tokens
  double speed = -0.3;         // doublings by which the first contender is ahead of the reference
  double speed_step = 0.1;     // from one contender to the next
  double transition = 3.6;     // held-out loss at which the reference learns to recall
  double seed_loss = 0.015;    // spread of a run's held-out loss; o follows along the curve
  double seed_spread = 0.012;  // spread of a run's residual, half of its variance common
  double reference_variance = 2;  // variance of the reference's residuals over the contenders'
  double first_rung_spread = 1;   // spread at the first rung over the spread at the last one
  std::vector<int> sources{13, 26, 62, 18};  // per domain
  int documents = 120;                       // per domain
  double document_spread = 0.15;             // of Delta between documents
  double source_share = 0.35;                // of its variance between sources
  double seed_document = 0.05;               // spread of a run's luck on one document
};

// One domain: the documents, each in a source.
struct Texts {
  std::vector<double> tokens;
  std::vector<size_t> source;
  std::vector<double> level;  // per document, the same in every run
  std::vector<double> steep;  // per document, change of the loss with the held-out loss
  size_t sources = 0;
};

class LadderStudy {
 public:
  LadderStudy(const LadderSetting& setting, uint64_t replication)
      : s(setting), random(11, "ladder study", replication) {
    for (const int sources : s.sources) texts.push_back(draw_texts(size_t(sources)));
    for (int b = 0; b < s.rungs; ++b) {
      const double spread = std::sqrt(s.reference_variance) *
                            std::pow(s.first_rung_spread, 1 - double(b) / std::max(1, s.rungs - 1));
      ladder.push_back({tokens_at(b), {}});
      for (int seed = 0; seed < s.rung_seeds; ++seed)
        ladder.back().runs.push_back(end(seed, held_out_at(b), spread, 0, {}));
      if (s.runs_lost && b != s.rungs - 2) ladder.back().runs.resize(1);
    }
    const auto common = draw_differences();
    for (int a = 0; a < s.contenders; ++a) {
      auto differences = draw_differences();
      for (size_t d = 0; d < texts.size(); ++d)
        for (size_t i = 0; i < differences[d].size(); ++i)
          differences[d][i] = (differences[d][i] + common[d][i]) / std::sqrt(2.0);
      Contender contender{"contender " + std::to_string(a), {}};
      for (int j = s.rungs - s.budgets; j < s.rungs; ++j) {
        contender.budgets.push_back({tokens_at(j), {}});
        for (int seed = 0; seed < s.seeds; ++seed)
          contender.budgets.back().runs.push_back(
              end(seed, held_out_of(s, a, j), 1, effect_at(s, a, j), differences));
      }
      contenders.push_back(std::move(contender));
    }
  }

  static double tokens_at(double rung) { return 10e6 * std::exp2(rung); }
  static double held_out_at(double rung) { return 2.75 + 1.32 * std::exp2(-0.75 * rung); }
  static double held_out_of(const LadderSetting& s, int contender, double rung) {
    return held_out_at(rung + s.speed + s.speed_step * contender);
  }
  static double effect_at(const LadderSetting& s, int contender, double rung) {
    return s.effect * (1 - 0.2 * contender) + s.growth * (rung - (s.rungs - 1));
  }
  // The truth of a domain, which has a larger or smaller effect than the mean of all.
  static double domain_factor(const LadderSetting& s, size_t domain) {
    return 1 + 0.2 * (double(domain) - (double(s.sources.size()) - 1) / 2);
  }
  static double recall_at(const LadderSetting& s, double h) {
    return 1.75 + 2.3 / (1 + std::exp(-(h - s.transition) / 0.13));
  }
  // The reference's out-of-domain loss: a quarter of the targets are recall targets.
  static double reference_at(const LadderSetting& s, size_t domain, double h) {
    return kRecall * recall_at(s, h) + (1 - kRecall) * (1.6 + 0.87 * h) + 0.1 * double(domain);
  }
  static constexpr double kRecall = 0.25;

  std::vector<Budget> ladder;
  std::vector<Contender> contenders;
  std::vector<Texts> texts;

  Texts draw_texts(size_t sources) {
    Texts drawn;
    drawn.sources = sources;
    for (int i = 0; i < s.documents; ++i) {
      drawn.tokens.push_back(std::ceil(500 * std::exp(0.7 * random.normal())));
      // Sources differ in size: the first ones hold more documents. Every source has one.
      const double u = random.uniform();
      drawn.source.push_back(size_t(i) < sources ? size_t(i) : size_t(u * u * double(sources)));
      drawn.level.push_back(0.5 * random.normal());
      drawn.steep.push_back(0.1 * random.normal());
    }
    return drawn;
  }

  // Deviations of Delta by domain and document, with a part common to each source.
  std::vector<std::vector<double>> draw_differences() {
    std::vector<std::vector<double>> drawn;
    for (const Texts& domain : texts) {
      std::vector<double> of_source;
      for (size_t c = 0; c < domain.sources; ++c) of_source.push_back(random.normal());
      auto& one = drawn.emplace_back();
      for (const size_t source : domain.source)
        one.push_back(s.document_spread * (std::sqrt(s.source_share) * of_source[source] +
                                           std::sqrt(1 - s.source_share) * random.normal()));
    }
    return drawn;
  }

  End end(int64_t seed, double held_out, double spread, double effect,
          const std::vector<std::vector<double>>& differences) {
    End end{seed, held_out + s.seed_loss * random.normal(), {}};
    const double common = random.normal();
    for (size_t d = 0; d < texts.size(); ++d) {
      const double luck = spread * s.seed_spread * (common + random.normal()) / std::sqrt(2.0);
      const double shift = effect * domain_factor(s, d) + luck;
      // Half of a shift falls on recall targets.
      const double recall = recall_at(s, end.held_out) + shift / 2 / kRecall;
      const Texts& domain = texts[d];
      EndLosses& losses = end.domains["domain " + std::to_string(d)];
      for (auto* values : {&losses.nll, &losses.recall_nll, &losses.tokens, &losses.recall_tokens})
        values->resize(domain.sources);
      for (size_t i = 0; i < domain.tokens.size(); ++i) {
        const size_t c = domain.source[i];
        const double own = domain.level[i] + domain.steep[i] * (end.held_out - 3.3) +
                           (differences.empty() ? 0 : differences[d][i]) +
                           s.seed_document * random.normal();
        const double loss = reference_at(s, d, end.held_out) + shift + own;
        losses.tokens[c] += domain.tokens[i];
        losses.recall_tokens[c] += kRecall * domain.tokens[i];
        losses.nll[c] += domain.tokens[i] * loss;
        losses.recall_nll[c] += domain.tokens[i] * kRecall * (recall + own);
      }
    }
    return end;
  }

 protected:
  LadderSetting s;
  Random random;
};

}  // namespace assay::stats
