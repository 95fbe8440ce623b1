// assay eval tasks MODEL… --tasks LIST --data DIR
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "base/interrupt.h"
#include "base/progress.h"
#include "cli/command.h"
#include "cli/model.h"
#include "cli/task_files.h"
#include "cli/task_results.h"
#include "report/table.h"
#include "run/folder.h"
#include "tasks/evaluate.h"
#include "tasks/metrics.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

struct Options {
  ModelOptions model;
  std::vector<std::string> models;
  std::vector<std::string> tasks;
  fs::path output;
  fs::path items;
  int64_t few_shot = -1;
  bool alone = false;
  bool keep = false;
  bool dry_run = false;
  std::string prefix = "bos";
  tasks::EvaluateOptions evaluate{.data = "."};
};

struct Result {
  std::string task;
  std::string model;
  std::vector<std::string> metrics;
  tasks::Ran ran;
  std::vector<tasks::Item> items;
};

Json to_json(const stats::Interval& interval) { return {interval.low, interval.high}; }

Json metrics_json(const std::vector<tasks::Item>& items, const std::vector<std::string>& metrics) {
  Json out = Json::object();
  for (const std::string& metric : metrics) {
    const tasks::Summary summary = tasks::summarize(items, metric);
    out[metric] = {{"value", summary.value},
                   {"interval", to_json(summary.interval)},
                   {"standard_error", summary.standard_error},
                   {"items", summary.items}};
  }
  return out;
}

Json groups_json(const Result& result) {
  std::map<std::string, std::vector<tasks::Item>> groups;
  for (const tasks::Item& item : result.items)
    if (!item.group.empty()) groups[item.group].push_back(item);
  Json out = Json::object();
  for (const auto& [name, items] : groups) out[name] = metrics_json(items, result.metrics);
  return out;
}

Json to_json(const Result& result) {
  Json out = {{"task", result.task},
              {"model", result.model},
              {"metrics", metrics_json(result.items, result.metrics)},
              {"items", result.ran.items},
              {"answered_now", result.ran.answered},
              {"truncated", result.ran.truncated},
              {"tokens_read", result.ran.tokens_read},
              {"tokens_without_sharing", result.ran.tokens_alone},
              {"seconds", result.ran.seconds}};
  if (const Json groups = groups_json(result); !groups.empty()) out["groups"] = groups;
  return out;
}

// Every model against the first, task by task.
Json differences_json(const std::vector<Result>& results) {
  Json out = Json::array();
  for (const Result& first : results) {
    if (first.model != results.front().model) continue;
    for (const Result& other : results) {
      if (other.task != first.task || other.model == first.model) continue;
      for (const std::string& metric : first.metrics) {
        const stats::Interval found = tasks::difference(other.items, first.items, metric);
        out.push_back({{"task", first.task},
                       {"metric", metric},
                       {"model", other.model},
                       {"reference", first.model},
                       {"difference", found.estimate},
                       {"interval", to_json(found)}});
      }
    }
  }
  return out;
}

// The accuracy of guessing: the mean of 1 / choices. NaN where an item has no choices.
double chance_of(const Result& result, const std::string& metric) {
  double sum = 0;
  for (const tasks::Item& item : result.items) {
    const size_t choices = item.scores.value("scores", Json::array()).size();
    if (choices < 2 || !metric.starts_with("acc")) return std::nan("");
    sum += 1 / double(choices);
  }
  return sum / double(result.items.size());
}

// The last parts of the path of a model, as many as tell all models apart.
std::string short_name(const std::string& model, const std::vector<Result>& results) {
  const auto last = [](const std::string& path, int parts) {
    fs::path rest = fs::path(path + "/").lexically_normal().parent_path();
    fs::path name;
    for (; parts > 0 && rest.has_filename(); --parts, rest = rest.parent_path())
      name = name.empty() ? rest.filename() : rest.filename() / name;
    return name.string();
  };
  for (int parts = 1; parts < 8; ++parts)
    if (std::ranges::none_of(results, [&](const Result& other) {
          return other.model != model && last(other.model, parts) == last(model, parts);
        }))
      return last(model, parts);
  return model;
}

report::Table scores_table(const std::vector<Result>& results) {
  report::Table table{.id = "tasks",
                      .title = "Tasks",
                      .note = "",
                      .columns = {{"task"},
                                  {"metric"},
                                  {"model"},
                                  {"value with 95 % interval", report::Format::loss},
                                  {"chance", report::Format::loss},
                                  {"items", report::Format::text},
                                  {"truncated", report::Format::text}}};
  for (const Result& result : results)
    for (const std::string& metric : result.metrics)
      table.rows.push_back({result.task, metric, short_name(result.model, results),
                            tasks::summarize(result.items, metric).interval,
                            chance_of(result, metric), std::to_string(result.ran.items),
                            std::to_string(result.ran.truncated)});
  return table;
}

report::Table differences_table(const Json& differences) {
  report::Table table{.id = "differences",
                      .title = "Differences",
                      .note = "",
                      .columns = {{"task"},
                                  {"metric"},
                                  {"model"},
                                  {"reference"},
                                  {"difference with 95 % interval", report::Format::change}}};
  for (const Json& row : differences)
    table.rows.push_back(
        {row["task"].get<std::string>(), row["metric"].get<std::string>(),
         row["model"].get<std::string>(), row["reference"].get<std::string>(),
         stats::Interval{row["difference"], row["interval"][0], row["interval"][1]}});
  return table;
}

void write_items(const fs::path& file, const std::vector<Result>& results) {
  AtomicFile out(file);
  for (const Result& result : results)
    for (const tasks::Item& item : result.items) {
      Json line = {{"task", result.task}, {"model", result.model}, {"item", item.index}};
      const Json& metrics = item.scores["metrics"];
      const std::string& first = result.metrics.front();
      line["correct"] = metrics.value(first, 0.0);
      line["scores"] = item.scores.value("scores", Json::array());
      for (const char* key : {"metrics", "prediction", "gold", "weights"})
        if (item.scores.contains(key)) line[key] = item.scores[key];
      if (item.dropped > 0) line["dropped_tokens"] = item.dropped;
      out.write(line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
    }
  out.commit();
}

TrainedModel open_model(const Options& o, const std::string& name) {
  ModelOptions options = o.model;
  options.model = name;
  return TrainedModel(options);
}

tasks::Subject subject_of(const Options& o, const TrainedModel& trained) {
  return {*trained.model, trained.need_tokenizer(), trained.path, trained.weights_hash(),
          o.model.precision};
}

Result evaluate_task(const Options& o, const tasks::Task& task, const tasks::Subject& subject,
                     tasks::Results& results, Progress& progress) {
  const auto show = [&](int64_t answered, int64_t all) {
    progress.show(fmt::format("{}: {}: {}/{} items", subject.name, task.name, answered, all));
  };
  Result result{task.name,
                subject.name,
                task.metrics,
                tasks::evaluate(task, subject, o.evaluate, results, show),
                {}};
  result.items = results.items(result.ran.key);
  if (o.evaluate.limit > 0)  // an earlier evaluation may have answered more
    std::erase_if(result.items,
                  [&](const tasks::Item& item) { return int64_t(item.index) >= o.evaluate.limit; });
  if (result.ran.truncated > 0)
    progress.log(fmt::format(
        "{}: {}: {} items are longer than the model reads; their first tokens were left out",
        subject.name, task.name, result.ran.truncated));
  return result;
}

std::vector<Result> evaluate_model(const Options& o, const std::string& name,
                                   const std::vector<tasks::Task>& list, tasks::Results& results,
                                   Progress& progress) {
  const TrainedModel trained = open_model(o, name);
  const tasks::Subject subject = subject_of(o, trained);
  std::vector<Result> out;
  for (const tasks::Task& task : list)
    out.push_back(evaluate_task(o, task, subject, results, progress));
  return out;
}

// evaluate_model for a run: items and results go to its folder. A failed task is recorded, too.
std::vector<Result> evaluate_run(const Options& o, const run::Folder& folder,
                                 const std::vector<tasks::Task>& list, Progress& progress) {
  const FolderLock lock(folder.path);
  const TrainedModel trained = open_model(o, folder.path);
  const tasks::Subject subject = subject_of(o, trained);
  tasks::Results stored(folder.task_items());
  run::TaskResults kept;
  if (folder.tasks().exists()) kept = folder.tasks().read();
  std::vector<Result> out;
  for (const tasks::Task& task : list) {
    std::string key;
    try {
      key = tasks::question_key(task, subject.tokenizer, o.evaluate);
      out.push_back(evaluate_task(o, task, subject, stored, progress));
      put_result(kept.results, result_of(task, key, out.back().items));
    } catch (const Interrupted&) {
      throw;
    } catch (const std::exception& error) {
      progress.log(fmt::format("{}: {} failed: {}", subject.name, task.name, error.what()));
      put_result(kept.results, {.name = task.name, .key = key, .problem = error.what()});
    }
    folder.tasks().write(kept);
  }
  return out;
}

std::vector<Result> evaluate_runs(const Options& o, const std::vector<tasks::Task>& list) {
  for (const std::string& name : o.models)
    if (!run::Folder{name}.outcome().exists())
      fail("{}: --keep is for finished runs. Nothing was evaluated.", name);
  std::vector<Result> results;
  Progress progress;
  for (const std::string& name : o.models)
    for (Result& result : evaluate_run(o, {name}, list, progress))
      results.push_back(std::move(result));
  return results;
}

std::vector<Result> evaluate_models(const Options& o, const std::vector<tasks::Task>& list) {
  tasks::Results stored(o.output);
  std::vector<Result> results;
  Progress progress;
  for (const std::string& name : o.models)
    for (Result& result : evaluate_model(o, name, list, stored, progress))
      results.push_back(std::move(result));
  return results;
}

std::vector<Result> evaluate(const Options& o, const std::vector<tasks::Task>& list) try {
  return o.keep ? evaluate_runs(o, list) : evaluate_models(o, list);
} catch (const Interrupted&) {
  if (!o.keep && o.output.empty()) throw;
  throw Interrupted(
      fmt::format("interrupted; {} the items answered so far, and the same command continues",
                  o.keep ? "the folders of the runs have" : o.output.string() + " has"));
}

// Reads tasks and documents with the tokenizer, and evaluates nothing.
void show_demands(const Options& o, const std::vector<tasks::Task>& list) {
  if (o.model.tokenizer.empty())
    fail("--dry-run needs --tokenizer, a SentencePiece model. Nothing was evaluated.");
  const data::Tokenizer tokenizer(o.model.tokenizer);
  run::TaskQuestions found;
  report::Table table{.id = "tasks",
                      .title = "Tasks",
                      .columns = {{"task"},
                                  {"items", report::Format::text},
                                  {"longest input, tokens", report::Format::text},
                                  {"recall task"}}};
  Progress progress;
  for (const tasks::Task& task : list) {
    progress.show(fmt::format("reading {}", task.name));
    const tasks::Demand demand = tasks::demand_of(task, tokenizer, o.evaluate);
    found.tasks.push_back({.name = task.name,
                           .key = tasks::question_key(task, tokenizer, o.evaluate),
                           .recall = task.config.recall,
                           .metrics = task.metrics,
                           .items = demand.items,
                           .longest = demand.longest,
                           .least = demand.least});
    table.rows.push_back({task.name, std::to_string(demand.items), std::to_string(demand.longest),
                          task.config.recall ? "yes" : "no"});
  }
  print(assay::to_json(found), report::to_text(table));
}

void check_different(std::vector<std::string> names) {
  std::ranges::sort(names);
  const auto twice = std::ranges::adjacent_find(names);
  if (twice != names.end()) fail("{} is given twice. Nothing was evaluated.", *twice);
}

void check_options(const Options& o) {
  check_different(o.models);
  check_different(o.tasks);
  if (!o.dry_run && o.models.empty())
    fail("MODEL is required, except with --dry-run. Nothing was evaluated.");
  if (!o.items.empty()) check_output(o.items);
  if (o.keep && !o.output.empty())
    fail("--keep stores the items in the folder of the run; -o names another file. Give one.");
  const bool both = !o.items.empty() && !o.output.empty();
  const auto whole = [](const fs::path& file) { return fs::weakly_canonical(fs::absolute(file)); };
  if (both && whole(o.items) == whole(o.output))
    fail("{}: -o and --items name the same file; give two. Nothing was evaluated.",
         o.items.string());
}

void run(Options o) {
  check_options(o);
  o.evaluate.scorer.share = !o.alone;
  o.evaluate.prefix =
      o.prefix == "bos" ? tasks::Encoder::Prefix::bos : tasks::Encoder::Prefix::separator;
  std::vector<tasks::Task> list;
  for (const std::string& name : o.tasks)
    list.push_back(tasks::Task::read(tasks::find_task(name, task_folders()), o.few_shot));
  for (const tasks::Task& task : list)
    if (!task.config.documents.empty())
      tasks::find_documents(o.evaluate.data, task.config.documents);
  if (o.dry_run) return show_demands(o, list);
  const std::vector<Result> results = evaluate(o, list);
  if (!o.items.empty()) write_items(o.items, results);
  Json document = {{"results", Json::array()}, {"differences", differences_json(results)}};
  for (const Result& result : results) document["results"].push_back(to_json(result));
  std::string text = report::to_text(scores_table(results));
  if (!document["differences"].empty())
    text += "\n" + report::to_text(differences_table(document["differences"]));
  print(document, text);
  const size_t failed = list.size() * o.models.size() - results.size();
  if (failed == 0) return;
  document_is_printed();
  fail<Error>("{} evaluations of tasks failed; the same command tries them again.", failed);
}

void add(CLI::App& eval) {
  auto o = std::make_shared<Options>();
  CLI::App* command = subcommand(
      eval, "tasks", "evaluate few-shot tasks, item by item as lm-evaluation-harness does",
      {"eval tasks run --tasks lambada_openai,piqa --data tasks/"});
  command->add_option("MODEL", o->models,
                      "runs, checkpoints, imported models or Hugging Face folders");
  command
      ->add_option("--tasks", o->tasks,
                   "names (assay list tasks) or task files, separated by commas")
      ->required()
      ->delimiter(',');
  command
      ->add_option("--data", o->evaluate.data,
                   "folder of the documents, JSON Lines; default: the working folder")
      ->capture_default_str();
  command->add_option("-o,--output", o->output,
                      "SQLite file of the items; items that it holds are not evaluated again");
  command->add_option("--items", o->items,
                      "write the items as JSON Lines: task, item, correct, scores");
  command
      ->add_option("--few-shot", o->few_shot,
                   "examples before each question; default: that of the task")
      ->check(non_negative_number());
  command
      ->add_option("--limit", o->evaluate.limit, "use the first N documents of each task; 0: all")
      ->check(non_negative_number());
  command
      ->add_option(
          "--max-length", o->evaluate.longest,
          "longest input; the last tokens are kept; default: the model's max_positions, or 2048")
      ->check(positive_number());
  command
      ->add_option("--prefix", o->prefix, "token before a text without a context: bos or separator")
      ->capture_default_str()
      ->check(CLI::IsMember({"bos", "separator"}));
  command->add_flag("--bos", o->evaluate.bos, "every prompt begins with the tokenizer's bos");
  command->add_flag("--keep", o->keep,
                    "keep items and results in the folder of each run, where a study finds them; "
                    "a task that fails does not stop the others");
  command->add_flag("--dry-run", o->dry_run,
                    "read tasks and documents, and show how long their inputs are; "
                    "needs --tokenizer and no MODEL");
  command->add_flag("--alone", o->alone,
                    "do not share states between choices (slower; for comparison of speed)");
  command
      ->add_option("--batch-tokens", o->evaluate.scorer.batch_tokens,
                   "tokens per batch; lower it if memory runs out; 0: 65536 on CUDA, else 8192")
      ->capture_default_str()
      ->check(non_negative_number());
  add_device_options(*command, o->model);
  command->callback([o] { run(*o); });
}
[[maybe_unused]] const bool registered = eval_commands().add("tasks", add);

}  // namespace
}  // namespace assay::cli
