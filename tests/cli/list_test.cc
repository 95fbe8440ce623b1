// Output of `assay list`, `assay describe` and `assay doctor`.
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "cli/program.h"

namespace assay::cli {
namespace {

class Lists : public testing::Test {
 protected:
  Outcome run(const std::string& arguments) { return cli::run(folder_.path(), arguments); }
  void expect(const std::string& arguments, int exit_code, const std::vector<std::string>& parts) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, exit_code) << arguments << "\n" << outcome.error;
    for (const std::string& part : parts)
      EXPECT_NE((outcome.out + outcome.error).find(part), std::string::npos)
          << arguments << ": '" << part << "' is not in\n"
          << outcome.out << outcome.error;
  }
  data::Folder folder_;
};

TEST_F(Lists, EveryNameHasADescription) {
  for (const char* kind :
       {"mixers", "channel_mixers", "ops", "models", "plans", "tasks", "datasets"}) {
    const auto names = nlohmann::json::parse(run(fmt::format("list {} --json", kind)).out);
    std::istringstream lines(run(fmt::format("list {}", kind)).out);
    size_t count = 0;
    for (std::string line; std::getline(lines, line); ++count) {
      const size_t name_end = line.find(' ');
      EXPECT_EQ(line.substr(0, name_end), names.at(count).get<std::string>()) << kind;
      EXPECT_NE(line.find_first_not_of(' ', name_end), std::string::npos) << kind << ": " << line;
    }
    EXPECT_EQ(count, names.size()) << kind;
    EXPECT_GT(count, 0u) << kind;
  }
}

TEST_F(Lists, TasksAndDatasetsNameEachOther) {
  expect("describe task piqa", 0, {"task piqa", "metrics", "kind = \"multiple_choice\""});
  const std::string first = nlohmann::json::parse(run("list datasets --json").out).at(0);
  expect("describe dataset " + first, 0, {"dataset " + first, "read by"});
  expect("describe dataset nothing", 2, {"unknown dataset 'nothing'"});
}

TEST_F(Lists, TaskIsDescribedWithoutFieldsThatAreEmptyByDefault) {
  EXPECT_EQ(run("describe task piqa").out.find("few_shot_documents"), std::string::npos);
  folder_.write("mine.toml",
                "kind = \"multiple_choice\"\ndocuments = \"d.jsonl\"\ntarget_delimiter = \"\"\n"
                "text = \"{{q}}\"\nchoices = \"{{c}}\"\nanswer = \"{{a}}\"\n");
  expect("describe task mine.toml", 0, {"target_delimiter = \"\""});
}

TEST_F(Lists, DescriptionIsTheFirstSentenceOrFormula) {
  expect("list plans", 0,
         {"limited_domain ", "Which architectures keep the base capabilities of Transformer++?\n"});
  expect("list models", 0, {"delta_net ", "DeltaNet with SwiGLU.\n"});
  expect("list ops", 0, {"gla ", "S_t = diag(exp gk_t) S_{t−1} + k_t v_tᵀ"});
}

TEST_F(Lists, DescribeOpShowsSignatureAndImplementations) {
  expect("describe op gla", 0, {"torch.ops.assay.gla(Tensor q, Tensor k", "cpu   cpu kernel"});
  expect("describe op gal", 2, {"unknown op 'gal'; did you mean 'gla'?"});
}

TEST_F(Lists, DescribeNamesTheNearestKind) {
  expect("describe mixers attention", 2, {"unknown kind 'mixers'; did you mean 'mixer'?\n"});
  expect("describe table modle", 2, {"unknown table 'modle'; did you mean 'model'?"});
  expect("describe dataset nothing.at.all", 2, {"assay list datasets"});
  expect("list mixer", 2, {"unknown kind 'mixer'; did you mean 'mixers'?\n  Kinds: mixers, "});
}

TEST_F(Lists, DescribeModelShowsTheCommentOfThePreset) {
  expect("describe model moba", 0,
         {"# MoBA with a top-k of 3", "110M with 32k tokens", "[model]\n"});
}

TEST_F(Lists, DescribeModelShowsTheShapesThatFollow) {
  expect("describe model moba", 0,
         {"# Shapes in layer 0 (top1_chunk):", "#   mixer.out_proj.weight",
          "#   state after one token: k "});
}

TEST_F(Lists, DescribePlanShowsTheQuestionModelsAndDomains) {
  expect("describe plan demo", 0,
         {"Does the measurement work?", "reference      transformer++", "known_a, known_b",
          "fresh_a"});
  expect("describe plan dmo", 2, {"unknown plan 'dmo'; did you mean 'demo'?"});
}

TEST_F(Lists, CopyWithoutPresetsFailsAndNamesTheFolders) {
  // The folder above the program is searched too.
  const fs::path folder = folder_ / "program";
  fs::create_directory(folder);
  fs::create_symlink(fs::path(ASSAY_PROGRAM).parent_path() / "libassay.so", folder / "libassay.so");
  fs::copy_file(ASSAY_PROGRAM, folder / "assay");
  for (const auto& [arguments, what] : {std::pair{"list models", "presets"},
                                        {"list plans", "plans"},
                                        {"list tasks", "tasks"},
                                        {"list datasets", "datasets"},
                                        {"describe task mqar", "tasks"}}) {
    const std::string command =
        fmt::format("cd '{}' && ./assay {} >out 2>error", folder.string(), arguments);
    EXPECT_EQ(WEXITSTATUS(std::system(command.c_str())), 1) << arguments;
    const std::string error = read_file(folder / "error");
    const std::string found = fmt::format("no {} were found\n  Folders searched: ", what);
    const std::string plans = (folder / "plans").string();
    EXPECT_NE(error.find(found + plans), std::string::npos) << error;
    EXPECT_EQ(error.find(plans + ", " + plans), std::string::npos) << error;
  }
}

TEST_F(Lists, DoctorNamesEachImplementationOnce) {
  std::istringstream lines(run("doctor").out);
  std::map<std::string, int> count;
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("  cpu ") || line.starts_with("  cuda "))
      EXPECT_EQ(++count[line], 1) << line;
  EXPECT_GT(count.size(), 5u);
}

TEST_F(Lists, DoctorNamesThePathsOfEveryOperator) {
  const auto report = nlohmann::json::parse(run("doctor --json").out);
  const auto names = nlohmann::json::parse(run("list ops --json").out);
  std::set<std::string> with_paths;
  for (const auto& path : report.at("operators"))
    with_paths.insert(path.at("op").get<std::string>());
  for (const std::string name : names)
    EXPECT_TRUE(with_paths.contains(name)) << name << " calls neither register_kernels nor "
                                           << "register_paths (ops/core/paths.h)";
}

TEST_F(Lists, DoctorSaysWhyThereIsNoGpu) {
  const auto report = nlohmann::json::parse(run("doctor --json").out);
  EXPECT_EQ(report.contains("why_no_gpu"), report.at("gpus").empty()) << report;
}

}  // namespace
}  // namespace assay::cli
