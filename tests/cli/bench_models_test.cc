// `assay bench models`: a row a model, from one command; what fails is a row too.
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "cli/program.h"

namespace assay::cli {
namespace {

using nlohmann::json;

class BenchModels : public testing::Test {
 protected:
  BenchModels() {
    model("full", "pattern = ['attention']\n[model.attention]\nnum_heads = 2\n");
    model("window", "pattern = ['attention']\n[model.attention]\nnum_heads = 2\nwindow = 8\n");
    model("scan", "pattern = ['mamba1']\nchannel_mixer = 'none'\n");
  }
  void model(const std::string& name, const std::string& rest) {
    folder_.write(name + ".toml", "[model]\nd_model = 32\nnum_layers = 2\n" + rest);
  }
  Outcome bench(const std::string& arguments) {
    return run(folder_.path(),
               "bench models --device cpu --threads 1 --vocab 50 --time 24 " + arguments);
  }
  json rows(const std::string& arguments) {
    const Outcome outcome = bench(arguments + " --json");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
    return json::parse(outcome.out).at("rows");
  }
  data::Folder folder_;
};

TEST_F(BenchModels, CountsAndTimesEach) {
  const json found = rows("full.toml window.toml scan.toml --steps 2 --state-at 24,100000");
  ASSERT_EQ(found.size(), 3u);
  for (const json& row : found) {
    EXPECT_EQ(row.at("failure"), "") << row;
    EXPECT_GT(row.at("tokens_per_second"), 0) << row;
    EXPECT_GT(row.at("peak_memory_bytes"), 0) << row;
  }
  const auto state = [&](int i, const char* length) {
    return found[i].at("state_bytes").at(length).get<int64_t>();
  };
  // A key and a value of 32 numbers, in each of two layers
  constexpr int64_t position = 8;
  constexpr int64_t pair = 2 * 32 * 4;
  EXPECT_EQ(state(0, "24"), 2 * (24 * pair + position));
  EXPECT_EQ(state(0, "100000"), 2 * (100000 * pair + position));
  EXPECT_EQ(state(1, "100000"), 2 * (7 * pair + position));
  EXPECT_EQ(state(2, "24"), state(2, "100000"));
  EXPECT_EQ(state(2, "24"), 2 * 4 * (64 * 16 + 64 * 3))
      << "Mamba's state of 16 a channel, and three inputs of its convolution";
  EXPECT_EQ(found[0].at("operators").at("window_attention"),
            found[1].at("operators").at("window_attention"));
  EXPECT_EQ(found[2].at("operators").count("window_attention"), 0u);
  EXPECT_EQ(found[2].at("operators").at("selective_scan").get<std::string>().substr(0, 10),
            "cpu kernel");
  // Projections: 2 (3·32·32 + 32·32) a layer, with the head and the feed-forward; attention:
  // 4·32·(24 + 1) / 2.
  const int64_t d_ff =
      (found[0].at("parameters").get<int64_t>() - 50 * 32 - 32 - 2 * (4 * 32 * 32 + 2 * 32)) /
      (2 * 3 * 32);
  EXPECT_EQ(found[0].at("flops_per_token"),
            2. * 50 * 32 + 2 * (2. * 4 * 32 * 32 + 2. * 3 * 32 * d_ff + 4. * 32 * 25 / 2));
}

TEST_F(BenchModels, ProfilesAStep) {
  const json row = rows("full.toml --steps 1 --profile 3").at(0);
  const json parts = row.at("profile");
  double total = 0;
  double products = 0;
  bool outside = false;
  for (const json& part : parts) {
    EXPECT_GE(part.at("seconds"), 0) << part;
    total += part.at("seconds").get<double>();
    const std::string op = part.at("op");
    outside = outside || (op == "outside torch's operators" && part.at("seconds") > 0);
    // gradients of weights are part of the backward pass of their layer
    if (op.ends_with("linear_pointwise") || op == "torch::autograd::CppNode<LinearFunction>")
      products += part.at("calls").get<double>();
  }
  EXPECT_GE(products, 2 * (1 + 2 * 4) + 2 * 4)
      << "forward and gradients of the head and of four layers in each of two";
  EXPECT_TRUE(outside);
  EXPECT_LT(total, 3 * row.at("seconds_per_step").get<double>() + 0.5);
  for (size_t i = 1; i < parts.size(); ++i)
    EXPECT_LE(parts[i].at("seconds"), parts[i - 1].at("seconds"));
  const std::string text = bench("full.toml --steps 1 --profile 3").out;
  EXPECT_NE(text.find("a step: "), std::string::npos) << text;
}

TEST_F(BenchModels, WhatFailsIsARow) {
  model("short",
        "pattern = ['attention']\n[model.attention]\nnum_heads = 2\nconstants = 'keys'\n"
        "max_positions = 9\n");
  model("huge",
        "pattern = ['attention']\nvocab_size = 2000000000\n[model.attention]\nnum_heads = 2\n");
  const json found = rows("full.toml short.toml huge.toml scan.toml --steps 1");
  ASSERT_EQ(found.size(), 4u);
  EXPECT_EQ(found[0].at("failure"), "");
  EXPECT_NE(found[1].at("failure").get<std::string>().find("max_positions = 9"), std::string::npos)
      << found[1];
  EXPECT_GT(found[1].at("parameters"), 0) << "counted before it failed";
  EXPECT_NE(found[2].at("failure").get<std::string>().find("out of memory"), std::string::npos)
      << found[2];
  EXPECT_EQ(found[3].at("failure"), "");
}

TEST_F(BenchModels, LargeModelsAreCountedOnly) {
  const json found = rows("full.toml --largest 1000");
  EXPECT_TRUE(found[0].at("tokens_per_second").is_null());
  EXPECT_EQ(found[0].at("failure"), "not timed: more than 1.0k parameters");
  EXPECT_GT(found[0].at("parameters"), 1000);
}

TEST_F(BenchModels, ComparesWithAReference) {
  const Outcome outcome =
      bench("full.toml scan.toml --steps 0 --reference scan.toml --csv table.csv");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.error;
  EXPECT_NE(outcome.out.find("× scan.toml"), std::string::npos) << outcome.out;
  const std::string csv = read_file(folder_ / "table.csv");
  EXPECT_EQ(std::ranges::count(csv, '\n'), 3) << csv;
  EXPECT_NE(csv.find("\nscan.toml,"), std::string::npos) << csv;
  EXPECT_NE(csv.find(",1,"), std::string::npos) << csv;
  std::set<std::string> names;
  std::istringstream header(csv.substr(0, csv.find('\n')));
  for (std::string name; std::getline(header, name, ',');) {
    EXPECT_TRUE(names.insert(name).second) << "'" << name << "' names two columns";
    EXPECT_NE(name, "");
  }
  EXPECT_TRUE(names.contains("failure")) << csv;
}

TEST_F(BenchModels, NamesWhatBecameSlower) {
  json document = json::parse(bench("full.toml --steps 1 --json").out);
  EXPECT_TRUE(document.contains("date")) << document;
  for (const auto& [factor, code] : {std::pair(0.1, 0), std::pair(10., 1)}) {
    json earlier = document;
    json& speed = earlier["rows"][0]["tokens_per_second"];
    speed = factor * speed.get<double>();
    folder_.write("earlier.json", earlier.dump());
    const Outcome outcome = bench("full.toml --steps 1 --compare earlier.json");
    EXPECT_EQ(outcome.exit_code, code) << outcome.error;
    EXPECT_NE(outcome.out.find("compared with earlier.json\n  full.toml"), std::string::npos);
    const std::string slower = "slower than in earlier.json by more than 2 %: full.toml (-";
    EXPECT_EQ(outcome.error.find(slower) != std::string::npos, code == 1) << outcome.error;
  }
  document["time"] = 25;
  folder_.write("earlier.json", document.dump());
  const Outcome outcome = bench("full.toml --steps 1 --compare earlier.json");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_NE(outcome.error.find("its time is 25, and here it is 24"), std::string::npos)
      << outcome.error;
}

TEST_F(BenchModels, TextNamesDtypeAndEachImplementationOnce) {
  const std::string text = bench("full.toml scan.toml --steps 0").out;
  EXPECT_NE(text.find(", float32, B "), std::string::npos) << text;
  const std::string operators = text.substr(text.find("operators\n"));
  EXPECT_NE(operators.find("    causal_conv1d, glu, rotary_qkv, window_attention\n"),
            std::string::npos)
      << operators;
  EXPECT_EQ(operators.find("full.toml"), std::string::npos) << operators;
}

TEST_F(BenchModels, OneModelHasNoRatios) {
  const std::string text = bench("full.toml --steps 0").out;
  EXPECT_EQ(text.find("×"), std::string::npos) << text;
}

TEST_F(BenchModels, RefusesBadNamesBeforeTheFirst) {
  folder_.write("misspelled.toml", "[modle]\nd_model = 3\n");
  folder_.write("without.toml", "[train]\nsteps = 3\n");
  for (const auto& [arguments, part] : std::vector<std::pair<std::string, std::string>>{
           {"transformr++", "did you mean 'transformer++'?"},
           {"full.toml missing.toml", "missing.toml: cannot be read as a TOML file (no such file)"},
           {"full.toml --reference scan.toml", "'scan.toml' is not among the models"},
           {"full.toml --precision fp8", "--precision"},
           {"full.toml --time 0", "--time"},
           {"full.toml --prompt 8", "--prompt needs --decode"},
           {"misspelled.toml", "misspelled.toml:1:"},
           {"without.toml", "there is no table [model]"},
           {"full.toml --csv missing/x.csv", "missing/x.csv: there is no folder missing"}}) {
    const Outcome outcome = bench(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments << "\n" << outcome.error;
    EXPECT_NE(outcome.error.find(part), std::string::npos) << outcome.error;
  }
}

TEST_F(BenchModels, TimesADecodingStepBesideWhatItMoves) {
  const json found = rows("full.toml scan.toml --steps 0 --decode 3 --state-at 25");
  const auto weights = [&](int i) { return 4 * found[i].at("parameters").get<double>(); };
  const auto state = [&](int i) { return 3 * found[i].at("state_bytes").at("25").get<double>(); };
  for (const json& row : found) {
    EXPECT_EQ(row.at("failure"), "") << row;
    EXPECT_GT(row.at("decode").at("seconds"), 0) << row;
    EXPECT_GT(row.at("decode").at("bytes_per_second"), 1e6) << row;
    EXPECT_GT(row.at("decode").at("seconds_per_token"), 0) << row;
  }
  EXPECT_NEAR(found[0].at("decode").at("bytes").get<double>(), weights(0) + state(0),
              100);  // a cache stays in its place
  EXPECT_NEAR(found[1].at("decode").at("bytes").get<double>(), weights(1) + 2 * state(1),
              100);  // a recurrent state does not
}

TEST_F(BenchModels, TimesPromptsAndGeneration) {
  const json found =
      rows("full.toml window.toml scan.toml --steps 0 --decode 3 --prompt 40 --generate 9");
  for (const json& row : found) {
    EXPECT_EQ(row.at("failure"), "") << row;
    const json& part = row.at("generation");
    const double prompt = part.at("prompt_seconds");
    const double rest = part.at("seconds");
    EXPECT_GT(prompt, 0) << row;
    EXPECT_GT(rest, 0) << row;
    EXPECT_NEAR(part.at("total_seconds").get<double>(), prompt + rest, 1e-9) << row;
    EXPECT_NEAR(part.at("prompt_tokens_per_second").get<double>() * prompt, 3 * 40, 1e-6) << row;
    EXPECT_NEAR(part.at("tokens_per_second").get<double>() * rest, 3 * 8, 1e-6) << row;
    EXPECT_GT(row.at("peak_memory_bytes"), 0) << row;
    EXPECT_FALSE(row.contains("decode")) << row;
  }
}

}  // namespace
}  // namespace assay::cli
