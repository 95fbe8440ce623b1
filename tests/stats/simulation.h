#pragma once
// A study whose truth is known: two architectures, their seeds, the same documents in every run,
// evaluations along each run. The pre-training loss falls as 2.9 + 0.4 x^(−1/2) over the share x of
// the tokens seen.
#include <cmath>
#include <string>

#include "base/random.h"
#include "stats/degradation.h"

namespace assay::stats {

struct Setting {
  std::string name;
  int seeds = 2;
  int reference_seeds = 2;
  int documents = 30;
  int evaluations = 10;
  int domains = 2;
  // Δ of domain 0 at a loss of 3; larger in later domains and at lower losses
  double effect = 0.1;
  // The architecture's pre-training loss lies this much above the reference's
  double speed = 0.02;
  // Standard deviation of a run's OOD loss, half of its variance common to the domains
  double seed_spread = 0.02;
  double seed_loss = 0.01;  // of a run's pre-training loss
  // Noise of every evaluation, in the pre-training loss and in every domain's OOD loss
  double noise = 0.01;
  double document_spread = 0.5;      // between documents, the same for all runs
  double architecture_document = 0;  // by how much Δ varies from document to document
  double seed_document = 0;          // by how much a run's luck does
  double length_spread = 1;          // of the logarithm of a document's tokens
  // How many times the reference's the spread of the architecture's seeds is
  double architecture_luck = 1;
  // Δ varies between documents as an exponential variable, not as a normal one
  bool skewed_documents = false;
};

struct Study {
  Runs architecture;
  Runs reference;
};

class Simulation {
 public:
  Simulation(const Setting& setting, uint64_t replication)
      : s(setting), random(7, "study", replication) {}

  Study study() {
    for (int d = 0; d < s.domains; ++d) documents.push_back(draw_documents());
    return {runs(s.seeds, 1), runs(s.reference_seeds, 0)};
  }

  // An architecture with no effect of its own on the same documents, as the rest of a
  // study has them.
  Runs runs(int seeds, double is_architecture) {
    Runs runs;
    for (int seed = 0; seed < seeds; ++seed) runs.push_back({seed, curve(is_architecture)});
    return runs;
  }

  // Δ(p) is linear in p: its mean over the range is its value in the middle.
  static double truth(const Setting& s, int domain, double low, double high) {
    return effect_at(s, domain, (low + high) / 2);
  }
  // Tokens of the architecture over tokens of the reference at a pre-training loss.
  static double truth_of_speed(const Setting& s, double loss) {
    const double ratio = (loss - 2.9) / (loss - 2.9 - s.speed);
    return ratio * ratio;
  }
  static double truth(const Setting& s, double low, double high) {
    double sum = 0;
    for (int d = 0; d < s.domains; ++d) sum += truth(s, d, low, high) / s.domains;
    return sum;
  }

 private:
  struct Documents {
    std::vector<double> tokens;
    std::vector<double> level;
    std::vector<double> difference;
  };

  static double effect_at(const Setting& s, int domain, double p) {
    return s.effect * (1 + 0.3 * domain) * (1 - 0.4 * (p - 3));
  }
  static double reference_at(int domain, double p) {
    return 1.2 + (1.1 + 0.1 * domain) * p + 0.05 * (p - 3) * (p - 3);
  }

  Documents draw_documents() {
    Documents drawn;
    for (int i = 0; i < s.documents; ++i) {
      drawn.tokens.push_back(std::ceil(500 * std::exp(s.length_spread * random.normal())));
      drawn.level.push_back(s.document_spread * random.normal());
      drawn.difference.push_back(s.architecture_document * (s.skewed_documents
                                                                ? -1 - std::log1p(-random.uniform())
                                                                : random.normal()));
    }
    return drawn;
  }

  std::vector<Point> curve(double is_architecture) {
    const double spread = s.seed_spread * (is_architecture ? s.architecture_luck : 1);
    const double loss_luck = s.seed_loss * random.normal();
    const double common = spread * random.normal();
    std::vector<double> luck;
    std::vector<std::vector<double>> of_documents;
    for (const Documents& domain : documents) {
      luck.push_back((common + spread * random.normal()) / std::sqrt(2.0));
      of_documents.emplace_back();
      for (size_t i = 0; i < domain.tokens.size(); ++i)
        of_documents.back().push_back(domain.level[i] + is_architecture * domain.difference[i] +
                                      s.seed_document * random.normal());
    }
    std::vector<Point> points;
    for (int k = 1; k <= s.evaluations; ++k) {
      const double p =
          2.9 + 0.4 / std::sqrt(double(k) / s.evaluations) + is_architecture * s.speed + loss_luck;
      Point point{1e6 * k, p + s.noise * random.normal(), {}};
      for (int d = 0; d < s.domains; ++d) {
        const double loss = reference_at(d, p) + is_architecture * effect_at(s, d, p) + luck[d] +
                            s.noise * random.normal();
        DomainLosses& at = point.out_of_domain["domain " + std::to_string(d)];
        at.tokens = documents[d].tokens;
        for (size_t i = 0; i < at.tokens.size(); ++i)
          at.nll.push_back(at.tokens[i] * (loss + of_documents[d][i]));
      }
      points.push_back(std::move(point));
    }
    return points;
  }

  Setting s;
  Random random;
  std::vector<Documents> documents;
};

}  // namespace assay::stats
