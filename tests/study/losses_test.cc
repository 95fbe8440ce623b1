// Files of losses that other programs wrote.
#include "study/losses.h"

#include <cmath>

#include "data/folder.h"

namespace assay::study {
namespace {

using data::message_of;

std::string run_line(const std::string& model, int64_t seed = 1, int64_t tokens = 1000,
                     const std::string& more = "") {
  return fmt::format(R"({{"run": {{"model": "{}", "seed": {}, "tokens": {}{}}}}})", model, seed,
                     tokens, more) +
         "\n";
}

std::string line(const std::string& role, const std::string& domain, const std::string& source,
                 double nats) {
  return fmt::format(
             R"({{"role": "{}", "domain": "{}", "source": "{}", "document": "1", "nats": {}, )"
             R"("tokens": 10, "bytes": 40, "recall_nats": 2.5, "recall_tokens": 4}})",
             role, domain, source, nats) +
         "\n";
}

const std::string kDocuments = line("held_out", "web", "a.org", 30) +
                               line("held_out", "web", "a.org", 32) +
                               line("out_of_domain", "code", "b", 50);

// A reference needs two budgets.
std::string twice(const std::string& documents, const std::string& more = "") {
  return run_line("base", 1, 1000, more) + documents + run_line("base", 1, 2000, more) + documents;
}

class Losses : public testing::Test {
 protected:
  ForeignLosses read(const std::string& text, const std::string& reference = "base") {
    folder_.write("losses.jsonl", text);
    return read_losses({folder_ / "losses.jsonl"}, reference);
  }
  data::Folder folder_;
};

TEST_F(Losses, DocumentsOfOneSourceAreSummed) {
  const ForeignLosses found = read(twice(kDocuments));
  ASSERT_EQ(found.records.size(), 2u);
  const run::RunRecord& record = found.records.begin()->second;
  const run::EndSet& web = record.end.sets.at("web.valid");
  EXPECT_EQ(web.clusters.names, std::vector<std::string>{"a.org"});
  EXPECT_EQ(web.clusters.nll, std::vector<double>{62});
  EXPECT_EQ(web.clusters.tokens, std::vector<int64_t>{20});
  EXPECT_EQ(web.clusters.recall_tokens, std::vector<int64_t>{8});
  EXPECT_DOUBLE_EQ(web.loss, 3.1);
  EXPECT_DOUBLE_EQ(web.recall_loss, 5.0 / 8);
  EXPECT_DOUBLE_EQ(record.end.sets.at("code.test").loss, 5);
  EXPECT_EQ(found.plan.settings.at(0).train, std::vector<std::string>{"web"});
  EXPECT_EQ(found.plan.settings.at(0).out_of_domain, std::vector<std::string>{"code"});
  EXPECT_EQ(found.unit, "token");
}

TEST_F(Losses, OtherTokenizersAreComparedPerByte) {
  // 4 bytes per token of the reference, 8 per token of the other model
  std::string longer = kDocuments;
  for (size_t at = 0; (at = longer.find("\"tokens\": 10", at)) != std::string::npos; ++at)
    longer.replace(at, 12, "\"tokens\": 5");
  const ForeignLosses found =
      read(twice(kDocuments, R"(, "tokenizer": "x", "training_loss": 3)") +
           run_line("mine", 1, 1000, R"(, "tokenizer": "y", "training_loss": 6)") + longer);
  EXPECT_EQ(found.unit, "byte");
  EXPECT_NE(found.notes.at(0).find("nats per 4.00 bytes"), std::string::npos) << found.notes[0];
  ASSERT_EQ(found.records.size(), 3u);
  for (const auto& [key, record] : found.records) {
    EXPECT_DOUBLE_EQ(record.end.sets.at("web.valid").loss, 62.0 / 80 * 4) << record.name;
    EXPECT_DOUBLE_EQ(record.end.sets.at("web.valid").bits_per_byte, 62.0 / 80 / std::log(2));
    EXPECT_DOUBLE_EQ(record.evaluations.training_loss.at(0), 3) << record.name;
  }
}

TEST_F(Losses, NamesOfOtherProgramsAreUnderstood) {
  const auto header = [](int64_t tokens) {
    return fmt::format(
        R"({{"run": {{"model": "base", "tokens": {}}}, "role": "out_of_domain", "domain": "wiki"}})"
        "\n",
        tokens);
  };
  const std::string documents =
      R"({"doc_id": 3, "loss": 2.5, "tokens": 10, "corpus_id": "x", "domain": "wiki"})"
      "\n"
      R"({"doc_id": 4, "bits_per_byte": 1.5, "bytes": 40, "tokens": 10})"
      "\n"
      R"({"doc_id": 5, "filtered_resps": [[-12.5]], "target": "abcde", "tokens": 10})"
      "\n"
      R"({"doc_id": 6, "filtered_resps": [-13.5], "target": "abcde", "tokens": 10, )"
      R"("word_perplexity": [-13.5, 2], "bits_per_byte": [-13.5, 27]})"
      "\n" +
      line("held_out", "web", "a", 30);
  const ForeignLosses found = read(header(1000) + documents + header(2000) + documents);
  const run::Clusters& wiki = found.records.begin()->second.end.sets.at("wiki.test").clusters;
  ASSERT_EQ(wiki.nll.size(), 4u);
  EXPECT_DOUBLE_EQ(wiki.nll[3], 13.5);
  EXPECT_DOUBLE_EQ(wiki.nll[0], 25);
  EXPECT_NEAR(wiki.nll[1], 60 * std::log(2), 1e-12);
  EXPECT_DOUBLE_EQ(wiki.nll[2], 12.5);
  EXPECT_FALSE(wiki.names) << "not every line names a source";
}

TEST_F(Losses, MissingPartsAreSaid) {
  const auto notes =
      read(twice(R"({"role": "held_out", "domain": "web", "document": "1", "nats": 3, "tokens": 1})"
                 "\n"
                 R"({"role": "out_of_domain", "domain": "code", "document": "1", "nats": 3, )"
                 R"("tokens": 1})"
                 "\n"))
          .notes;
  ASSERT_EQ(notes.size(), 4u);
  EXPECT_NE(notes[0].find("no model but base"), std::string::npos);
  EXPECT_NE(notes[1].find("maturity of the reference are not checked"), std::string::npos);
  EXPECT_NE(notes[2].find("documents count as independent"), std::string::npos);
  EXPECT_NE(notes[3].find("epochs"), std::string::npos);
  const auto repeated = read(twice(kDocuments, R"(, "epochs": 2)")).notes;
  EXPECT_NE(repeated.back().find("training_loss"), std::string::npos) << repeated.back();
}

std::string document_of(const std::string& losses) {
  return R"({"role": "held_out", "domain": "a", "document": "1", )" + losses + "}\n";
}

TEST_F(Losses, UnitsThatContradictEachOtherAreRejected) {
  const std::string run = run_line("base");
  EXPECT_MESSAGE(read(run + document_of(R"("nats": 30, "loss": 2, "tokens": 10)")),
                 "losses.jsonl:2: 'nats' means 30 nats for the document, and 'loss' means 20");
  EXPECT_MESSAGE(
      read(run + document_of(R"("nats": 30, "bits_per_byte": 1, "tokens": 10, "bytes": 40)")),
      "'bits_per_byte' means 27.7");
  // A sum that is called loss, and a mean that is called nats
  EXPECT_MESSAGE(read(run + document_of(R"("loss": 512, "tokens": 160)")),
                 "512 nats per token, which is impossible");
  EXPECT_MESSAGE(read(run + document_of(R"("nats": 3, "tokens": 160)") +
                      R"({"role": "out_of_domain", "domain": "b", "document": "1", "nats": 3, )"
                      R"("tokens": 160})"),
                 "losses.jsonl:1: The loss of the run is 0.0187 nats per token");
  EXPECT_MESSAGE(
      read(run + document_of(R"("nats": 30, "tokens": 10, "recall_nats": 3, "recall_tokens": 11)")),
      "must be parts of the nats and tokens");
  // Rounded values agree
  const std::string both = R"("nats": 30.001, "loss": 3.0, "tokens": 10)";
  EXPECT_MESSAGE(read(run + document_of(both)), "\"out_of_domain\"");
}

TEST_F(Losses, DomainWithBothRolesIsRejected) {
  EXPECT_MESSAGE(read(run_line("base") + kDocuments + line("out_of_domain", "web", "c", 30)),
                 "losses.jsonl:1: The domain 'web' is held_out and out_of_domain in this run");
}

TEST_F(Losses, BadFilesAreRejectedWithTheirLine) {
  const std::string run = run_line("base");
  EXPECT_MESSAGE(read(kDocuments), "losses.jsonl:1: The first line must be about the run");
  EXPECT_MESSAGE(read(""), "The file is empty");
  EXPECT_MESSAGE(read(run + "{]"), "losses.jsonl:2");
  const std::string document = R"(, "domain": "a", "document": "1", "nats": 1, "tokens": 1})";
  EXPECT_MESSAGE(read(run + R"({"role": "x")" + document),
                 "'role' is \"x\"; expected \"held_out\" or \"out_of_domain\"");
  EXPECT_MESSAGE(read(run + R"({"role": "held_out", "domain": "a", "document": "1", "tokens": 1})"),
                 "The line has no loss");
  EXPECT_MESSAGE(read(run + R"({"role": "held_out", "domain": "a", "nats": 1, "tokens": 1})"),
                 "neither source nor document");
  EXPECT_MESSAGE(
      read(run + R"({"role": "held_out", "domain": "a", "document": "1", "nats": 1, "tokens": 0})"),
      "'tokens' must be a positive whole number");
  EXPECT_MESSAGE(read(run + document_of(R"("nats": 30, "tokens": 10.5)")),
                 "'tokens' must be a positive whole number");
  EXPECT_MESSAGE(read(run + kDocuments + document_of(R"("nats": 30, "bytes": 40)")),
                 "losses.jsonl:5 has no tokens, and ");
  EXPECT_MESSAGE(read(run_line("base", 1, 1000, R"(, "training_loss": 3.2)") +
                      line("held_out", "web", "a", 3.1) + line("out_of_domain", "code", "b", 3.1)),
                 "losses.jsonl:1: The loss of the run is 0.3100 nats per token");
  EXPECT_MESSAGE(read(run + line("held_out", "web", "a", 3)), "\"out_of_domain\"");
  EXPECT_MESSAGE(read(run + kDocuments + run + kDocuments), "occurs twice");
  EXPECT_MESSAGE(read(run + kDocuments), "two or more budgets with two or more seeds each");
  EXPECT_MESSAGE(read(run + line("held_out", "web", "a", -1)), "must not be negative");
  EXPECT_MESSAGE(read(run_line("base", 1, 1000, R"(, "epochs": 0)")), "'epochs' must be positive");
  EXPECT_MESSAGE(read(run + kDocuments, "bose"), "did you mean 'base'?");
  EXPECT_MESSAGE(read(run + kDocuments + run_line("mine") + line("held_out", "web", "a.org", 3) +
                      line("out_of_domain", "code", "b", 3)),
                 "must be evaluated on the same documents");
}

TEST_F(Losses, MissingDocumentIsNamedWithItsLineAndSource) {
  EXPECT_MESSAGE(
      read(run_line("base") + kDocuments + run_line("mine") + line("held_out", "web", "a.org", 30) +
           line("out_of_domain", "code", "b", 50)),
      "losses.jsonl:3: In web.valid, the run has 2 lines about the source 'a.org', "
      "and the run at ");
  // The second document is missing in the first run.
  const std::string unsourced = document_of(R"("nats": 30, "tokens": 10)");
  std::string second = unsourced;
  second.replace(second.find("\"1\""), 3, "\"5\"");
  const std::string code = line("out_of_domain", "code", "b", 50);
  const std::string text =
      run_line("base") + unsourced + code + run_line("mine") + unsourced + second + code;
  EXPECT_MESSAGE(read(text), "losses.jsonl:1: In a.valid, the run has no line about ");
  EXPECT_MESSAGE(read(text), "the document '5' (it has no source). Another run has 1, ");
  EXPECT_MESSAGE(read(text), "losses.jsonl:6. All runs must");
}

TEST_F(Losses, DuplicateIsReportedAtItsOwnLine) {
  const std::string text = document_of(R"("nats": 30, "tokens": 10)");
  const std::string code = line("out_of_domain", "code", "b", 50);
  const std::string good = text + code;
  const std::string duplicated = text + text + code;
  const std::string words = "the run has 2 lines about the document '1' (it has no source), ";
  for (const auto& [losses, place] :
       {std::pair(run_line("base") + good + run_line("mine") + duplicated, 6),
        {run_line("base") + duplicated + run_line("mine") + good, 3}}) {
    EXPECT_MESSAGE(read(losses), fmt::format("losses.jsonl:{}: In a.valid, {}", place, words));
  }
}

TEST_F(Losses, RunsWithoutNameOrTokensAreRejected) {
  EXPECT_MESSAGE(read(run_line("base", 1, -1)),
                 "losses.jsonl:1: 'tokens' is -1; the training tokens must be positive");
  EXPECT_MESSAGE(read(run_line("")), "losses.jsonl:1: 'model' must be the name of a model");
}

}  // namespace
}  // namespace assay::study
