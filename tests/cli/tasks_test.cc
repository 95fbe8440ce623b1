// assay eval tasks, niah and extrapolation as a user calls them.
#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/program.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

// A run on text, with its tokenizer, and a task of the user.
struct Tasks : testing::Test {
  void SetUp() override {
    std::string text;
    for (int i = 0; i < 300; ++i)
      text += fmt::format(
          "The answer to question {} is number {}. Where is the blue house? It is in the garden.\n",
          i, i * 37 % 101);
    folder.write("corpus/web/a.txt", text);
    folder.write("corpus/web/test/b.txt", text.substr(0, 4000));
    for (const std::string& command :
         {std::string("tokenizer train corpus/web/a.txt --vocab 340 -o t.model"),
          std::string(
              "data prepare --tokenizer t.model -o store corpus --domain 'web=corpus/web/*'"),
          train("run")}) {
      const Outcome outcome = run(folder.path(), command);
      ASSERT_EQ(outcome.exit_code, 0) << command << ": " << outcome.error;
    }
    std::string documents;
    for (int i = 0; i < 8; ++i)
      documents +=
          Json{{"q", fmt::format("question {}", i)}, {"c", {"blue", "the garden"}}, {"a", i % 2}}
              .dump() +
          "\n";
    folder.write("data/d.jsonl", documents);
    folder.write("mine.toml",
                 "kind = \"multiple_choice\"\ndocuments = \"d.jsonl\"\ntext = \"{{q}} is\"\n"
                 "choices = \"{{c}}\"\n"
                 "answer = \"{{a}}\"\nmetrics = [\"acc\", \"acc_norm\"]\n");
  }
  Json json(const std::string& arguments) {
    const std::string device = arguments.starts_with("run ") ? "--devices cpu" : "--device cpu";
    const Outcome outcome = run(folder.path(), arguments + " --threads 1 " + device + " --json");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
    return Json::parse(outcome.out);
  }
  data::Folder folder;
};

TEST_F(Tasks, ItemsAreStoredAndModelsCompared) {
  const std::string evaluate =
      "eval tasks run run/checkpoints/step-10 --tasks mine.toml --data data";
  const std::string command = evaluate + " -o results.sqlite --items items.jsonl";
  const Json first = json(command);
  const Json again = json(command);
  ASSERT_EQ(first["results"].size(), 2u);
  EXPECT_EQ(first["results"][0]["answered_now"], 8);
  EXPECT_EQ(again["results"][0]["answered_now"], 0);
  EXPECT_EQ(first["results"][0]["metrics"], again["results"][0]["metrics"]);
  EXPECT_EQ(first["differences"].size(), 2u);
  EXPECT_EQ(first["differences"], again["differences"]);
  double right = 0;
  std::istringstream lines(read_file(folder / "items.jsonl"));
  int64_t count = 0;
  for (std::string line; std::getline(lines, line); ++count)
    if (const Json item = Json::parse(line); item["model"] == "run")
      right += item["correct"].get<double>();
  EXPECT_EQ(count, 16);
  EXPECT_DOUBLE_EQ(first["results"][0]["metrics"]["acc"]["value"].get<double>(), right / 8);
  const Json alone = json("eval tasks run --tasks mine.toml --data data --alone");
  EXPECT_EQ(alone["results"][0]["metrics"], first["results"][0]["metrics"]);
  EXPECT_GT(alone["results"][0]["tokens_read"], first["results"][0]["tokens_read"]);
}

TEST_F(Tasks, ModelsWithKeysPerPositionSayWhatTheyRead) {
  std::string command = train("keys");
  for (const std::string key : {"constants=keys", "max_positions=64"})
    command += " --set model.attention." + key;
  ASSERT_EQ(run(folder.path(), command).exit_code, 0);
  const auto line = [](size_t length) {
    return Json{{"tokens", std::vector<int>(length, 5)}}.dump() + "\n";
  };
  folder.write("lines", line(65) + line(66) + line(3));
  const Outcome scored = run(folder.path(), "score --model keys lines --device cpu --json");
  EXPECT_EQ(scored.exit_code, 1);
  const Json records = Json::parse(scored.out);
  ASSERT_EQ(records.size(), 3u) << scored.error;
  EXPECT_EQ(records[0]["logprobs"].size(), 65u);
  EXPECT_EQ(records[1]["error"], "66 tokens are more than the model's 64 positions");
  EXPECT_EQ(records[2]["logprobs"].size(), 3u);
  const Outcome evaluated =
      run(folder.path(), "eval tasks keys --tasks mine.toml --data data --max-length 128");
  EXPECT_EQ(evaluated.exit_code, 2);
  EXPECT_NE(evaluated.error.find("128 tokens do not fit the 64 positions"), std::string::npos)
      << evaluated.error;
}

TEST_F(Tasks, DryRunShowsWhatTasksNeed) {
  const auto ask = [&](const std::string& more) {
    return json("eval tasks --dry-run --tokenizer t.model --tasks mine.toml --data data" +
                more)["tasks"][0];
  };
  const Json all = ask("");
  EXPECT_EQ(all["items"], 8);
  EXPECT_GT(all["longest"], all["least"]);
  EXPECT_GT(all["least"], 0);
  EXPECT_EQ(all["metrics"], Json({"acc", "acc_norm"}));
  EXPECT_EQ(all["key"], ask("")["key"]);
  EXPECT_NE(all["key"], ask(" --limit 3")["key"]);
  const std::string documents = read_file(folder / "data/d.jsonl");
  folder.write("data/d.jsonl", documents + documents);
  EXPECT_NE(all["key"], ask("")["key"]) << "other documents";
}

TEST_F(Tasks, NeedlesAndLongTextsAreMeasured) {
  const Json needles =
      json("eval niah run --lengths 400 --samples 3 --max-tokens 8 --figures figures");
  EXPECT_EQ(needles["models"][0]["cells"][0]["samples"].size(), 3u);
  EXPECT_TRUE(fs::exists(folder / "figures/niah_1_1.svg"));
  const Json losses =
      json("eval extrapolation run --data store --set web.test --factor 4 --figure losses.svg");
  EXPECT_EQ(losses["models"][0]["training_length"], 64);
  EXPECT_EQ(losses["models"][0]["bins"].back()["last"], 256);
  EXPECT_TRUE(fs::exists(folder / "losses.svg"));
  const std::string long_texts = "eval extrapolation run --data store --set web.test --device cpu";
  const Outcome one = run(folder.path(), long_texts + " --sequences 1 --factor 100000");
  for (const char* part :
       {"tokens of 1 text of web.test.", "6400001 tokens of 1 text were asked for.",
        "One text gives no interval."})
    EXPECT_NE(one.out.find(part), std::string::npos) << part << " is not in\n" << one.out;
}

TEST_F(Tasks, FileThatCannotBeWrittenIsFoundBeforeTheMeasurement) {
  folder.write("file", "");
  const Outcome outcome =
      run(folder.path(), "eval niah missing --lengths 400 --figures file/figures --device cpu");
  EXPECT_NE(outcome.error.find("file/figures"), std::string::npos) << outcome.error;
}

TEST_F(Tasks, FirstInterruptEndsAWaitForStandardInput) {
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  const int pipe = ::open((folder / "pipe").c_str(), O_RDWR);  // a writer that writes nothing
  for (const char* command :
       {"score --model run --device cpu <pipe", "tokenizer encode t.model <pipe"}) {
    Process process(folder.path(), command);
    sleep_seconds(2);
    process.signal(SIGINT);
    for (int i = 0; i < 100 && process.running(); ++i) sleep_seconds(0.1);
    EXPECT_FALSE(process.running()) << command;
    process.signal(SIGKILL);
    EXPECT_EQ(process.wait().exit_code, 130) << command;
  }
  ::close(pipe);
}

TEST_F(Tasks, InterruptedRecallStudyNamesWhatIsKept) {
  folder.write("mqar.toml",
               "[mqar]\nmodels = [\"attention\"]\nlengths = [16]\npairs = [2]\nwidths = [32]\n"
               "learning_rates = [3e-3]\nvocab_size = 32\ntrain_examples = 3000\n"
               "test_examples = 200\nepochs = 100000\nbatch_size = 50\nstop_at = 2.0\n"
               "[model.attention]\nnum_layers = 1\nattention = { num_heads = 1 }\n");
  Process process(folder.path(), "eval mqar mqar.toml -o recall --device cpu --threads 1");
  ASSERT_TRUE(wait_until(process, [&] { return fs::exists(folder / "recall/mqar.sqlite"); }));
  sleep_seconds(1);
  process.signal(SIGINT);
  const Outcome outcome = process.wait();
  EXPECT_EQ(outcome.exit_code, 130) << outcome.error;
  EXPECT_NE(outcome.error.find("interrupted; recall has 0 of 1 runs"), std::string::npos)
      << outcome.error;
  EXPECT_TRUE(fs::exists(folder / "recall/mqar.csv")) << "the table of the runs that are done";
}

// A learning rate that reaches stop_at ends the search of one model, width and length.
TEST_F(Tasks, MqarTriesLearningRatesUntilOneIsGoodEnough) {
  const auto plan = [](const std::string& stop_at) {
    return "[mqar]\nmodels = [\"attention\"]\nlengths = [16]\npairs = [2]\nwidths = [32]\n"
           "learning_rates = [3e-3, 1e-2, 2e-2]\nvocab_size = 32\ntrain_examples = 50\n"
           "test_examples = 20\nepochs = 1\nbatch_size = 50\nstop_at = " +
           stop_at + "\n[model.attention]\nnum_layers = 1\nattention = { num_heads = 1 }\n";
  };
  folder.write("all.toml", plan("1.1"));
  folder.write("first.toml", plan("0.0"));
  folder.write("wrong.toml", plan("0.0\nprecision = \"half\""));
  EXPECT_EQ(json("eval mqar all.toml -o all")["runs"].size(), 3u);
  EXPECT_EQ(json("eval mqar first.toml -o first")["runs"].size(), 1u);
  const Outcome outcome = run(folder.path(), "eval mqar wrong.toml -o wrong");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_NE(outcome.error.find("precision must be one of auto, bf16"), std::string::npos)
      << outcome.error;
}

// Two models, one of which cannot be built, at two learning rates.
std::string plan_of_recall(const std::string& heads_of_second) {
  return "[mqar]\nlengths = [16]\npairs = [2]\nwidths = [32]\nlearning_rates = [3e-3, 1e-2]\n"
         "vocab_size = 32\ntrain_examples = 1000\ntest_examples = 100\nepochs = 3\n"
         "batch_size = 50\nstop_at = 1.1\nmodels = [\"first\", \"second\"]\n"
         "[model.first]\nattention = { num_heads = 1 }\n"
         "[model.second]\nattention = { num_heads = " +
         heads_of_second + " }\n";
}

TEST_F(Tasks, ParallelRecallStudyThatIsKilledEndsInTheSameResults) {
  folder.write("recall.toml", plan_of_recall("2"));
  const auto results = [&](const std::string& arguments) {
    Json runs = json("eval mqar recall.toml " + arguments)["runs"];
    for (Json& one : runs) one.erase("seconds");
    return runs;
  };
  const Json whole = results("-o whole --jobs 1");
  EXPECT_EQ(whole.size(), 4u);
  {
    Process process(folder.path(), "eval mqar recall.toml -o killed --jobs 2 --devices cpu,cpu");
    ASSERT_TRUE(wait_until(process, [&] { return fs::exists(folder / "killed/logs"); }));
    sleep_seconds(1);
    process.signal(SIGKILL);
    process.wait();
  }
  EXPECT_EQ(results("-o killed --jobs 2"), whole);
  EXPECT_EQ(results("-o killed --jobs 2"), whole);
}

TEST_F(Tasks, FailedRecallRunIsNamedAndDoesNotCostTheOthers) {
  folder.write("recall.toml", plan_of_recall("5"));
  const Outcome outcome =
      run(folder.path(), "eval mqar recall.toml -o recall --jobs 2 --device cpu --threads 1");
  EXPECT_EQ(outcome.exit_code, 1);
  for (const std::string part :
       {"1 of 4 runs failed; the same command tries them again.",
        "second, width 32, length 16, learning rate 0.003:", "num_heads = 5", "log: recall/logs/"})
    EXPECT_NE(outcome.error.find(part), std::string::npos) << part << ": " << outcome.error;
  EXPECT_NE(read_file(folder / "recall/mqar.csv").find("first"), std::string::npos);
}

// A model that cannot read a length does not cost the results of the others.
TEST_F(Tasks, NeedlesBeyondLearnedPositionsAreLeftOut) {
  std::string command = train("learned");
  for (const std::string key :
       {"positions=learned", "max_positions=400", "attention.position=none"})
    command += " --set model." + key;
  ASSERT_EQ(run(folder.path(), command).exit_code, 0);
  const Json models =
      json("eval niah learned run --lengths 400,450 --samples 2 --max-tokens 8")["models"];
  EXPECT_EQ(models[0]["left_out"], Json({450}));
  EXPECT_EQ(models[0]["cells"].size(), 1u);
  EXPECT_EQ(models[1]["left_out"], Json::array());
  EXPECT_EQ(models[1]["cells"].size(), 2u);
  const Outcome none =
      run(folder.path(), "eval niah learned --lengths 450 --figures figures --device cpu");
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_NE(none.error.find("no model can read any of the lengths"), std::string::npos);
}

// Tasks are added to a finished study, the command is killed while they are evaluated, and the same
// command ends with the results of an evaluation that was not killed.
TEST_F(Tasks, StudyContinuesAKilledEvaluation) {
  const std::string plan =
      "reference = \"full\"\nmodels = [\"full\", \"narrow\"]\n"
      "data = { store = \"store2\", train = [\"web\"], out_of_domain = [], sequence_length = 64 }\n"
      "train = { steps = 4, batch = 4, learning_rate = 1e-3, warmup_steps = 1 }\n"
      "size = { d_model = 16, num_layers = 1, attention = { num_heads = 2 } }\n"
      "[model.full]\nbase = \"transformer++\"\n"
      "[model.narrow]\nbase = \"transformer++\"\nattention = { window = 8 }\n";
  folder.write("plan.toml", plan);
  for (int i = 0; i < 60; ++i)
    folder.write(fmt::format("parts/web/{}.txt", i),
                 fmt::format("Text {} says that the garden of house {} is {}.\n", i, i * 7 % 60,
                             i % 2 ? "blue" : "green"));
  const std::string prepare = "data prepare parts --domain 'web=parts/web/*' --valid-fraction 0.3";
  ASSERT_EQ(run(folder.path(), prepare + " --tokenizer t.model -o store2").exit_code, 0);
  json("run plan.toml -o study");
  folder.write("tasks.toml", "tasks = { data = \"data\", list = [\"mine.toml\"] }\n" + plan);
  const auto kept = [&] {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(folder / "study/runs"))
      if (fs::exists(entry.path() / "tasks.sqlite")) found.push_back(entry.path());
    std::ranges::sort(found);
    return found;
  };
  {
    Process process(folder.path(), "run tasks.toml -o study --threads 1 --devices cpu");
    wait_until(process, [&] { return !kept().empty(); });
    process.signal(SIGKILL);
    process.wait();
  }
  const Json again = json("run tasks.toml -o study");
  EXPECT_EQ(again["done_before"], 2) << "a finished run was trained again";
  ASSERT_EQ(again["tasks"]["scores"].size(), 4u) << "two models, acc and acc_norm";
  EXPECT_TRUE(again["tasks"]["problems"].empty());
  EXPECT_TRUE(again["tasks"]["scores"][3]["difference"].is_number());
  ASSERT_EQ(kept().size(), 2u);
  for (const fs::path& run : kept()) {
    const Json alone = json(fmt::format(
        "eval tasks {} --tasks mine.toml --data data --prefix separator", run.string()));
    const Json& metrics = alone["results"][0]["metrics"];
    const std::string model = run.filename().string().substr(0, run.filename().string().find('.'));
    for (const Json& score : again["tasks"]["scores"])
      if (score["model"] == model) {
        const Json& expected = metrics[score["metric"].get<std::string>()];
        EXPECT_EQ(score["value"], expected["value"]);
        EXPECT_NEAR(score["interval"][0], expected["interval"][0], 1e-12);
      }
  }
  const Outcome wrong =
      run(folder.path(), "run tasks.toml -o other --dry-run --set 'tasks.list=[\"pica\"]'");
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_NE(wrong.error.find("did you mean 'piqa'?"), std::string::npos) << wrong.error;
  EXPECT_FALSE(fs::exists(folder / "other"));
}

TEST_F(Tasks, BadInputIsRefused) {
  folder.write("wrong.toml", "kind = \"multiple_choice\"\ndocument = \"d.jsonl\"\n");
  folder.write("recall.toml", plan_of_recall("2"));
  for (const auto& [arguments, part] :
       {std::pair{"eval tasks run --tasks pica --data data", "did you mean 'piqa'?"},
        {"eval tasks run --tasks wrong.toml --data data", "did you mean 'documents'?"},
        {"eval tasks run --tasks piqa --data data", "piqa.validation.jsonl: no such file"},
        {"eval tasks run --tasks mine.toml --data data --max-length 1", "document 1 of d.jsonl"},
        {"eval tasks --tasks mine.toml --data data", "MODEL is required"},
        {"eval tasks run --keep -o f --tasks mine.toml --data data", "-o names another file"},
        {"eval tasks run --tasks mine.toml --data data -o f --items ./f", "the same file"},
        {"eval tasks --dry-run --tasks mine.toml --data data", "needs --tokenizer"},
        {"eval niah run --lengths 20", "too short"},
        {"eval niah run --lengths 1x", "is not a number of tokens"},
        {"eval niah run --lengths 1k --variant 2", "--haystack FILE"},
        {"eval mqar wrong.toml -o out", "wrong.toml:2:12: unknown key 'document'"},
        {"eval mqar recall.toml -o out --run 4", "the plan has 4 runs, numbered from 0"},
        {"eval mqar recall.toml -o out --device cpu,gpu", "device 'gpu' is unknown"}}) {
    const Outcome outcome = run(folder.path(), arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_NE(outcome.error.find(part), std::string::npos) << arguments << ": " << outcome.error;
  }
}

}  // namespace
}  // namespace assay::cli
