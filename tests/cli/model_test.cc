// `assay import`, `export`, `score` and `generate` as a script uses them, on a model that the
// test writes itself.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/random.h"
#include "base/safetensors.h"
#include "golden_files.h"

namespace assay {
namespace {

using nlohmann::json;

constexpr const char* kConfig =
    R"({"model_type": "llama", "vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 16})";

class ModelCommands : public testing::Test {
 protected:
  ModelCommands()
      : folder_(fs::temp_directory_path() / ("assay_cli_model" + std::to_string(::getpid()))) {
    make_folder(folder_ / "hf");
    write_model();
  }
  ~ModelCommands() override { fs::remove_all(folder_); }

  // In files of at most `per_file` tensors, which an index names; 0: one file without an index.
  void write_model(int64_t vocabulary = 12, size_t per_file = 0) {
    json config = json::parse(kConfig);
    config["vocab_size"] = vocabulary;
    write_file(folder_ / "hf" / "config.json", config.dump());
    const std::vector<std::pair<std::string, std::vector<int64_t>>> shapes = {
        {"model.embed_tokens.weight", {vocabulary, 8}},
        {"lm_head.weight", {vocabulary, 8}},
        {"model.norm.weight", {8}},
        {"model.layers.0.input_layernorm.weight", {8}},
        {"model.layers.0.post_attention_layernorm.weight", {8}},
        {"model.layers.0.self_attn.q_proj.weight", {8, 8}},
        {"model.layers.0.self_attn.k_proj.weight", {8, 8}},
        {"model.layers.0.self_attn.v_proj.weight", {8, 8}},
        {"model.layers.0.self_attn.o_proj.weight", {8, 8}},
        {"model.layers.0.mlp.gate_proj.weight", {16, 8}},
        {"model.layers.0.mlp.up_proj.weight", {16, 8}},
        {"model.layers.0.mlp.down_proj.weight", {8, 16}}};
    std::vector<std::vector<float>> values;
    std::vector<TensorEntry> tensors;
    for (const auto& [name, shape] : shapes) {
      Random random(1, name);
      auto& numbers = values.emplace_back(size_t(shape[0] * (shape.size() > 1 ? shape[1] : 1)));
      for (float& x : numbers) x = float(random.normal());
      tensors.push_back({name, "F32", shape, std::as_bytes(std::span(numbers))});
    }
    if (per_file == 0) return write_safetensors(folder_ / "hf" / "model.safetensors", tensors);
    fs::remove(folder_ / "hf" / "model.safetensors");
    json index;
    for (size_t begin = 0; begin < tensors.size(); begin += per_file) {
      const std::string file = fmt::format("part-{:02}.safetensors", begin);
      const size_t end = std::min(tensors.size(), begin + per_file);
      const std::vector<TensorEntry> part(tensors.begin() + std::ptrdiff_t(begin),
                                          tensors.begin() + std::ptrdiff_t(end));
      for (const TensorEntry& tensor : part) index["weight_map"][tensor.name] = file;
      write_safetensors(folder_ / "hf" / file, part);
    }
    write_file(folder_ / "hf" / "model.safetensors.index.json", index.dump());
  }

  // Runs the program in the test's folder and expects its exit code; → standard output.
  std::string run(int exit_code, const std::string& arguments) {
    const std::string command =
        "cd '" + folder_.string() + "' && '" ASSAY_PROGRAM "' " + arguments + " 2>error";
    std::FILE* pipe = ::popen(command.c_str(), "r");
    std::string out;
    for (int c; (c = std::fgetc(pipe)) != EOF;) out += char(c);
    const int status = ::pclose(pipe);
    EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, exit_code) << arguments << "\n"
                                                                       << error();
    return out;
  }
  std::vector<json> scores(const std::string& lines, const std::string& options = "",
                           int exit_code = 0) {
    write_file(folder_ / "lines", lines);
    std::istringstream out(run(exit_code, "score --model hf lines " + options));
    std::vector<json> found;
    for (std::string line; std::getline(out, line);) found.push_back(json::parse(line));
    return found;
  }
  std::vector<int64_t> generated(const std::string& options) {
    return json::parse(
        run(0, "generate --model hf --max-tokens 15 --json " + options))["samples"][0]["tokens"];
  }
  void expect_error(const std::string& words) {
    EXPECT_NE(error().find(words), std::string::npos) << error();
  }
  std::string error() { return read_file(folder_ / "error"); }

  fs::path folder_;
};

TEST_F(ModelCommands, ImportAndExportGiveBackEveryTensor) {
  run(0, "import hf -o ours");
  run(0, "export ours -o back/");
  const Safetensors before(folder_ / "hf" / "model.safetensors");
  const Safetensors after(folder_ / "back" / "model.safetensors");
  ASSERT_EQ(after.tensors().size(), before.tensors().size());
  for (const TensorEntry& tensor : before.tensors())
    EXPECT_TRUE(std::ranges::equal(after.at(tensor.name).bytes, tensor.bytes)) << tensor.name;
  run(2, "import hf -o ours");
  expect_error("exists already");
  write_file(folder_ / "hf" / "config.json",
             std::string(kConfig).insert(1, R"("rope_scaling": {"factor": 2}, )"));
  run(2, "import hf -o other");
  expect_error("rope_scaling");
  EXPECT_FALSE(fs::exists(folder_ / "other"));
}

TEST_F(ModelCommands, FolderNextToTheOutputIsKept) {
  make_folder(folder_ / "out.writing");
  write_file(folder_ / "out.writing" / "notes.txt", "mine");
  run(0, "export hf -o out");
  EXPECT_EQ(read_file(folder_ / "out.writing" / "notes.txt"), "mine");
  for (const auto& entry : fs::directory_iterator(folder_))
    EXPECT_FALSE(entry.path().filename().string().starts_with("out.tmp")) << entry.path();
}

TEST_F(ModelCommands, ExportWritesTheTokenizerForTransformers) {
  fs::copy(golden_folder() / "bpe2000.model", folder_ / "hf" / "tokenizer.model");
  const json exported = json::parse(run(0, "export hf -o out --json"));
  EXPECT_EQ(exported.at("tokenizer_json"), true);
  EXPECT_EQ(exported.at("model_card"), false) << "nothing is known of its training";
  EXPECT_FALSE(fs::exists(folder_ / "out" / "README.md"));
  EXPECT_EQ(
      json::parse(read_file(folder_ / "out" / "tokenizer.json")).at("model").at("vocab").size(),
      2000u);
  EXPECT_EQ(json::parse(read_file(folder_ / "out" / "tokenizer_config.json")).at("eos_token"),
            "</s>");
  EXPECT_EQ(read_file(folder_ / "out" / "tokenizer.model"),
            read_file(folder_ / "hf" / "tokenizer.model"));
}

TEST_F(ModelCommands, ImportRefusesATokenizerThatCannotBeRead) {
  write_file(folder_ / "junk.model", "junk");
  run(2, "import hf -o ours --tokenizer junk.model");
  expect_error("junk.model: not a SentencePiece model");
  EXPECT_FALSE(fs::exists(folder_ / "ours"));
}

TEST_F(ModelCommands, WeightsInSeveralFilesAreEvaluatedAndExported) {
  fs::copy(golden_folder() / "bpe2000.model", folder_ / "hf" / "tokenizer.model");
  write_file(folder_ / "d.jsonl", R"({"q": "It is", "c": ["blue", "the garden"], "a": 0})");
  write_file(folder_ / "mine.toml",
             "kind = \"multiple_choice\"\ndocuments = \"d.jsonl\"\ntext = \"{{q}}\"\n"
             "choices = \"{{c}}\"\nanswer = \"{{a}}\"\n");
  const std::string evaluate = "eval tasks hf --tasks mine.toml -o r.sqlite --device cpu --json";
  const auto answered = [&] {
    return json::parse(run(0, evaluate)).at("results").at(0).at("answered_now").get<int>();
  };
  write_model(2000, /*per_file=*/5);
  EXPECT_EQ(answered(), 1);
  EXPECT_EQ(answered(), 0);
  EXPECT_EQ(json::parse(run(0, "export hf -o out --json")).at("weights"),
            json({"hf/part-00.safetensors", "hf/part-05.safetensors", "hf/part-10.safetensors"}));
  fs::rename(folder_ / "out/model.safetensors", folder_ / "hf/model.safetensors");
  EXPECT_EQ(answered(), 1) << "other files, other results";
}

// The model of a padded vocabulary makes tokens that its tokenizer does not know.
TEST_F(ModelCommands, TokensPastTheTokenizersVocabularyHaveNoText) {
  fs::copy(golden_folder() / "bpe2000.model", folder_ / "hf" / "tokenizer.model");
  write_model(8000);
  const json sample = json::parse(
      run(0, "generate --model hf --tokens 300,301 --max-tokens 15 --json"))["samples"][0];
  std::string known = "300 301";
  int unknown = 0;
  for (const json& token : sample["tokens"]) {
    unknown += token >= 2000;
    if (token < 2000) known += " " + token.dump();
  }
  EXPECT_GT(unknown, 0);
  write_file(folder_ / "ids", known + "\n");
  EXPECT_EQ(sample["text"].get<std::string>() + "\n",
            run(0, "tokenizer decode hf/tokenizer.model < ids"));
}

TEST_F(ModelCommands, ScoreKeepsTheOrderWhateverTheBatch) {
  const std::string lines =
      "{\"id\": \"a\", \"tokens\": [1, 2, 3, 4, 5]}\n{\"id\": [2], \"tokens\": [7]}\n\n{\"id\": "
      "null, \"tokens\": [1, "
      "2, 3, 11, 0, 6, 9]}";
  const auto found = scores(lines);
  const auto alone = scores(lines, "--batch-tokens 1");
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[0]["id"], "a");
  EXPECT_EQ(found[1]["id"], json::array({2}));
  EXPECT_EQ(found[1]["logprobs"], json::array({nullptr}));
  for (size_t i = 0; i < 3; ++i) {
    double nll = 0;
    EXPECT_TRUE(found[i]["logprobs"][0].is_null());
    for (size_t t = 1; t < found[i]["logprobs"].size(); ++t) {
      const double logprob = found[i]["logprobs"][t];
      EXPECT_LT(logprob, 0);
      EXPECT_NEAR(logprob, alone[i]["logprobs"][t].get<double>(), 1e-5);
      nll -= logprob;
    }
    EXPECT_NEAR(found[i]["nll"].get<double>(), nll, 1e-5);
  }
  for (size_t t = 1; t < 3; ++t)  // the same tokens stand before them
    EXPECT_NEAR(found[0]["logprobs"][t].get<double>(), found[2]["logprobs"][t].get<double>(), 1e-5);
}

TEST_F(ModelCommands, LinesAfterABrokenLineAreScored) {
  for (const char* line :
       {"{\"tokens\": [1, 2", "[1]", "{\"tokens\": []}", "{\"tokens\": [12]}", "{\"tokens\": [-1]}",
        "{\"tokens\": [1.5]}", "{\"tokens\": 3}", "{}", "{\"tokens\": [1], \"text\": \"a\"}",
        "{\"text\": \"no tokenizer\"}", "\xff\xfe", "{\"tokens\": [18446744073709551615]}"}) {
    SCOPED_TRACE(line);
    const auto found =
        scores(std::string("{\"tokens\": [1, 2]}\n\n") + line + "\n{\"tokens\": [1, 2]}\n", "", 1);
    ASSERT_EQ(found.size(), 3u);
    EXPECT_EQ(found[1].at("line"), 3);
    EXPECT_TRUE(found[1].contains("error"));
    EXPECT_EQ(found[2].at("logprobs"), found[0].at("logprobs"));
    expect_error("1 of 3 lines could not be scored; the first is lines:3: ");
  }
  run(2, "score --model hf absent");
  run(2, "score --model absent lines");
}

TEST_F(ModelCommands, RecordOfABrokenLineHoldsIdLineAndReason) {
  EXPECT_EQ(scores("\n{\"id\": 7, \"tokens\": [18446744073709551615]}\n", "", 1)[0],
            json({{"id", 7},
                  {"line", 2},
                  {"error", "token 18446744073709551615 is outside the model's vocabulary"}}));
}

TEST_F(ModelCommands, ScoreKeepsTheTextOfNumbersInIds) {
  std::string lines;
  const std::vector<std::string> ids = {"123456789012345678901234567890", "1.10", "-0",
                                        "0.1234567890123456789",          "1E5",  "\"a\\u00e9\""};
  for (const std::string& id : ids)
    lines += "{\"x\": {\"id\": [1, 2]}, \"y\": \"id\", \"i\\u0064\" : " + id +
             " , \"tokens\": [1, 2]}\n";
  write_file(folder_ / "lines", lines);
  std::istringstream out(run(0, "score --model hf lines"));
  for (const std::string& id : ids) {
    std::string line;
    std::getline(out, line);
    const std::string shown = id.starts_with('"') ? "\"aé\"" : id;
    EXPECT_TRUE(line.starts_with("{\"id\": " + shown + ", \"logprobs\": ")) << line;
  }
}

TEST_F(ModelCommands, ScoreReadsNullAsAbsentAndTheJsonOfPython) {
  const auto found = scores(
      "{\"id\": 5, \"text\": null, \"tokens\": [1, 2]}\n"
      "{\"id\": 6, \"score\": NaN, \"tokens\": [1, 2]}\n"
      "{\"id\": 1, \"id\": 7, \"tokens\": [9], \"tokens\": [1, 2]}\n");
  ASSERT_EQ(found.size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(found[size_t(i)]["id"], 5 + i);
    EXPECT_EQ(found[size_t(i)]["logprobs"], found[0]["logprobs"]);
  }
}

TEST_F(ModelCommands, JsonOfScoreIsOneDocumentAfterAnError) {
  write_file(folder_ / "lines", "{\"tokens\": [1, 2]}\n{\"tokens\": [12]}\n");
  const json document = json::parse(run(1, "score --model hf lines --json"));
  ASSERT_EQ(document.size(), 2u);
  EXPECT_TRUE(document[0].contains("nll"));
  EXPECT_EQ(document[1].at("line"), 2);
}

TEST_F(ModelCommands, DeepIdIsRejectedAndLaterLinesAreScored) {
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  const auto found =
      scores("{\"id\": " + deep + ", \"tokens\": [1]}\n{\"tokens\": [1, 2]}\n", "", 1);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].at("error"), "has values that are nested deeper than 16 levels");
  EXPECT_TRUE(found[1].contains("nll"));
}

TEST_F(ModelCommands, GenerateIsAFunctionOfTheSeed) {
  const auto one = generated("--tokens 1,2 --seed 4");
  const auto other = generated("--tokens 1,2 --seed 5");
  EXPECT_EQ(one, generated("--tokens 1,2 --seed 4"));
  EXPECT_NE(one, other);
  EXPECT_EQ(one.size(), 15u);
  const json both = json::parse(
      run(0, "generate --model hf --max-tokens 15 --tokens 1,2 --seed 4 --samples 2 --json"));
  EXPECT_EQ(both["samples"][0]["tokens"], json(one));
  EXPECT_EQ(both["samples"][1]["tokens"], json(other));
  EXPECT_EQ(generated("--tokens 1,2 --temperature 0"),
            generated("--tokens 1,2 --top-k 1 --seed 9"));
}

TEST_F(ModelCommands, GenerateGoesOnFromASavedState) {
  const auto whole = generated("--tokens 1,2 --seed 4");
  run(0, "generate --model hf --max-tokens 6 --tokens 1,2 --seed 4 --save-state half");
  const json rest =
      json::parse(run(0, "generate --model hf --max-tokens 9 --seed 4 --state half --json"));
  EXPECT_EQ(rest["prompt_tokens"].size(), 8u);
  EXPECT_EQ(rest["samples"][0]["tokens"],
            json(std::vector<int64_t>(whole.begin() + 6, whole.end())));
  run(2, "generate --model hf --state hf/config.json");
  run(2, "generate --model hf --state half --precision bf16");
  expect_error("Float");
}

TEST_F(ModelCommands, GenerateRefusesWhatItCannotStartFrom) {
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"", "tokenizer"},
      {"--prompt hello", "tokenizer"},
      {"--tokens ''", "empty"},
      {"--tokens 1,x", "1,2,3"},
      {"--tokens 1,99", "vocabulary"},
      {"--tokens 1 --top-p 0", "top_p"},
      {"--tokens 1 --temperature -1", "temperature"},
      {"--tokens 1 --max-tokens -1", "-1"},
      {"--tokens 1 --samples 0", "samples"},
      {"--tokens 1 --device cuda:99", "cuda:99"}};
  for (const auto& [options, words] : wrong) {
    run(2, "generate --model hf " + options);
    expect_error(words);
  }
}

}  // namespace
}  // namespace assay
