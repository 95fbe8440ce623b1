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
  int rungs = 5;
  int rung_seeds = 4;
  bool runs_lost = false;  // every rung but the last but one has lost all runs but its first
  int contenders = 4;
  int seeds = 2;
  int budgets = 2;
  double effect = 0.05;        // Delta_end of the first contender at the ladder's last budget
  double growth = 0.02;        // of Delta_end per doubling of tokens
  double speed = -0.3;         // doublings by which the first contender is ahead of the reference
  double speed_step = 0.1;     // from one contender to the next
  double transition = 3.6;     // held-out loss at which the reference learns to recall
  double seed_loss = 0.015;    // spread of a run's held-out loss; o follows along the curve
  double seed_spread = 0.012;  // spread of a run's residual, half of its variance common
  double reference_variance = 2;  // variance of the reference's residuals over the contenders'
  double first_rung_spread = 1;   // spread at the first rung over the spread at the last one
  std::vector<int> sources{13, 26, 62, 18};   // per domain
  int documents = 120;                        // per domain
  double document_spread = 0.15;              // of Delta between documents
  double source_share = 0.35;                 // of its variance between sources
  double seed_document = 0.05;                // spread of a run's luck on one document
  double domain_spread = 0;                   // of Delta between domains, drawn for each contender
  std::vector<int> held_out_sources{12, 25};  // per training domain; empty: no held-out text
  int held_out_documents = 60;                // per training domain
  double held_out_spread = 0.1;               // of a contender's held-out loss between documents
  double recall_seed_spread = 0.008;          // of a run's residual of the recall loss in domain
  double unique_tokens = 0;                   // of the training text; 0: no text is read twice
  double repetition = 0.109;  // nats out of domain per doubling of the epochs above one
  double memorised = 0.12;    // nats of held-out over training loss per such doubling
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
      : s(setting),
        random(11, "ladder study", replication),
        held_out_random(11, "held-out text", replication) {
    for (const int sources : s.sources)
      texts.push_back(draw_texts(size_t(sources), s.documents, random));
    for (const int sources : s.held_out_sources)
      held_out_texts.push_back(draw_texts(size_t(sources), s.held_out_documents, held_out_random));
    for (int b = 0; b < s.rungs; ++b) {
      const double spread = std::sqrt(s.reference_variance) *
                            std::pow(s.first_rung_spread, 1 - double(b) / std::max(1, s.rungs - 1));
      ladder.push_back({tokens_at(b), {}, epochs_at(b)});
      for (int seed = 0; seed < s.rung_seeds; ++seed)
        ladder.back().runs.push_back(end(seed, held_out_at(b), spread, 0, {}, epochs_at(b)));
      if (s.runs_lost && b != s.rungs - 2) ladder.back().runs.resize(1);
    }
    const auto common = draw_differences();
    const auto held_out_common = draw(held_out_texts, s.held_out_spread, held_out_random);
    for (int a = 0; a < s.contenders; ++a) {
      auto differences = between(draw_differences(), common);
      domain_shifts.push_back(shift_domains(differences));
      const auto held_out =
          between(draw(held_out_texts, s.held_out_spread, held_out_random), held_out_common);
      Contender contender{"contender " + std::to_string(a), {}};
      for (int j = s.rungs - s.budgets; j < s.rungs; ++j) {
        contender.budgets.push_back({tokens_at(j), {}, epochs_at(j)});
        for (int seed = 0; seed < s.seeds; ++seed)
          contender.budgets.back().runs.push_back(end(seed, held_out_of(s, a, j), 1,
                                                      effect_at(s, a, j), differences, epochs_at(j),
                                                      held_out));
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
  // The loss per recall target of the training domains; contenders lose more of it.
  static double recall_in_domain_at(const LadderSetting& s, double h) {
    return 0.9 + 0.55 * (h - 2.75) + 0.1 * (recall_at(s, h) - 1.75);
  }
  static constexpr double kRecallEffect = 0.8;  // of Delta_end
  // E and R without noise: the difference to the tangent at the rung.
  static double equal_tokens_of(const LadderSetting& s, int contender, double rung) {
    return effect_at(s, contender, rung) + above_tangent(s, contender, rung, [&](double h) {
             double sum = 0;
             for (size_t d = 0; d < s.sources.size(); ++d) sum += reference_at(s, d, h);
             return sum / double(s.sources.size());
           });
  }
  static double recall_of(const LadderSetting& s, int contender, double rung) {
    return kRecallEffect * effect_at(s, contender, rung) +
           above_tangent(s, contender, rung, [&](double h) { return recall_in_domain_at(s, h); });
  }
  static double above_tangent(const LadderSetting& s, int contender, double rung, auto&& curve) {
    const double at = held_out_at(rung);
    const double h = held_out_of(s, contender, rung);
    const double slope = (curve(at + 1e-4) - curve(at - 1e-4)) / 2e-4;
    return curve(h) - curve(at) - slope * (h - at);
  }
  double epochs_at(double rung) const {
    return s.unique_tokens > 0 ? tokens_at(rung) / s.unique_tokens : 0.5;
  }
  static constexpr double kRecall = 0.25;

  std::vector<Budget> ladder;
  std::vector<Contender> contenders;
  std::vector<Texts> texts;
  std::vector<Texts> held_out_texts;
  std::vector<double> domain_shifts;  // by contender: mean over the domains

  static Texts draw_texts(size_t sources, int documents, Random& random) {
    Texts drawn;
    drawn.sources = sources;
    for (int i = 0; i < documents; ++i) {
      drawn.tokens.push_back(std::ceil(500 * std::exp(0.7 * random.normal())));
      // Sources differ in size: the first ones hold more documents. Every source has one.
      const double u = random.uniform();
      drawn.source.push_back(size_t(i) < sources ? size_t(i) : size_t(u * u * double(sources)));
      drawn.level.push_back(0.5 * random.normal());
      drawn.steep.push_back(0.1 * random.normal());
    }
    return drawn;
  }

  using Differences = std::vector<std::vector<double>>;  // by domain and document

  // Deviations of Delta by domain and document, with a part common to each source.
  Differences draw_differences() { return draw(texts, s.document_spread, random); }
  Differences draw(const std::vector<Texts>& domains, double spread, Random& numbers) const {
    Differences drawn;
    for (const Texts& domain : domains) {
      std::vector<double> of_source;
      for (size_t c = 0; c < domain.sources; ++c) of_source.push_back(numbers.normal());
      auto& one = drawn.emplace_back();
      for (const size_t source : domain.source)
        one.push_back(spread * (std::sqrt(s.source_share) * of_source[source] +
                                std::sqrt(1 - s.source_share) * numbers.normal()));
    }
    return drawn;
  }
  // Half of the variance is common to all contenders.
  static Differences between(Differences own, const Differences& common) {
    for (size_t d = 0; d < own.size(); ++d)
      for (size_t i = 0; i < own[d].size(); ++i)
        own[d][i] = (own[d][i] + common[d][i]) / std::sqrt(2.0);
    return own;
  }
  // Adds a shift of its own to every domain; returns the mean of the shifts.
  double shift_domains(Differences& differences) {
    double sum = 0;
    for (auto& domain : differences) {
      const double shift = s.domain_spread * held_out_random.normal();
      for (double& difference : domain) difference += shift;
      sum += shift;
    }
    return sum / double(differences.size());
  }

  End end(int64_t seed, double held_out, double spread, double effect,
          const Differences& differences, double epochs = 0.5,
          const Differences& held_out_differences = {}) {
    End end{seed, held_out + s.seed_loss * random.normal(), {}};
    const double doublings = std::log2(std::max(1.0, epochs));
    const double common = random.normal();
    for (size_t d = 0; d < texts.size(); ++d) {
      const double luck = spread * s.seed_spread * (common + random.normal()) / std::sqrt(2.0);
      const double shift = effect * domain_factor(s, d) + s.repetition * doublings + luck;
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
      losses.bounded_nll = losses.nll;
    }
    if (!held_out_texts.empty()) add_held_out(end, effect, held_out_differences);
    end.training_loss = end.held_out - 0.02 - s.memorised * doublings;
    return end;
  }

  // The held-out loss as it is measured on documents, and the recall loss of these documents.
  void add_held_out(End& end, double effect, const Differences& differences) {
    Random& numbers = held_out_random;
    const double h = end.held_out;
    const double recall = recall_in_domain_at(s, h) + kRecallEffect * effect +
                          s.recall_seed_spread * numbers.normal();
    end.held_out = 0;
    for (size_t d = 0; d < held_out_texts.size(); ++d) {
      const Texts& domain = held_out_texts[d];
      EndLosses& losses = end.held_out_domains["train " + std::to_string(d)];
      for (auto* values : {&losses.nll, &losses.recall_nll, &losses.tokens, &losses.recall_tokens})
        values->resize(domain.sources);
      double nll = 0;
      double tokens = 0;
      for (size_t i = 0; i < domain.tokens.size(); ++i) {
        const size_t c = domain.source[i];
        const double own = domain.level[i] + domain.steep[i] * (h - 3.3) +
                           (differences.empty() ? 0 : differences[d][i]) +
                           s.seed_document * numbers.normal();
        const double recall_tokens = domain.tokens[i] * (0.2 + 0.2 * double(i % 3));
        losses.tokens[c] += domain.tokens[i];
        losses.recall_tokens[c] += recall_tokens;
        losses.nll[c] += domain.tokens[i] * (h + own);
        losses.recall_nll[c] += recall_tokens * (recall + 0.7 * own);
        nll += domain.tokens[i] * (h + own);
        tokens += domain.tokens[i];
      }
      end.held_out += nll / tokens / double(held_out_texts.size());
    }
  }

 protected:
  LadderSetting s;
  Random random;
  Random held_out_random;
};

}  // namespace assay::stats
