#include "tasks/task.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "tasks/python_random.h"

namespace assay::tasks {
namespace {

void check(const ConfigNode& file, const TaskConfig& config, const Kind& kind) {
  const auto need = [&](bool good, const char* field, const char* expected) {
    if (!good) fail("{}: '{}' must be {}. Nothing was run.", file.where(field), field, expected);
  };
  need(!config.documents.empty() || kind.makes_documents(), "documents",
       "the name of a file of documents");
  need(config.few_shot >= 0, "few_shot", "0 or more");
  need(config.few_shot_seed >= 0, "few_shot_seed", "0 or more");
  need(config.few_shot_sampler == "random" || config.few_shot_sampler == "first",
       "few_shot_sampler", "random or first");
  preparation(config.prepare);
}

std::vector<std::string> metrics_of(const ConfigNode& file, const TaskConfig& config,
                                    const Kind& kind) {
  const std::vector<std::string> known = kind.metrics();
  for (const std::string& metric : config.metrics)
    if (std::ranges::find(known, metric) == known.end())
      fail("{}: unknown metric '{}'{}; a task of this kind has {}. Nothing was run.",
           file.where("metrics"), metric, did_you_mean(metric, known), join(known));
  return config.metrics.empty() ? known : config.metrics;
}

std::vector<Json> prepared(const TaskConfig& config, const fs::path& data,
                           const std::string& name) {
  std::vector<Json> documents = read_documents(data, name);
  const Preparation prepare = preparation(config.prepare);
  for (size_t i = 0; i < documents.size(); ++i) try {
      prepare(documents[i]);
    } catch (const BadInput& error) {
      fail("{}: document {}: {}", find_documents(data, name).string(), i + 1, error.what());
    }
  return documents;
}

std::vector<Json> scored_documents(const Task& task, const fs::path& data, Encoder& encoder) {
  const std::string& name = task.config.documents;
  if (!task.kind->makes_documents()) return prepared(task.config, data, name);
  return task.kind->documents(name.empty() ? fs::path() : find_documents(data, name), encoder);
}

// Draws examples for one group of documents.
class Sampler {
 public:
  Sampler(const TaskConfig& config, bool holds_scored)
      : config_(config), random_(uint64_t(config.few_shot_seed)), holds_scored_(holds_scored) {}
  void add(const Json& document) { pool_.push_back(&document); }
  std::vector<const Json*> draw(const Json& scored) {
    const auto count = size_t(config_.few_shot);
    if (pool_.size() < count + holds_scored_)
      fail("{} examples are asked for, and there are {} documents to take them from", count,
           pool_.size());
    if (config_.few_shot_sampler == "first")
      return first_others(scored, count);  // copies of it may leave fewer
    std::vector<const Json*> drawn =
        pick(pool_, random_.sample(pool_.size(), count + holds_scored_));
    if (!holds_scored_) return drawn;
    std::erase_if(drawn, [&](const Json* document) { return *document == scored; });
    if (drawn.size() < count) {  // the pool holds copies of the document
      const std::vector<const Json*> others = first_others(scored, pool_.size());
      return pick(others, random_.sample(others.size(), count));
    }
    drawn.resize(count);
    return drawn;
  }

 private:
  // The first documents other than the scored one, at most `count`.
  std::vector<const Json*> first_others(const Json& scored, size_t count) const {
    std::vector<const Json*> out;
    for (const Json* document : pool_) {
      if (out.size() == count) break;
      if (!holds_scored_ || *document != scored) out.push_back(document);
    }
    return out;
  }
  static std::vector<const Json*> pick(const std::vector<const Json*>& from,
                                       const std::vector<size_t>& indices) {
    std::vector<const Json*> out;
    for (const size_t i : indices) out.push_back(from[i]);
    return out;
  }
  const TaskConfig& config_;
  PythonRandom random_;
  bool holds_scored_;
  std::vector<const Json*> pool_;
};

std::string group_of(const TaskConfig& config, const Json& document) {
  if (config.group.empty()) return "";
  if (!document.contains(config.group))
    fail("the document has no field '{}', which groups the task", config.group);
  return to_text(document[config.group]);
}

}  // namespace

Task Task::read(const fs::path& path, int64_t few_shot) {
  const ConfigNode file = ConfigNode::read_file(path);
  if (!file.has("kind"))
    fail("{}: a task file needs 'kind', one of {}. Nothing was run.", path.string(),
         join(kinds().names()));
  Task task;
  task.name = path.stem();
  std::string kind;
  std::vector<std::string> every = file.keys();
  file.read(Fields{{"kind", &kind, ""}}, every);
  try {
    task.kind = kinds().at(kind).make();
  } catch (const BadInput& error) {
    fail("{}: {} Nothing was run.", file.where("kind"), error.what());
  }
  Fields fields = fields_of(task.config);
  for (const Field& field : task.kind->fields()) fields.push_back(field);
  file.read(std::as_const(fields));
  if (few_shot >= 0) task.config.few_shot = few_shot;
  check(file, task.config, *task.kind);
  task.kind->complete(file, task.config);
  task.metrics = metrics_of(file, task.config, *task.kind);
  std::erase_if(fields, [](const Field& field) { return field.name == "recall"; });
  task.definition = to_toml(fields);
  return task;
}

std::vector<std::string> task_names(const std::vector<fs::path>& folders) {
  std::set<std::string> names;
  for (const fs::path& folder : folders)
    if (fs::is_directory(folder))
      for (const auto& entry : fs::directory_iterator(folder))
        if (entry.path().extension() == ".toml") names.insert(entry.path().stem());
  return {names.begin(), names.end()};
}

fs::path find_task(const std::string& name, const std::vector<fs::path>& folders) {
  if (name.ends_with(".toml")) return name;
  for (const fs::path& folder : folders)
    if (const fs::path file = folder / (name + ".toml"); fs::exists(file)) return file;
  const std::vector<std::string> names = task_names(folders);
  fail("there is no task '{}'{}\n  Give the path of a task file, or one of: {}.", name,
       did_you_mean(name, names), join(names));
}

std::vector<Question> questions(const Task& task, const fs::path& data, int64_t limit,
                                Encoder& encoder) {
  const TaskConfig& config = task.config;
  const std::vector<Json> scored = scored_documents(task, data, encoder);
  const bool same =
      config.few_shot_documents.empty() || config.few_shot_documents == config.documents;
  std::vector<Json> others;
  if (config.few_shot > 0 && !same) others = prepared(config, data, config.few_shot_documents);
  const Template description(config.description, "description");
  std::map<std::string, Sampler> samplers;
  const auto sampler = [&](const std::string& group) -> Sampler& {
    return samplers.try_emplace(group, config, same).first->second;
  };
  if (config.few_shot > 0)
    for (const Json& document : same ? scored : others)
      sampler(group_of(config, document)).add(document);
  std::vector<Question> out;
  const size_t count = limit > 0 ? std::min(scored.size(), size_t(limit)) : scored.size();
  for (size_t i = 0; i < count; ++i) try {
      Question question{i, scored[i], description.render(scored[i]), group_of(config, scored[i])};
      if (config.few_shot > 0)
        for (const Json* example : sampler(question.group).draw(scored[i]))
          question.before += task.kind->example(*example) + config.few_shot_delimiter;
      if (!task.kind->skipped(question.document)) out.push_back(std::move(question));
    } catch (const BadInput& error) {
      fail("{}: document {} of {}: {}", task.name, i + 1, config.documents, error.what());
    }
  return out;
}

}  // namespace assay::tasks
