#include "report/tables.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <regex>

#include "base/error.h"
#include "report/slices.h"

namespace assay::report {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

std::string id(const Setting& setting, const std::string& name) { return table_id(setting, name); }

// "position 64–256" for position_64_256.
std::string words(const std::string& slice) {
  std::string out = slice;
  std::ranges::replace(out, '_', ' ');
  return std::regex_replace(out, std::regex("([0-9]) ([0-9])"), "$1–$2");
}
template <class Value>
std::string pairs(const std::map<std::string, Value>& values) {
  std::vector<std::string> out;
  for (const auto& [key, value] : values) out.push_back(fmt::format("{}: {}", key, value));
  return join(out, "; ");
}

template <class Get>
double median_over(const std::vector<Run>& runs, Get&& get) {
  std::vector<double> values;
  for (const Run& run : runs)
    if (const double value = get(run); std::isfinite(value)) values.push_back(value);
  if (values.empty()) return kNone;
  std::ranges::sort(values);
  const size_t half = values.size() / 2;
  return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

template <class Get>
double spread_over(const std::vector<Run>& runs, Get&& get) {
  if (runs.size() < 2) return kNone;
  const double mean = mean_over(runs, get);
  return std::sqrt(mean_over(runs, [&](const Run& run) { return std::pow(get(run) - mean, 2); }) *
                   double(runs.size()) / double(runs.size() - 1));
}

}  // namespace

double tokens_per_second(const Architecture& a) {
  return median_over(a.runs(), [](const Run& run) { return run.data.outcome.tokens_per_second; });
}

double state_bytes_at_100k(const Architecture& a) {
  return double(a.runs().front().data.provenance.state_bytes.at_long);
}

Table loss_table(const Setting& setting) {
  Table table{.id = id(setting, "losses"),
              .title = "Loss at the end of training",
              .note = fmt::format(
                  "The losses are in nats per token, "
                  "as means over the seeds of the largest budget of each architecture. "
                  "The architectures differ in their {} here; Δ_end compares them at the same one. "
                  "Standard deviation and bits per byte are those of the {}.",
                  setting.pretraining_name(), setting.test_name())};
  if (!setting.mixed)
    table.note +=
        " The column held-out is a mean over the training domains, "
        "and the column mean is one over the out-of-domain test domains.";
  table.columns = {{"architecture"},
                   {"tokens", Format::tokens},
                   {"seeds", Format::count},
                   {"training", Format::loss},
                   {"held-out", Format::loss}};
  for (const std::string& domain : setting.test) table.columns.push_back({domain, Format::loss});
  if (!setting.mixed) table.columns.push_back({"mean", Format::loss});
  table.columns.push_back({"standard deviation over seeds", Format::loss});
  table.columns.push_back({"bits per byte", Format::loss});
  for (const Architecture& a : setting.architectures) {
    const auto mean = [&](auto get) {
      return mean_over(a.runs(), [&](const Run& run) { return get(run.end); });
    };
    std::vector<Cell> row = {a.name, double(a.tokens()), std::to_string(a.runs().size()),
                             mean([](const RunEnd& e) { return e.training_loss; }),
                             mean([](const RunEnd& e) { return e.held_out_loss; })};
    for (const std::string& domain : setting.test)
      row.push_back(mean([&](const RunEnd& e) { return e.test_losses.at(domain); }));
    if (!setting.mixed) row.push_back(mean([](const RunEnd& e) { return e.test_loss; }));
    row.push_back(spread_over(a.runs(), [](const Run& run) { return run.end.test_loss; }));
    row.push_back(mean([](const RunEnd& e) { return e.bits_per_byte; }));
    table.rows.push_back(std::move(row));
  }
  return table;
}

Table degradation_table(const Setting& setting) {
  Table table{.id = id(setting, "degradation"),
              .title = "Secondary: mean difference along training",
              .note =
                  "The difference is the loss of the architecture minus that of the reference. "
                  "The mean is over the range of pre-training loss that both reach along training, "
                  "at the same budget. "
                  "The unit is nats per token. The 95 % interval counts seeds only. "
                  "This number is biased and carries no verdict: "
                  "the learning rates of the two models differ along the schedule; "
                  "a model that learns faster is compared with a reference later in its schedule; "
                  "the first half of training dominates the range."};
  table.columns = {
      {"architecture"}, {"at equal"}, {"tokens", Format::tokens}, {"mean", Format::change}};
  for (const std::string& domain : setting.test) table.columns.push_back({domain, Format::change});
  for (const char* name : {"loss from", "loss to"}) table.columns.push_back({name, Format::loss});
  table.columns.push_back({"error of seeds", Format::loss, false});
  table.columns.push_back({"problem"});
  for (const Architecture& a : setting.architectures)
    for (const Comparison& c : a.comparisons) {
      const stats::Degradation& d = c.degradation;
      const bool good = d.problem.empty();
      std::vector<Cell> row = {a.name, std::string(name(c.kind)) + " loss",
                               c.tokens > 0 ? double(c.tokens) : kNone,
                               good ? Cell(d.average) : Cell(kNone)};
      for (const std::string& domain : setting.test)
        row.push_back(good ? Cell(d.domains.at(domain)) : Cell(kNone));
      for (const double value : {d.loss_low, d.loss_high, d.seed_error})
        row.push_back(good ? value : kNone);
      row.push_back(d.problem);
      table.rows.push_back(std::move(row));
    }
  return table;
}

Table convergence_table(const Setting& setting) {
  Table table{.id = id(setting, "convergence"),
              .title = "Speed of convergence along training",
              .note =
                  "The table shows the tokens needed to reach a pre-training loss, "
                  "and their ratio to those of the reference. "
                  "The loss is the lowest one that every run of both reaches at the same budget. "
                  "A ratio below 1 means that the architecture learns faster."};
  table.columns = {{"architecture"},
                   {"loss of"},
                   {"loss reached", Format::loss},
                   {"tokens", Format::count},
                   {"ratio, ×", Format::ratio},
                   {"problem"}};
  for (const Architecture& a : setting.architectures)
    for (const Comparison& c : a.comparisons) {
      const bool good = c.convergence.problem.empty();
      table.rows.push_back({a.name, std::string(name(c.kind)) + " text",
                            good ? c.convergence.loss : kNone,
                            good ? Cell(c.convergence.tokens) : Cell(kNone),
                            good ? Cell(c.convergence.ratio) : Cell(kNone), c.convergence.problem});
    }
  return table;
}

Table slice_table(const Setting& setting) {
  Table table{.id = id(setting, "slices"),
              .title = "Loss by kind of target token",
              .note =
                  "The losses are those of the last evaluation, as means over domains and seeds. "
                  "The column of the reference shows its loss. "
                  "The other columns show the difference to it, at the largest budget of both: "
                  "at equal tokens, not at equal pre-training loss. "
                  "Targets are frequent, rare or unseen in the training text. "
                  "A target is a repeated bigram if an earlier bigram of the context predicts it. "
                  "All others are in the row other."};
  table.columns = {{"slice"}};
  for (const Architecture& a : setting.architectures) {
    const bool is_reference = a.style == 0;
    table.columns.push_back(
        {is_reference ? a.name + ", loss" : a.name, is_reference ? Format::loss : Format::change});
  }
  const auto add = [&](const std::string& slice, auto&& value) {
    std::vector<Cell> row = {slice};
    for (const Architecture& a : setting.architectures) {
      if (a.style == 0) {
        row.push_back(value(a.runs()));
        continue;
      }
      const RunPair pair =
          setting.has_reference() ? runs_of_equal_budget(a, setting.reference()) : RunPair{};
      row.push_back(pair.first ? value(*pair.first) - value(*pair.second) : kNone);
    }
    table.rows.push_back(std::move(row));
  };
  for (const std::string& slice : slice_names(setting))
    add(words(slice), [&](const auto& runs) { return slice_loss(runs, setting, slice); });
  std::vector<std::string> without;
  for (const Architecture& a : setting.architectures)
    if (a.style != 0 && setting.has_reference() &&
        !runs_of_equal_budget(a, setting.reference()).first)
      without.push_back(a.name);
  if (!without.empty())
    table.note += fmt::format(
        " No difference is shown for {}, because there is no budget that the reference has, too.",
        join(without));
  if (!table.rows.empty())
    add("share above 12 nats, %",
        [&](const auto& runs) { return share_above_12_nats(runs, setting); });
  return table;
}

Table slice_detail_table(const Setting& setting) {
  Table table{id(setting, "slices-by-run"),
              "",
              "",
              {{"run"},
               {"architecture"},
               {"seed"},
               {"domain"},
               {"slice"},
               {"loss", Format::loss},
               {"tokens", Format::count},
               {"share", Format::loss}},
              {},
              false};
  for (const Architecture& a : setting.architectures)
    for (const Run* run : a.all_runs())
      for (const auto& [set, losses] : run->evaluations.back().sets) {
        if (!losses.slices) continue;
        for (const auto& [slice, value] : *losses.slices)
          table.rows.push_back({run->name, a.name, std::to_string(run->seed), set, slice,
                                value.loss, double(value.tokens), value.share});
      }
  return table;
}

Table speed_table(const Setting& setting) {
  Table table{.id = id(setting, "speed"),
              .title = "Cost of the runs",
              .note =
                  "The values are medians over the runs of the largest budget. "
                  "The state is what a sequence keeps from token to token when decoding. "
                  "For attention, this is its cache. "
                  "Runs that shared a machine slowed each other, "
                  "so a difference in tokens/s need not come from the architectures. "
                  "Use the benchmarks for claims about kernels."};
  table.columns = {{"architecture"},
                   {"tokens/s", Format::count},
                   {"training time", Format::seconds},
                   {"peak memory", Format::bytes},
                   {"parameters", Format::count},
                   {"forward FLOPs per token", Format::count},
                   {"state at 2,048 tokens", Format::bytes},
                   {"state at 102,400 tokens", Format::bytes},
                   {"device"}};
  for (const Architecture& a : setting.architectures) {
    const run::Provenance& first = a.runs().front().data.provenance;
    const auto median = [&](auto get) {
      return median_over(a.runs(), [&](const Run& run) { return double(get(run.data.outcome)); });
    };
    table.rows.push_back(
        {a.name, tokens_per_second(a), median([](const run::Outcome& o) { return o.seconds; }),
         median([](const run::Outcome& o) { return o.peak_memory_bytes; }),
         double(first.parameters), first.flops_per_token, double(first.state_bytes.at_short),
         state_bytes_at_100k(a), first.device});
  }
  return table;
}

Table probe_table(const Setting& setting) {
  Table table{.id = id(setting, "probes"),
              .title = "What the mixers do with earlier positions",
              .note =
                  "Measured on held-out text at the end of training. "
                  "The values are means over layers and queries, and medians over seeds. "
                  "Visibility is the share of the earlier positions that influence a query. "
                  "Such a position changes the output by over 1/1000 of the largest change. "
                  "The best layer is the one with the highest visibility. "
                  "Real relation says what the influence follows when neighbours are exchanged: "
                  "the content (1) or the position (0). "
                  "Uniformity is the entropy of the influence: "
                  "1 if all earlier positions count alike, 0 if one position counts. "
                  "Attention entropy is that of the softmax weights, where there are any."};
  table.columns = {{"architecture"},
                   {"visibility", Format::loss},
                   {"best layer", Format::loss},
                   {"real relation", Format::loss},
                   {"uniformity", Format::loss},
                   {"attention entropy", Format::loss}};
  for (const Architecture& a : setting.architectures) {
    const auto over_runs = [&](auto get) {
      return median_over(a.runs(), [&](const Run& run) {
        const auto& probes = run.data.outcome.probes;
        return probes ? get(*probes) : kNone;
      });
    };
    const auto mean = [&](double run::MeanProbe::* value) {
      return over_runs([&](const run::Probes& probes) { return probes.mean.*value; });
    };
    const double best = over_runs([](const run::Probes& probes) {
      double most = kNone;
      for (const run::LayerProbe& layer : probes.layers) most = std::fmax(most, layer.visibility);
      return most;
    });
    const double visibility = mean(&run::MeanProbe::visibility);
    if (std::isfinite(visibility))
      table.rows.push_back({a.name, visibility, best, mean(&run::MeanProbe::real_relation),
                            mean(&run::MeanProbe::uniformity),
                            mean(&run::MeanProbe::attention_entropy)});
  }
  return table;
}

Table run_table(const Study& study) {
  Table table{.id = "runs",
              .title = "Provenance of every number",
              .note =
                  "One row per run. The content key covers the configuration with all defaults, "
                  "the data, the seed, the budget, the learning rate and the numerics versions: "
                  "equal keys are equal runs. Found in: "
                  "where the record of a run that was reused was found. "
                  "The CSV also has the kernels of every run. "
                  "Losses of every evaluation: tables/evaluations.csv."};
  table.columns = {{"run"},
                   {"purpose"},
                   {"status"},
                   {"key", Format::code},
                   {"tokens", Format::tokens},
                   {"learning rate"},
                   {"steps"},
                   {"last training loss", Format::loss},
                   {"device"},
                   {"torch"},
                   {"assay"},
                   {"commit", Format::code},
                   {"data", Format::code},
                   {.name = "kernel paths", .shown = false},
                   {.name = "numerics", .shown = false},
                   {"started"},
                   {"folder"},
                   {"found in"},
                   {"reason"}};
  for (const study::StudyRun& run : study.runs) {
    const run::Provenance p = run.finished ? run.finished->provenance : run::Provenance{};
    table.rows.push_back({run.name, run.purpose, run.status, run.key, double(run.tokens),
                          fmt::format("{:g}", run.learning_rate),
                          run.finished ? std::to_string(run.finished->outcome.steps) : "",
                          run.finished ? run.finished->outcome.final_loss : kNone, p.device,
                          p.torch, p.assay, p.commit, p.data, pairs(p.paths), pairs(p.numerics),
                          p.started, run.folder, run.origin, run.reason});
  }
  return table;
}

Table kernel_table(const Study& study) {
  Table table{.id = "kernels",
              .title = "Kernels that the runs used",
              .note = "Runs are compared only if their numerics versions are equal.",
              .columns = {{"operation"}, {"kernel"}, {"numerics version"}, {"runs"}}};
  std::map<std::array<std::string, 3>, int64_t> runs;  // by operation, kernel and version
  for (const study::StudyRun& run : study.runs) {
    if (!run.finished) continue;
    const run::Provenance& provenance = run.finished->provenance;
    std::map<std::string, std::pair<std::string, std::string>> operations;  // kernel, version
    for (const auto& [operation, path] : provenance.paths) operations[operation].first = path;
    for (const auto& [operation, version] : provenance.numerics)
      operations[operation].second = std::to_string(version);
    for (const auto& [operation, used] : operations) ++runs[{operation, used.first, used.second}];
  }
  for (const auto& [key, count] : runs)
    table.rows.push_back({key[0], key[1], key[2], std::to_string(count)});
  return table;
}

namespace {
// A table for the CSV alone, with rows for every evaluation of every run: what names the
// evaluation, then `columns`. `rows` gives the cells of these, one vector per row.
template <class Rows>
Table by_evaluation(const Setting& setting, const std::string& name, std::vector<Column> columns,
                    Rows&& rows) {
  Table table{id(setting, name),
              "",
              "",
              {{"run"}, {"architecture"}, {"seed"}, {"step"}, {"tokens", Format::count}},
              {},
              false};
  table.columns.insert(table.columns.end(), columns.begin(), columns.end());
  for (const Architecture& a : setting.architectures)
    for (const Run* run : a.all_runs())
      for (const Evaluation& e : run->evaluations)
        for (const std::vector<Cell>& cells : rows(e)) {
          std::vector<Cell> row = {run->name, a.name, std::to_string(run->seed),
                                   std::to_string(e.step), e.tokens};
          row.insert(row.end(), cells.begin(), cells.end());
          table.rows.push_back(std::move(row));
        }
  return table;
}
}  // namespace

Table evaluation_table(const Setting& setting) {
  const std::vector<Column> columns = {{"training loss", Format::loss},
                                       {"set"},
                                       {"loss", Format::loss},
                                       {"bits per byte", Format::loss},
                                       {"evaluated tokens", Format::count}};
  return by_evaluation(setting, "evaluations", columns, [](const Evaluation& e) {
    std::vector<std::vector<Cell>> rows;
    for (const auto& [set, losses] : e.sets)
      rows.push_back(
          {e.training_loss, set, losses.loss, number(losses.bits_per_byte), number(losses.tokens)});
    return rows;
  });
}

Table entropy_table(const Setting& setting) {
  const std::vector<Column> columns = {{"layer"}, {"head"}, {"entropy", Format::loss}};
  return by_evaluation(setting, "attention-entropy", columns, [](const Evaluation& e) {
    std::vector<std::vector<Cell>> rows;
    for (size_t layer = 0; layer < e.attention_entropy.size(); ++layer)
      for (size_t head = 0; head < e.attention_entropy[layer].size(); ++head)
        rows.push_back(
            {std::to_string(layer), std::to_string(head), e.attention_entropy[layer][head]});
    return rows;
  });
}

}  // namespace assay::report
