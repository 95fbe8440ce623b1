#include "report/tables.h"

#include <algorithm>
#include <cmath>
#include <regex>

#include "base/error.h"
#include "report/slices.h"

namespace assay::report {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

double number(const Json& json, const std::string& key) {
  return json.contains(key) && json[key].is_number() ? json[key].get<double>() : kNone;
}
std::string text(const Json& json, const std::string& key) {
  if (!json.contains(key) || json[key].is_null()) return "";
  return json[key].is_string() ? json[key].get<std::string>() : json[key].dump();
}
std::string id(const Setting& setting, const std::string& name) {
  return setting.name.empty() ? name : setting.name + "-" + name;
}

// "position 64–256" for position_64_256.
std::string words(const std::string& slice) {
  std::string out = slice;
  std::ranges::replace(out, '_', ' ');
  return std::regex_replace(out, std::regex("([0-9]) ([0-9])"), "$1–$2");
}
std::string pairs(const Json& object) {
  std::vector<std::string> out;
  for (const auto& [key, value] : object.items())
    out.push_back(key + ": " + (value.is_string() ? value.get<std::string>() : value.dump()));
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
  return std::sqrt(mean_over(runs, [&](const Run& run) { return std::pow(get(run) - mean, 2); }) * double(runs.size()) /
                   double(runs.size() - 1));
}

double bits_per_byte(const Run& run, const Setting& setting) {
  double sum = 0;
  for (const std::string& domain : setting.test)
    sum += number(run.evaluations.back().sets.value(domain + "." + setting.split, Json::object()), "bits_per_byte");
  return sum / double(setting.test.size());
}

}  // namespace

Table loss_table(const Setting& setting) {
  Table table{id(setting, "losses"),
              "Loss at the end of training",
              "Nats a token, mean over seeds, at the last evaluation. Architectures stand here at different "
              "pre-training losses; Δ below "
              "compares them at equal ones.",
              {{"architecture"}, {"seeds"}, {"training", Format::loss}, {"held-out", Format::loss}},
              {}};
  if (!setting.mixed)
    table.note += " Held-out: mean over the training domains. Mean: over the domains out of distribution.";
  for (const std::string& domain : setting.test) table.columns.push_back({domain, Format::loss});
  if (!setting.mixed) table.columns.push_back({"mean", Format::loss});
  table.columns.push_back({"sd over seeds", Format::loss});
  table.columns.push_back({"bits a byte", Format::loss});
  for (const Architecture& a : setting.architectures) {
    const auto last = [&](auto get) {
      return mean_over(a.runs, [&](const Run& run) { return get(run.evaluations.back()); });
    };
    std::vector<Cell> row = {a.name, std::to_string(a.runs.size()), last([](auto& e) { return e.training_loss; }),
                             last([](auto& e) { return e.held_out_loss; })};
    for (const std::string& domain : setting.test)
      row.push_back(last([&](auto& e) { return e.test_losses.at(domain); }));
    if (!setting.mixed) row.push_back(last([](auto& e) { return e.test_loss; }));
    row.push_back(spread_over(a.runs, [](const Run& run) { return run.evaluations.back().test_loss; }));
    row.push_back(mean_over(a.runs, [&](const Run& run) { return bits_per_byte(run, setting); }));
    table.rows.push_back(std::move(row));
  }
  return table;
}

Table degradation_table(const Setting& setting) {
  Table table{id(setting, "degradation"),
              "Degradation Δ",
              "Δ = mean, over the range of pre-training loss that both architectures reach, of (loss of the "
              "architecture − loss of the "
              "reference). Nats a token with 95 % interval, which counts seeds and test documents. Above 0: worse than "
              "the reference. Loss from, "
              "to: the shared range.",
              {{"architecture"}, {"at equal"}, {"average", Format::change}},
              {}};
  for (const std::string& domain : setting.test) table.columns.push_back({domain, Format::change});
  for (const char* name : {"loss from", "to"}) table.columns.push_back({name, Format::loss});
  for (const char* name : {"error from seeds", "error from documents"})
    table.columns.push_back({name, Format::loss, false});
  table.columns.push_back({"problem"});
  for (const Architecture& a : setting.architectures)
    for (const Comparison& c : a.comparisons) {
      const stats::Degradation& d = c.degradation;
      const bool good = d.problem.empty();
      std::vector<Cell> row = {a.name, std::string(name(c.kind)) + " loss", good ? Cell(d.average) : Cell(kNone)};
      for (const std::string& domain : setting.test) row.push_back(good ? Cell(d.domains.at(domain)) : Cell(kNone));
      for (const double value : {d.loss_low, d.loss_high, d.seed_error, d.document_error})
        row.push_back(good ? value : kNone);
      row.push_back(d.problem);
      table.rows.push_back(std::move(row));
    }
  return table;
}

Table convergence_table(const Setting& setting) {
  Table table{id(setting, "convergence"),
              "Speed of convergence",
              "Tokens needed to reach the lowest pre-training loss that every run of both reaches, and their ratio to "
              "the reference's. "
              "Below 1: faster.",
              {{"architecture"},
               {"loss of"},
               {"loss reached", Format::loss},
               {"tokens", Format::count},
               {"ratio, ×", Format::ratio},
               {"problem"}},
              {}};
  for (const Architecture& a : setting.architectures)
    for (const Comparison& c : a.comparisons) {
      const bool good = c.convergence.problem.empty();
      table.rows.push_back({a.name, std::string(name(c.kind)) + " text", good ? c.convergence.loss : kNone,
                            good ? Cell(c.convergence.tokens) : Cell(kNone),
                            good ? Cell(c.convergence.ratio) : Cell(kNone), c.convergence.problem});
    }
  return table;
}

Table slice_table(const Setting& setting) {
  Table table{id(setting, "slices"),
              "Where the difference comes from",
              "Test loss at the last evaluation by kind of target token, mean over domains and seeds: the reference's "
              "loss, and the others' "
              "difference to it (at the end of training, not at equal pre-training loss). Frequent, rare and unseen: "
              "in the training "
              "text. Repeated bigram: an earlier bigram of the context predicts the target; other: the rest.",
              {{"slice"}},
              {}};
  for (const Architecture& a : setting.architectures)
    table.columns.push_back({a.style == 0 ? a.name + ", loss" : a.name, a.style == 0 ? Format::loss : Format::change});
  const auto add = [&](std::string slice, auto&& value) {
    std::vector<Cell> row = {std::move(slice)};
    for (const Architecture& a : setting.architectures)
      row.push_back(a.style == 0 ? value(a)
                                 : value(a) - (setting.reference().style == 0 ? value(setting.reference()) : kNone));
    table.rows.push_back(std::move(row));
  };
  for (const std::string& slice : slice_names(setting)) {
    add(words(slice), [&](const Architecture& a) { return slice_loss(a, setting, slice); });
  }
  if (!table.rows.empty())
    add("share above 12 nats, %", [&](const Architecture& a) { return share_above_12_nats(a, setting); });
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
    for (const Run& run : a.runs)
      for (const auto& [set, losses] : run.evaluations.back().sets.items()) {
        const Json slices = losses.value("slices", Json::object());
        for (const auto& [slice, value] : slices.items())
          table.rows.push_back({text(run.row, "name"), a.name, std::to_string(run.seed), set, slice,
                                number(value, "loss"), number(value, "tokens"), number(value, "share")});
      }
  return table;
}

Table speed_table(const Setting& setting) {
  Table table{
      id(setting, "speed"),
      "Speed and memory",
      "Median over seeds. State: what one sequence carries from token to token when decoding (for attention, its "
      "cache). Runs that "
      "shared a machine slowed each other: compare within one study, and use the benchmarks for claims about kernels.",
      {{"architecture"},
       {"tokens/s", Format::count},
       {"training time", Format::seconds},
       {"peak memory", Format::bytes},
       {"parameters", Format::count},
       {"forward FLOPs a token", Format::count},
       {"state at 2,048 tokens", Format::bytes},
       {"state at 102,400 tokens", Format::bytes},
       {"device"}},
      {}};
  for (const Architecture& a : setting.architectures) {
    const Json &first = a.runs.front().row["provenance"], state = first.value("state_bytes", Json::object());
    const auto outcome = [&](const char* key) {
      return median_over(a.runs, [&](const Run& run) { return number(run.row["outcome"], key); });
    };
    table.rows.push_back({a.name, outcome("tokens_per_second"), outcome("seconds"), outcome("peak_memory_bytes"),
                          number(first, "parameters"), number(first, "flops_per_token"), number(state, "2048"),
                          number(state, "102400"), text(first, "device")});
  }
  return table;
}

Table probe_table(const Setting& setting) {
  Table table{
      id(setting, "probes"),
      "What the mixers do with earlier positions",
      "Measured on held-out text at the end of training, mean over layers and queries, median over seeds. Visibility: "
      "share of "
      "the earlier positions whose input moves a query's output (by more than a thousandth of what the strongest "
      "does). Real relation: whether that influence goes with the content (1) or stays with the position (0) when "
      "neighbours change places. Uniformity: entropy of the influence; 1: all earlier positions alike, 0: one. "
      "Best layer: the layer that sees most. Attention entropy: of the softmax weights, where there are any.",
      {{"architecture"},
       {"visibility", Format::loss},
       {"best layer", Format::loss},
       {"real relation", Format::loss},
       {"uniformity", Format::loss},
       {"attention entropy", Format::loss}},
      {}};
  for (const Architecture& a : setting.architectures) {
    const auto over_runs = [&](auto get) {
      return median_over(a.runs, [&](const Run& run) {
        const Json& outcome = run.row["outcome"];
        return outcome.contains("probes") ? get(outcome["probes"]) : kNone;
      });
    };
    const auto mean = [&](const char* key) {
      return over_runs([&](const Json& probes) { return number(probes.value("mean", Json::object()), key); });
    };
    const double best = over_runs([](const Json& probes) {
      double most = kNone;
      for (const Json& layer : probes.value("layers", Json::array()))
        most = std::fmax(most, number(layer, "visibility"));
      return most;
    });
    if (std::isfinite(mean("visibility")))
      table.rows.push_back(
          {a.name, mean("visibility"), best, mean("real_relation"), mean("uniformity"), mean("attention_entropy")});
  }
  return table;
}

Table run_table(const Study& study) {
  Table table{"runs",
              "Where each number comes from",
              "One line a run. The content key covers configuration with all defaults, data, seed and numerics "
              "versions; equal keys are "
              "equal runs. Losses of every evaluation: tables/evaluations.csv; of every document: "
              "evaluations/*.safetensors in the folder.",
              {{"run"},
               {"status"},
               {"key", Format::code},
               {"steps"},
               {"final loss", Format::loss},
               {"device"},
               {"torch"},
               {"assay"},
               {"commit", Format::code},
               {"data", Format::code},
               {"kernel paths"},
               {"numerics"},
               {"started"},
               {"folder"}},
              {}};
  for (const Json& row : study.runs) {
    const Json &p = row["provenance"], &o = row["outcome"];
    table.rows.push_back({text(row, "name"), text(row, "status"), text(row, "key"), text(o, "steps"),
                          number(o, "final_loss"), text(p, "device"), text(p, "torch"), text(p, "assay"),
                          text(p, "commit"), text(p, "data"), pairs(p.value("paths", Json::object())),
                          pairs(p.value("numerics", Json::object())), text(p, "started"), text(row, "folder")});
  }
  return table;
}

namespace {
// A table for the CSV alone, with rows for every evaluation of every run: what names the evaluation, then `columns`.
// `rows` gives the cells of these, a vector a row.
template <class Rows>
Table by_evaluation(const Setting& setting, const std::string& name, std::vector<Column> columns, Rows&& rows) {
  Table table{
      id(setting, name), "", "", {{"run"}, {"architecture"}, {"seed"}, {"step"}, {"tokens", Format::count}}, {}, false};
  table.columns.insert(table.columns.end(), columns.begin(), columns.end());
  for (const Architecture& a : setting.architectures)
    for (const Run& run : a.runs)
      for (const Evaluation& e : run.evaluations)
        for (const std::vector<Cell>& cells : rows(e)) {
          std::vector<Cell> row = {text(run.row, "name"), a.name, std::to_string(run.seed), std::to_string(e.step),
                                   e.tokens};
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
                                       {"bits a byte", Format::loss},
                                       {"evaluated tokens", Format::count}};
  return by_evaluation(setting, "evaluations", columns, [](const Evaluation& e) {
    std::vector<std::vector<Cell>> rows;
    for (const auto& [set, losses] : e.sets.items())
      rows.push_back(
          {e.training_loss, set, number(losses, "loss"), number(losses, "bits_per_byte"), number(losses, "tokens")});
    return rows;
  });
}

Table entropy_table(const Setting& setting) {
  const std::vector<Column> columns = {{"layer"}, {"head"}, {"entropy", Format::loss}};
  return by_evaluation(setting, "attention-entropy", columns, [](const Evaluation& e) {
    std::vector<std::vector<Cell>> rows;
    for (size_t layer = 0; layer < e.attention_entropy.size(); ++layer)
      for (size_t head = 0; head < e.attention_entropy[layer].size(); ++head)
        rows.push_back({std::to_string(layer), std::to_string(head), e.attention_entropy[layer][head]});
    return rows;
  });
}

}  // namespace assay::report
