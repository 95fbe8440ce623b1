// Task files, examples, requests, scores, and what results keep.
#include "tasks/task.h"

#include <torch/torch.h>

#include <cmath>

#include "nn/testing.h"
#include "tasks/evaluate.h"
#include "tasks/metrics.h"
#include "tokenizer_of_test.h"

namespace assay::tasks {
namespace {

using data::Folder, data::message_of;

const std::string kChoice = R"(kind = "multiple_choice"
documents = "d.jsonl"
text = "Q: {{q}}\nA:"
choices = "{{options}}"
answer = "{{right}}"
)";

void write_documents(const Folder& folder, int count = 12) {
  std::string text;
  for (int i = 0; i < count; ++i)
    text += Json{{"q", "Where is number " + std::to_string(i) + "?"},
                 {"options", {"in the garden", "blue", "house " + std::to_string(i)}},
                 {"right", i % 3},
                 {"subject", i % 2 ? "odd" : "even"}}
                .dump() +
            "\n";
  folder.write("d.jsonl", text);
}

struct Model {
  explicit Model(const std::string& attention = "[model.attention]\nnum_heads = 2\n") {
    model =
        nn::random_model(fmt::format("[model]\nvocab_size = {}\nd_model = 16\nnum_layers = 2\n"
                                     "pattern = ['attention', 'mamba1']\nmax_positions = 128\n{}",
                                     small_tokenizer().vocab_size(), attention));
  }
  Subject subject() const { return {*model, small_tokenizer(), "model", "weights", "fp64"}; }
  std::shared_ptr<nn::LanguageModel> model;
};

TEST(TaskFile, WrongFieldsAreRefusedWithPlaceAndNearestName) {
  const Folder folder;
  const auto message = [&](const std::string& text) {
    return message_of([&] { Task::read(folder.write("t.toml", text)); });
  };
  EXPECT_NE(message(kChoice + "few_shots = 3\n").find("did you mean 'few_shot'?"),
            std::string::npos);
  EXPECT_NE(message("kind = \"multiple_choise\"\n").find("did you mean 'multiple_choice'?"),
            std::string::npos);
  EXPECT_NE(message(kChoice + "metrics = [\"acc_nrom\"]\n").find("did you mean 'acc_norm'?"),
            std::string::npos);
  EXPECT_NE(message("documents = \"a\"\n").find("needs 'kind'"), std::string::npos);
  EXPECT_NE(message("kind = \"last_word\"\ndocuments = \"a\"\n").find("needs 'text'"),
            std::string::npos);
  EXPECT_NE(message(kChoice + "few_shot_sampler = \"best\"\n").find("random or first"),
            std::string::npos);
  EXPECT_NE(message(kChoice + "prepare = \"helaswag\"\n").find("did you mean 'hellaswag'?"),
            std::string::npos);
  EXPECT_NE(message_of([] {
              find_task("pica", {ASSAY_SOURCE_DIR "/plans/tasks"});
            }).find("did you mean 'piqa'?"),
            std::string::npos);
}

TEST(TaskFile, EveryTaskOfTheProgramCanBeRead) {
  const std::vector<fs::path> folders = {ASSAY_SOURCE_DIR "/plans/tasks"};
  const auto names = task_names(folders);
  EXPECT_GE(names.size(), 29u);
  for (const std::string& name : names)
    EXPECT_NO_THROW(Task::read(find_task(name, folders))) << name;
}

TEST(TaskQuestions, ExamplesNeverHoldTheScoredDocument) {
  const Folder folder;
  write_documents(folder);
  const Task task = Task::read(folder.write("t.toml", kChoice), 4);
  Encoder encoder(small_tokenizer(), false, Encoder::Prefix::bos);
  for (const Question& question : questions(task, folder.path(), 0, encoder)) {
    const std::string own = question.document["q"];
    EXPECT_EQ(question.before.find(own), std::string::npos) << question.before;
    EXPECT_EQ(std::ranges::count(question.before, '?'), 4);
  }
}

TEST(TaskQuestions, FirstSamplerTakesTheFirstOfTheGroup) {
  const Folder folder;
  write_documents(folder);
  folder.write("dev.jsonl", read_file(folder / "d.jsonl"));
  const Task task = Task::read(
      folder.write("t.toml",
                   kChoice + "few_shot_documents = \"dev.jsonl\"\nfew_shot_sampler = \"first\"\n"
                             "group = \"subject\"\ndescription = \"About {{subject}}.\\n\\n\"\n"),
      2);
  Encoder encoder(small_tokenizer(), false, Encoder::Prefix::bos);
  const auto all = questions(task, folder.path(), 5, encoder);
  ASSERT_EQ(all.size(), 5u);
  EXPECT_EQ(all[4].before,
            "About even.\n\nQ: Where is number 0?\nA: in the garden\n\nQ: Where is number 2?\nA: "
            "house 2\n\n");
  EXPECT_EQ(all[3].group, "odd");
}

TEST(TaskQuestions, DemandIsThatOfTheLongestItem) {
  const Folder folder;
  write_documents(folder);
  const Task task = Task::read(folder.write("t.toml", kChoice));
  EvaluateOptions options{.data = folder.path()};
  const Demand all = demand_of(task, small_tokenizer(), options);
  EXPECT_EQ(all.items, 12);
  options.longest = all.longest;
  tasks::Results results("");
  Model model;
  EXPECT_EQ(evaluate(task, model.subject(), options, results).truncated, 0);
  options.longest = all.longest - 1;
  EXPECT_GT(evaluate(task, model.subject(), options, results).truncated, 0);
  options.longest = all.least;
  EXPECT_EQ(evaluate(task, model.subject(), options, results).answered, 12);
  options.longest = all.least - 1;
  EXPECT_NE(message_of([&] {
              evaluate(task, model.subject(), options, results);
            }).find("tokens are to be predicted"),
            std::string::npos);
  options.limit = 2;
  EXPECT_EQ(demand_of(task, small_tokenizer(), options).items, 2);
}

TEST(TaskQuestions, DemandOfARollingTaskIsItsLongestText) {
  const Folder folder;
  const std::string text = "The answer to question 1 is number 3. It is in the garden.";
  folder.write("d.jsonl",
               Json{{"t", "blue house"}}.dump() + "\n" + Json{{"t", text}}.dump() + "\n");
  const Task task = Task::read(
      folder.write("t.toml", "kind = \"rolling\"\ndocuments = \"d.jsonl\"\ntext = \"{{t}}\"\n"));
  const Demand demand = demand_of(task, small_tokenizer(), {.data = folder.path()});
  EXPECT_EQ(demand.longest, std::ssize(small_tokenizer().encode(text)));
  EXPECT_EQ(demand.least, 1);
}

TEST(TaskQuestions, RecallIsNotPartOfTheKey) {
  const Folder folder;
  write_documents(folder);
  const EvaluateOptions options{.data = folder.path()};
  const auto key = [&](const std::string& text) {
    return question_key(Task::read(folder.write("t.toml", text)), small_tokenizer(), options);
  };
  EXPECT_EQ(key(kChoice), key(kChoice + "recall = true\n"));
  EXPECT_TRUE(Task::read(folder / "t.toml").config.recall);
  EXPECT_NE(key(kChoice), key(kChoice + "few_shot = 1\n"));
}

TEST(TaskQuestions, NeedlesAreATask) {
  const Folder folder;
  const std::string text =
      "kind = \"niah\"\nlength = 400\nsamples = 6\nmax_tokens = 8\nrecall = true\n";
  const Task task = Task::read(folder.write("needle.toml", text));
  const EvaluateOptions options{.data = folder.path()};
  const Demand demand = demand_of(task, small_tokenizer(), options);
  EXPECT_EQ(demand.items, 6);
  EXPECT_LE(demand.longest, 400);
  EXPECT_GT(demand.longest, 300);
  EXPECT_EQ(demand.least, 9);
  Encoder encoder(small_tokenizer(), false, Encoder::Prefix::bos);
  double depths = 0;
  for (const Question& question : questions(task, folder.path(), 0, encoder)) {
    const std::string answer = question.document["answer"];
    EXPECT_NE(question.document["prompt"].get<std::string>().find(answer), std::string::npos);
    EXPECT_EQ(task.kind->score(question.document, {{}, "It is " + answer})["metrics"]["contains"],
              1.0);
    depths += question.document["depth"].get<double>();
  }
  EXPECT_NEAR(depths, 3, 1e-12) << "0, 0.2, …, 1";
  const auto message = [&](const std::string& more) {
    return message_of([&] { Task::read(folder.write("needle.toml", text + more)); });
  };
  EXPECT_NE(message("variant = 2\n").find("'documents' must be the text"), std::string::npos);
  EXPECT_NE(message("variant = 4\n").find("'variant' must be 1, 2 or 3"), std::string::npos);
}

TEST(TaskEncoder, SpacesAtTheEndOfTheContextMoveToTheAnswer) {
  Encoder encoder(small_tokenizer(), false, Encoder::Prefix::bos);
  const Row plain = encoder.pair("Where is it?", " blue");
  const Row moved = encoder.pair("Where is it? ", "blue");
  EXPECT_EQ(plain.tokens, moved.tokens);
  EXPECT_EQ(plain.scored, moved.scored);
  EXPECT_EQ(int64_t(plain.tokens.size()) - plain.scored,
            int64_t(encoder.encode("Where is it?").size()));
  const Row alone = encoder.pair("", "blue");
  EXPECT_EQ(alone.tokens[0], small_tokenizer().bos());
  EXPECT_EQ(alone.scored, int64_t(alone.tokens.size()) - 1);
  EXPECT_THROW(encoder.pair("Where is it?", ""), BadInput);
}

TEST(TaskEncoder, TokensPastTheVocabularyHaveNoText) {
  const Encoder encoder(small_tokenizer(), false, Encoder::Prefix::bos);
  const auto ids = small_tokenizer().encode("blue house");
  std::vector<int64_t> tokens(ids.begin(), ids.end());
  tokens.insert(tokens.begin() + 1, small_tokenizer().vocab_size());
  tokens.push_back(100'000);
  EXPECT_EQ(encoder.decode(tokens), "blue house");
}

TEST(TaskEncoder, TruncationKeepsTheLastTokens) {
  Row row{{1, 2, 3, 4, 5, 6}, 2};
  EXPECT_EQ(truncate(row, 3), 2);
  EXPECT_EQ(row.tokens, (std::vector<int64_t>{3, 4, 5, 6}));
  EXPECT_EQ(truncate(row, 3), 0);
  EXPECT_NE(message_of([&] { truncate(row, 1); }).find("2 tokens are to be predicted"),
            std::string::npos);
}

TEST(TaskEncoder, WindowsPredictEveryTokenOnce) {
  Encoder encoder(small_tokenizer(), false, Encoder::Prefix::separator);
  const std::string text =
      "The answer to question 12 is number 45. Where is the blue house? It is in the garden.";
  const std::vector<int64_t> ids = encoder.encode(text);
  for (const int64_t longest : {3, 7, 1000}) {
    std::vector<int64_t> predicted;
    for (const Row& row : encoder.windows(text, longest)) {
      EXPECT_LE(int64_t(row.tokens.size()), longest + 1);
      predicted.insert(predicted.end(), row.tokens.end() - row.scored, row.tokens.end());
    }
    EXPECT_EQ(predicted, ids) << longest;
  }
  EXPECT_EQ(encoder.windows(text, 1000)[0].tokens[0], small_tokenizer().separator());
}

TEST(TaskEvaluate, ScoresAreThoseOfTheDefinition) {
  const Folder folder;
  write_documents(folder);
  const Model model;
  const Task task = Task::read(folder.write("t.toml", kChoice));
  Results results("");
  const Ran ran = evaluate(task, model.subject(), {.data = folder.path()}, results);
  EXPECT_EQ(ran.answered, 12);
  EXPECT_LT(ran.tokens_read, ran.tokens_alone);
  Encoder encoder(small_tokenizer(), false, Encoder::Prefix::bos);
  const at::NoGradGuard no_grad;
  double right = 0;
  for (const Item& item : results.items(ran.key)) {
    std::vector<double> scores;
    std::vector<double> by_character;
    for (const std::string& choice :
         {std::string("in the garden"), std::string("blue"), fmt::format("house {}", item.index)}) {
      const Row row =
          encoder.pair(fmt::format("Q: Where is number {}?\nA:", item.index), " " + choice);
      const at::Tensor losses =
          model.model->token_losses(at::tensor(row.tokens, at::kLong).unsqueeze(0))[0];
      scores.push_back(-losses.slice(0, -row.scored).sum().item<double>());
      by_character.push_back(scores.back() / double(choice.size()));
    }
    for (size_t i = 0; i < 3; ++i)
      EXPECT_NEAR(item.scores["scores"][i].get<double>(), scores[i], 1e-9);
    EXPECT_EQ(item.scores["metrics"]["acc"], double(largest(scores) == item.index % 3));
    EXPECT_EQ(item.scores["metrics"]["acc_norm"], double(largest(by_character) == item.index % 3));
    right += item.scores["metrics"]["acc"].get<double>();
  }
  const Summary summary = summarize(results.items(ran.key), "acc");
  EXPECT_DOUBLE_EQ(summary.value, right / 12);
  EXPECT_LE(summary.interval.low, summary.value);
}

TEST(TaskEvaluate, FinishedItemsAreNotAnsweredAgain) {
  const Folder folder;
  write_documents(folder);
  const Model model;
  const Task task = Task::read(folder.write("t.toml", kChoice));
  std::vector<Item> whole;
  std::vector<Item> resumed;
  {
    Results results(folder / "whole.sqlite");
    whole = results.items(evaluate(task, model.subject(), {.data = folder.path()}, results).key);
  }
  {
    Results results(folder / "parts.sqlite");
    EXPECT_EQ(
        evaluate(task, model.subject(), {.data = folder.path(), .limit = 5}, results).answered, 5);
  }
  Results results(folder / "parts.sqlite");
  const Ran rest = evaluate(task, model.subject(), {.data = folder.path()}, results);
  EXPECT_EQ(rest.answered, 7);
  resumed = results.items(rest.key);
  ASSERT_EQ(resumed.size(), whole.size());
  for (size_t i = 0; i < whole.size(); ++i)
    EXPECT_EQ(resumed[i].scores["metrics"], whole[i].scores["metrics"]) << i;
  EXPECT_EQ(
      evaluate(task, model.subject(), {.data = folder.path(), .longest = 64}, results).answered, 12)
      << "other settings, other results";
  const Model other("[model.attention]\nnum_heads = 2\nrope_base = 10\n");
  EXPECT_EQ(evaluate(task, other.subject(), {.data = folder.path()}, results).answered, 12)
      << "the same file of weights and another configuration";
}

TEST(TaskEvaluate, TruncatedItemsPastTheLimitAreNotCounted) {
  const Folder folder;
  write_documents(folder);
  const Model model;
  const Task task = Task::read(folder.write("t.toml", kChoice));
  Results results("");
  EvaluateOptions options{.data = folder.path(), .longest = 8};
  EXPECT_EQ(evaluate(task, model.subject(), options, results).truncated, 12);
  options.limit = 5;
  EXPECT_EQ(evaluate(task, model.subject(), options, results).truncated, 5);
}

TEST(TaskEvaluate, ErrorsNameTheDocument) {
  const Folder folder;
  write_documents(folder);
  const Model model;
  Results results("");
  const auto message = [&](const std::string& text, int64_t longest = 0) {
    const Task task = Task::read(folder.write("t.toml", text));
    return message_of([&] {
      evaluate(task, model.subject(), {.data = folder.path(), .longest = longest}, results);
    });
  };
  EXPECT_NE(message("kind = \"last_word\"\ndocuments = \"d.jsonl\"\ntext = \"{{q}}\"\n"
                    "target = \" {{q}}{{q}}\"\n",
                    5)
                .find("t: document 1 of d.jsonl: "),
            std::string::npos);
  EXPECT_NE(
      message(
          "kind = \"generate\"\ndocuments = \"d.jsonl\"\ntext = \"{{q}}\"\nanswers = \"{{q}}\"\n",
          200)
          .find("leaves no room for a prompt"),
      std::string::npos);
  EXPECT_NE(
      message(
          "kind = \"last_word\"\ndocuments = \"d.jsonl\"\ntext = \"{{q}}\"\ntarget = \" {{w}}\"\n")
          .find("the document has no field 'w'"),
      std::string::npos);
  EXPECT_NE(
      message("kind = \"last_word\"\ndocuments = \"none.jsonl\"\ntext = \"a\"\ntarget = \"b\"\n")
          .find("none.jsonl: no such file"),
      std::string::npos);
}

TEST(TaskEvaluate, RollingPerplexityIsThatOfTheWholeText) {
  const Folder folder;
  folder.write("d.jsonl",
               "{\"t\": \"The answer to question 1 is number 3. It is in the garden.\"}\n{\"t\": "
               "\"blue house\"}\n");
  const Model model;
  const Task task = Task::read(
      folder.write("t.toml", "kind = \"rolling\"\ndocuments = \"d.jsonl\"\ntext = \"{{t}}\"\n"));
  Results results("");
  const auto items =
      results.items(evaluate(task, model.subject(), {.data = folder.path()}, results).key);
  Encoder encoder(small_tokenizer(), false, Encoder::Prefix::bos);
  double nll = 0;
  for (const std::string text :
       {"The answer to question 1 is number 3. It is in the garden.", "blue house"}) {
    std::vector<int64_t> ids = encoder.encode(text);
    ids.insert(ids.begin(), small_tokenizer().bos());
    const at::NoGradGuard no_grad;
    nll += model.model->token_losses(at::tensor(ids, at::kLong).unsqueeze(0)).sum().item<double>();
  }
  EXPECT_NEAR(summarize(items, "word_perplexity").value, std::exp(nll / 15),
              1e-6 * std::exp(nll / 15));
  EXPECT_NEAR(summarize(items, "bits_per_byte").value, nll / 68 / std::log(2.0), 1e-9);
}

TEST(TaskRetrieval, TheWindowLiesAroundTheAnswer) {
  const Folder folder;
  std::string text;
  for (int i = 0; i < 60; ++i) text += fmt::format("The house {} is blue. ", i);
  const Json document = {{"text", "  " + text + "Price: 77 garden. " + text +
                                      "Summary of information above... price:"},
                         {"key", "Price"},
                         {"value", "77"}};
  folder.write("swde.validation.jsonl", document.dump() + "\n");
  const std::vector<fs::path> tasks = {ASSAY_SOURCE_DIR "/plans/tasks"};
  Encoder encoder(small_tokenizer(), false, Encoder::Prefix::bos);
  const auto prompt = [&](const std::string& name) {
    const Task task = Task::read(find_task(name, tasks));
    const auto all = questions(task, folder.path(), 0, encoder);
    return *task.kind->ask(all.at(0).document, "", encoder).prompt;
  };
  const std::string once = prompt("jrt_swde_once");
  const std::string twice = prompt("jrt_swde_twice");
  const std::string plain = prompt("swde");
  EXPECT_NE(once.find("Price: 77 garden."), std::string::npos);
  EXPECT_TRUE(once.ends_with(". Price:")) << once.substr(once.size() - 40);
  EXPECT_EQ(once.find("Summary"), std::string::npos);
  const auto tokens = int64_t(encoder.encode(once).size());
  EXPECT_NEAR(double(tokens), 955, 12);
  EXPECT_TRUE(twice.starts_with("Information about Price. "));
  EXPECT_NEAR(double(encoder.encode(twice).size()), 2.0 * double(tokens), 40);
  EXPECT_TRUE(plain.ends_with("Summary of information above... price:"));
  EXPECT_GT(plain.size(), once.size());
}

TEST(TaskRetrieval, ShortAnswersAreLeftOut) {
  const Folder folder;
  folder.write("fda.validation.jsonl", R"({"text": "a b", "key": "k", "value": "value"}
{"text": "The kind: blue.", "key": "kind", "value": "blue"})");
  const Task task = Task::read(find_task("jrt_fda_once", {ASSAY_SOURCE_DIR "/plans/tasks"}));
  Encoder encoder(small_tokenizer(), false, Encoder::Prefix::bos);
  const auto all = questions(task, folder.path(), 0, encoder);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].index, 1u);
  EXPECT_EQ(*task.kind->ask(all[0].document, "", encoder).prompt, "The kind: blue. Kind:");
}

}  // namespace
}  // namespace assay::tasks
