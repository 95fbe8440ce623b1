// --json: exactly one JSON document on standard output, whatever stands on standard error.
#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace assay::cli {
namespace {

using nlohmann::json;

json document(const data::Folder& folder, const std::string& arguments, int exit_code = 0) {
  const Outcome outcome = run(folder.path(), arguments + " --json");
  EXPECT_EQ(outcome.exit_code, exit_code) << arguments << "\n" << outcome.error;
  // Refuses a second document
  const json parsed = json::parse(outcome.out, nullptr, /*allow_exceptions=*/false);
  EXPECT_FALSE(parsed.is_discarded()) << arguments << "\n" << outcome.out;
  return parsed;
}

TEST(Json, OneDocumentFromEveryCommand) {
  const data::Folder folder;
  synthesize(folder);
  EXPECT_FALSE(document(folder, "doctor").at("operators").empty());
  const json mixers = document(folder, "list mixers");
  EXPECT_NE(std::ranges::find(mixers, "attention"), mixers.end());
  for (const char* kind : {"channel_mixers", "ops", "models", "plans"})
    EXPECT_TRUE(document(folder, std::string("list ") + kind).is_array());
  for (const std::string mixer : mixers)
    EXPECT_EQ(document(folder, "describe mixer " + mixer).at("name"), mixer);
  EXPECT_EQ(document(folder, "data info store").at("parts").size(), 12u);
  const json planned = document(folder, train("run", "--dry-run"));
  EXPECT_GT(planned.at("parameters"), 0);
  EXPECT_FALSE(fs::exists(folder / "run"));
  EXPECT_EQ(document(folder, train("run")).at("steps"), 20);
  EXPECT_EQ(document(folder, train("run", "--resume")).at("steps"), 20);
  folder.write("lines", "{\"id\": 1, \"tokens\": [1, 2]}\n{\"id\": 2, \"tokens\": [3]}\n");
  const json scored = document(folder, "score --model run lines");
  EXPECT_EQ(scored.size(), 2u);
  const json exact = document(folder, "score --model run --precision fp64 lines");
  const double narrow = scored[0].at("logprobs")[1];
  const double wide = exact[0].at("logprobs")[1];
  EXPECT_NEAR(wide, narrow, 1e-5);
  EXPECT_NE(wide, double(float(wide))) << "rounded to float32";
  EXPECT_GT(document(folder, "eval loss run --data store")
                .at("evaluation")
                .at("known_a.test")
                .at("tokens"),
            0);
}

// U+FFFD stands for a byte that is not UTF-8.
TEST(Json, NamesThatAreNotUtf8AreReplaced) {
  const data::Folder folder;
  synthesize(folder);
  fs::rename(folder / "store", folder / "store\xff");
  EXPECT_EQ(document(folder, "data info $(printf 'store\\377')").at("parts").size(), 12u);
  const json error = document(folder, "data info $(printf 'missing\\377')", 2);
  EXPECT_NE(error.at("error").get<std::string>().find("missing\uFFFD"), std::string::npos);
}

TEST(Json, ErrorsAreOneDocumentToo) {
  const data::Folder folder;
  const json error = document(folder, "data info missing", 2);
  EXPECT_EQ(error.at("exit_code"), 2);
  EXPECT_NE(error.at("error").get<std::string>().find("missing"), std::string::npos);
}

TEST(Json, ErrorsInTheArgumentsAreOneDocumentToo) {
  const data::Folder folder;
  for (const char* arguments : {"lsit mixers", "data inf store", "eval los", "train x --data",
                                "data", "eval", "bench", "plan", "tokenizer", "list mixers --nope"})
    EXPECT_EQ(document(folder, arguments, 2).at("exit_code"), 2) << arguments;
}

TEST(Json, InterruptedComparisonOfModelsIsOneDocument) {
  const data::Folder folder;
  const std::string options =
      "--steps 1000000 --time 16 --vocab 50 --device cpu --threads 1 --json";
  Process process(folder.path(), fmt::format("bench models '{0}' '{0}' {1}", kSmoke, options));
  sleep_seconds(3);
  process.signal(SIGINT);
  const Outcome outcome = process.wait();
  EXPECT_EQ(outcome.exit_code, 130) << outcome.error;
  EXPECT_FALSE(json::parse(outcome.out, nullptr, /*allow_exceptions=*/false).is_discarded())
      << outcome.out;
}

}  // namespace
}  // namespace assay::cli
