// `assay data` and `assay tokenizer` as a script uses them: exit codes, JSON on standard output,
// nothing left behind.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "data/folder.h"

namespace assay {
namespace {

using nlohmann::json;

struct Result {
  int exit_code;
  std::string out;
};

class DataCommands : public testing::Test {
 protected:
  DataCommands()
      : folder_(fs::temp_directory_path() / ("assay_cli_data" + std::to_string(::getpid()))) {
    make_folder(folder_);
  }
  ~DataCommands() override { fs::remove_all(folder_); }
  // Runs the program in the test's folder; standard error goes to the file "error".
  Result run(const std::string& arguments) { return run_after("true", arguments); }
  Result run_after(const std::string& before, const std::string& arguments) {
    const std::string command = "cd '" + folder_.string() + "' && exec 2>error && " + before +
                                " && '" ASSAY_PROGRAM "' " + arguments;
    std::FILE* pipe = ::popen(command.c_str(), "r");
    Result result{-1, ""};
    for (int c; (c = std::fgetc(pipe)) != EOF;) result.out += char(c);
    const int status = ::pclose(pipe);
    result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return result;
  }
  json run_json(const std::string& arguments) {
    const Result result = run(arguments + " --json");
    EXPECT_EQ(result.exit_code, 0) << arguments << "\n" << error();
    return json::parse(result.out, nullptr, false);
  }
  std::string read(const std::string& name) { return read_file(folder_ / name); }
  std::string error() { return read("error"); }
  void write(const std::string& name, std::string_view text) {
    make_folder((folder_ / name).parent_path());
    write_file(folder_ / name, text);
  }
  std::set<std::string> files() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) names.insert(entry.path().filename());
    return names;
  }
  bool exists(const std::string& name) const { return fs::exists(folder_ / name); }

 private:
  fs::path folder_;
};

std::string corpus() {
  std::string text;
  for (int i = 0; i < 300; ++i)
    text += "line " + std::to_string(i) + " of a text about sequence models and their domains\n";
  return text;
}

TEST_F(DataCommands, FromTextToAVerifiedStore) {
  write("in/train/a.txt", corpus());
  write("in/test/b.txt", corpus());
  write("in/c.test.jsonl",
        "{\"text\": \"cut\n{\"text\": \"some code\", \"meta\": {\"redpajama_set_name\": "
        "\"RedPajamaGithub\", "
        "\"source\": \"owner/repository\"}}\n");
  EXPECT_EQ(run_json("tokenizer train in --vocab 320 -o m.model").at("vocab_size"), 320);
  const json report = run_json(
      "data prepare --tokenizer m.model -o store --domain prose='*.txt' --valid-fraction 0 in");
  EXPECT_EQ(report.at("total").at("documents"), 3);
  EXPECT_EQ(report.at("total").at("broken_lines"), 1);
  const json parts = run_json("data info store").at("parts");
  EXPECT_EQ(parts.size(), 3u);
  EXPECT_EQ(parts.at(0).at("sources"), 1);
  EXPECT_TRUE(parts.at(1).at("sources").is_null());
  EXPECT_EQ(run_json("data verify store").at("verified"), true);
  const json domains = run_json("data overlap store").at("domains");
  EXPECT_EQ(domains.at(1).at("domain"), "prose");
  EXPECT_EQ(domains.at(1).at("duplicates"), 1);
  EXPECT_EQ(run("data prepare --tokenizer m.model -o store in").exit_code, 2);
  EXPECT_NE(error().find("--overwrite"), std::string::npos) << error();
}

TEST_F(DataCommands, FilesWithoutTextAreNotLearnedFrom) {
  write("a.txt", corpus());
  write("b.jsonl", "{\"content\": \"text\"}\n");
  const json report = run_json("tokenizer train a.txt b.jsonl --vocab 320 -o m.model");
  EXPECT_EQ(report.at("files"), json{"a.txt"});
  EXPECT_EQ(report.at("without_text"), json{"b.jsonl (left out: 1 without a string 'text')"});
}

TEST_F(DataCommands, VocabularyThatDoesNotFitNamesTheLimit) {
  write("a.txt", corpus());
  for (const auto& [size, words] : {std::pair{"260", "need at least "}, {"100000", "at most "}}) {
    EXPECT_EQ(run(fmt::format("tokenizer train a.txt --vocab {} -o t.model", size)).exit_code, 2);
    EXPECT_NE(error().find(words), std::string::npos) << error();
    EXPECT_EQ(error().find("character_coverage"), std::string::npos) << error();
  }
  write("empty.txt", "");
  run("tokenizer train empty.txt --vocab 320 -o t.model");
  EXPECT_NE(error().find("no text was found in 1 file (left out: 1 empty)"), std::string::npos)
      << error();
}

TEST_F(DataCommands, CtrlCWhileATokenizerLearnsLeavesNothing) {
  std::string text;
  std::mt19937 random(1);
  for (int i = 0; i < 4'000'000; ++i) text += i % 9 ? char('a' + random() % 26) : ' ';
  for (size_t i = 999; i < text.size(); i += 1000) text[i] = '\n';
  write("a.txt", text);
  const Result result = run(
      "tokenizer train a.txt --vocab 60000 -o m.model & sleep 3; kill -INT $!; wait $!; echo $?");
  EXPECT_EQ(result.out, "130\n");
  EXPECT_NE(error().find("nothing was left behind"), std::string::npos) << error();
  EXPECT_FALSE(exists("m.model"));
}

TEST_F(DataCommands, ExistingTokenizerIsReplacedOnlyWithOverwrite) {
  write("a.txt", corpus());
  write("m.model", "a file of the user");
  EXPECT_EQ(run("tokenizer train a.txt --vocab 320 -o m.model").exit_code, 2);
  EXPECT_NE(error().find("m.model: exists; nothing was changed"), std::string::npos) << error();
  EXPECT_EQ(read("m.model"), "a file of the user");
  EXPECT_EQ(run_json("tokenizer train a.txt --vocab 320 -o m.model --overwrite").at("vocab_size"),
            320);
}

TEST_F(DataCommands, LimitOfTheFileSizeIsAnError) {
  if (!data::kLimitsOfFilesHold) GTEST_SKIP() << "ThreadSanitizer writes a larger file";
  write("a.txt", corpus());
  run_json("tokenizer train a.txt --vocab 320 -o m.model");
  const Result result =
      run_after("ulimit -f 4", "data prepare --tokenizer m.model --domain web='*' -o store a.txt");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(error().find("File too large"), std::string::npos) << error();
  EXPECT_EQ(files(), (std::set<std::string>{"a.txt", "error", "m.model"}));
}

TEST_F(DataCommands, ShareOfNoNgramsIsNotANumber) {
  write("a.txt", corpus());
  run_json("tokenizer train a.txt --vocab 320 -o m.model");
  write("b.test.txt", "text");
  run_json("data prepare --tokenizer m.model --domain web='*' -o store a.txt b.test.txt");
  EXPECT_NE(run("data overlap store").out.find("  -\n"), std::string::npos);
}

TEST_F(DataCommands, EncodeAndDecodeAreInverse) {
  write("a.txt", corpus());
  run_json("tokenizer train a.txt --vocab 320 -o m.model");
  EXPECT_EQ(run("tokenizer encode m.model < a.txt > ids").exit_code, 0);
  EXPECT_EQ(run("tokenizer decode m.model < ids").out, corpus());
  EXPECT_EQ(run("tokenizer decode m.model < a.txt").exit_code, 2);
  write("wrong.txt", "a\na\xffz\n");
  EXPECT_EQ(run("tokenizer encode m.model < wrong.txt").exit_code, 2);
  EXPECT_NE(error().find("line 2: the text is not valid UTF-8"), std::string::npos) << error();
}

TEST_F(DataCommands, Synth) {
  const json report = run_json("data synth -o s --documents 5 --held-out 2 --seed 3");
  EXPECT_EQ(report.at("synthetic").at("options").at("documents"), 5);
  EXPECT_EQ(run_json("data info s").at("fingerprint"), report.at("fingerprint"));
}

TEST_F(DataCommands, BadInputIsExitCodeTwoAndLeavesNothing) {
  write("noise.model", std::string(1000, '\x81'));
  write("a.jsonl.zst", "no zstd");
  write("a.txt", corpus());
  run_json("tokenizer train a.txt --vocab 320 -o m.model");
  for (const char* arguments :
       {"data", "data nothing", "data prepare", "data info missing", "data info a.txt",
        "data verify .", "data synth -o s --active 300", "data synth -o s --documents many",
        "data prepare --tokenizer noise.model -o s a.txt",
        "data prepare --tokenizer missing -o s a.txt",
        "data prepare --tokenizer m.model -o s a.jsonl.zst",
        "data prepare --tokenizer m.model -o s missing.jsonl",
        "data prepare --tokenizer m.model -o s a.txt",
        "data prepare --tokenizer m.model -o s --domain web a.txt",
        "tokenizer train a.txt --vocab 100000 -o t", "tokenizer encode noise.model < a.txt"}) {
    EXPECT_EQ(run(arguments).exit_code, 2) << arguments << "\n" << error();
    EXPECT_FALSE(error().empty()) << arguments;
    EXPECT_FALSE(exists("s") || exists("t")) << arguments;
  }
}

}  // namespace
}  // namespace assay
