// The plan that is written for a token store: valid, and fitted to its domains and tokens.
#include "study/plan_template.h"

#include <gtest/gtest.h>

#include "data/folder.h"
#include "data/store_writer.h"
#include "data/synthetic.h"
#include "study/plan.h"

namespace assay::study {
namespace {

class PlanTemplate : public testing::Test {
 protected:
  // A store with `tokens` tokens in each "domain.split".
  data::TokenStore store(const std::vector<std::pair<std::string, int64_t>>& parts,
                         int64_t vocabulary = 256) {
    data::StoreWriter writer(folder_ / "store", {"none", "", vocabulary, 0}, /*overwrite=*/true);
    for (const auto& [part, tokens] : parts) {
      const std::vector<int32_t> ids(size_t(tokens - 1), 7);  // the writer adds the separator
      const size_t dot = part.find('.');
      writer.add(part.substr(0, dot), part.substr(dot + 1), ids, tokens);
    }
    writer.commit();
    return data::TokenStore(folder_ / "store");
  }
  Plan plan(const data::TokenStore& store, const std::vector<std::string>& train = {}) {
    return read_plan(folder_.write("plan.toml", plan_template(store, train).text));
  }
  std::string message(const data::TokenStore& store, const std::vector<std::string>& train = {}) {
    try {
      plan_template(store, train);
    } catch (const BadInput& error) {
      return error.what();
    }
    return "";
  }
  using Names = std::vector<std::string>;
  data::Folder folder_;
};

TEST_F(PlanTemplate, DomainsWithoutTrainingTextAreOutOfDomain) {
  const Plan found = plan(store({{"web.train", 9000},
                                 {"web.valid", 900},
                                 {"web.test", 900},
                                 {"code.valid", 900},
                                 {"code.test", 900}}));
  EXPECT_EQ(found.settings[0].data.train, Names{"web"});
  EXPECT_EQ(found.settings[0].data.out_of_domain, Names{"code"});
  EXPECT_EQ(found.settings[0].data.store, (folder_ / "store").string());
  EXPECT_TRUE(found.has_ladder);
  EXPECT_TRUE(found.tuning);
}

TEST_F(PlanTemplate, LargerHalfIsTrainedOnWhenAllDomainsHaveTrainingText) {
  const auto all = store({{"a.train", 500},
                          {"a.valid", 100},
                          {"a.test", 100},
                          {"b.train", 700},
                          {"b.valid", 100},
                          {"b.test", 100},
                          {"c.train", 600},
                          {"c.valid", 100},
                          {"c.test", 100}});
  EXPECT_EQ(plan(all).settings[0].data.train, (Names{"b", "c"}));
  EXPECT_EQ(plan(all).settings[0].data.out_of_domain, Names{"a"});
  EXPECT_EQ(plan(all, {"a"}).settings[0].data.train, Names{"a"});
  EXPECT_EQ(plan(all, {"a"}).settings[0].data.out_of_domain, (Names{"b", "c"}));
}

TEST_F(PlanTemplate, OneDomainGivesTheMixedDomainSetting) {
  const Plan found = plan(store({{"web.train", 9000}, {"web.valid", 900}}));
  EXPECT_EQ(found.settings[0].data.train, Names{"web"});
  EXPECT_TRUE(found.settings[0].data.out_of_domain.empty());
}

TEST_F(PlanTemplate, DomainsWithoutTestTextAreAllTrainedOn) {
  const Plan found =
      plan(store({{"a.train", 9000}, {"a.valid", 900}, {"c.train", 800}, {"c.valid", 900}}));
  EXPECT_EQ(found.settings[0].data.train, (Names{"a", "c"}));
  EXPECT_TRUE(found.settings[0].data.out_of_domain.empty());
}

TEST_F(PlanTemplate, SequencesFitTheSmallestSet) {
  EXPECT_EQ(plan(store({{"web.train", 9000}, {"web.valid", 130}})).settings[0].data.sequence_length,
            64);
  EXPECT_EQ(
      plan(store({{"web.train", 9000}, {"web.valid", 9000}})).settings[0].data.sequence_length,
      256);
}

TEST_F(PlanTemplate, BudgetsGrowWithTheTrainingText) {
  const Plan small = plan(store({{"web.train", 9000}, {"web.valid", 900}}));
  const Plan large = plan(store({{"web.train", 8'000'000}, {"web.valid", 90000}}));
  const auto longest = [](const Plan& plan) { return plan.models[0].budgets.back().tokens; };
  EXPECT_NEAR(double(longest(small)), 819'200, 8 * 16 * 256);
  EXPECT_NEAR(double(longest(large)), 8e6, 8 * 16 * 512);
  EXPECT_EQ(large.models[0].layers[1].value("d_model"), "256");
}

// The numbers that docs/statistics.md asks for.
TEST_F(PlanTemplate, LadderHasFourRungsOfFourSeedsAndContendersHaveThree) {
  const Plan found = plan(store({{"web.train", 9000}, {"web.valid", 900}}));
  const auto& ladder = found.models[0].budgets;
  ASSERT_EQ(ladder.size(), 4u);
  for (const Budget& rung : ladder) EXPECT_EQ(rung.seeds.size(), 4u);
  ASSERT_EQ(found.models[1].budgets.size(), 1u);
  EXPECT_EQ(found.models[1].budgets[0].tokens, ladder[2].tokens);
  EXPECT_EQ(found.models[1].budgets[0].seeds.size(), 3u);
}

TEST_F(PlanTemplate, LittleTextAndALargeVocabularyAreWarnedOf) {
  const auto warnings = [&](int64_t tokens, int64_t vocabulary) {
    return plan_template(store({{"web.train", tokens}, {"web.valid", 900}}, vocabulary)).warnings;
  };
  const auto small = warnings(9000, 16'000);
  ASSERT_EQ(small.size(), 3u);
  EXPECT_NE(small[0].find("reads 0.819M tokens"), std::string::npos) << small[0];
  EXPECT_NE(small[1].find("has 72 % of the parameters"), std::string::npos) << small[1];
  EXPECT_NE(small[1].find("--vocab 2048 "), std::string::npos) << small[1];
  EXPECT_EQ(small[2].find("the longest run of the reference reads its training text 91.0 times"),
            0u)
      << small[2];
  EXPECT_EQ(warnings(9000, 6144).size(), 2u);
  EXPECT_EQ(warnings(41'000'000, 16'000), Names{});
}

TEST_F(PlanTemplate, RepeatedSyntheticTextIsWarnedOf) {
  data::synthesize(folder_ / "synthetic", {.documents = 100, .held_out = 20});
  const auto warnings = plan_template(data::TokenStore(folder_ / "synthetic"), {}).warnings;
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("reads its training text 16.0 times"), std::string::npos)
      << warnings[0];
}

TEST_F(PlanTemplate, PythonModuleIsShownAsAPatternOfItsOwn) {
  std::string text = plan_template(store({{"web.train", 9000}, {"web.valid", 900}}), {}).text;
  for (const char* line : {"pattern = [\"python:MyMixer\"]", "python  = \"my_mixer.py\""})
    EXPECT_NE(text.find("\n# " + std::string(line)), std::string::npos) << text;
}

TEST_F(PlanTemplate, TableSaysWhichSplitADomainLacks) {
  const auto some = store({{"web.train", 9000},
                           {"web.valid", 900},
                           {"news.train", 800},
                           {"code.valid", 900},
                           {"math.train", 900},
                           {"math.test", 900}});
  const auto [text, warnings] = plan_template(some);
  const auto use = [&](const std::string& domain) {
    const size_t line = text.find("#   " + domain);
    return text.substr(line, text.find('\n', line) - line);
  };
  EXPECT_NE(use("news").find("none (no split valid;"), std::string::npos) << use("news");
  EXPECT_NE(use("code").find("none (no split test)"), std::string::npos) << use("code");
  EXPECT_EQ(
      std::ranges::count_if(warnings, [](auto& w) { return w.find("no split valid") < w.size(); }),
      2);
}

TEST_F(PlanTemplate, DomainsThatCannotBeTrainedOnAreRefused) {
  const auto some =
      store({{"web.train", 9000}, {"web.valid", 900}, {"code.test", 900}, {"news.train", 900}});
  EXPECT_NE(message(some, {"wep"}).find("no domain 'wep'; did you mean 'web'?"), std::string::npos);
  EXPECT_NE(message(some, {"code"}).find("'code' has no tokens in split train"), std::string::npos);
  EXPECT_NE(message(some, {"news"}).find("'news' has no tokens in split valid"), std::string::npos);
  EXPECT_NE(message(store({{"code.test", 900}})).find("no domain has the splits train and valid"),
            std::string::npos);
}

}  // namespace
}  // namespace assay::study
