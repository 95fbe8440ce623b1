#include "data/prepare.h"

#include <csignal>

#include "base/interrupt.h"
#include "base/random.h"
#include "compressed.h"
#include "data/adopt.h"
#include "data/token_store.h"
#include "data/tokenizer.h"
#include "folder.h"

namespace assay::data {
namespace {

using nlohmann::json;

std::string document(const std::string& text, const std::string& set) {
  return json{{"text", text}, {"meta", {{"redpajama_set_name", set}}}}.dump() + "\n";
}

std::string prose(uint64_t seed, uint64_t words) {
  Random random(seed, "prose");
  std::string text;
  for (uint64_t i = 0; i < words; ++i)
    text += (i % 13 ? " " : "\n") + std::string(1 + random.below(7), char('a' + random.below(26)));
  return text;
}

// A small trained model, made once.
const fs::path& tokenizer_file() {
  static const Folder folder;
  static const fs::path file = [] {
    folder.write("a.txt", prose(0, 5000));
    train_tokenizer({.inputs = {folder / "a.txt"}, .vocab_size = 400}, folder / "m.model");
    return folder / "m.model";
  }();
  return file;
}

PrepareOptions options_for(const Folder& folder, std::vector<fs::path> inputs) {
  return {.inputs = std::move(inputs), .store = folder / "store", .tokenizer = tokenizer_file()};
}

std::vector<std::string> warnings_of(const json& report) {
  return report.value("warnings", std::vector<std::string>());
}

TEST(Prepare, WritesEveryDocumentWithItsSeparator) {
  const Folder folder;
  const std::string first = "Hello, world!\n  two  spaces";
  const std::string second = "汉字 and 😀";
  const fs::path input = folder.write(
      "x.test.jsonl.zst",
      zstd(document(first, "RedPajamaCommonCrawl") + document(second, "RedPajamaBook")));
  const json report = prepare(options_for(folder, {input}));
  const TokenStore store(folder / "store");
  const Tokenizer tokenizer(tokenizer_file());
  EXPECT_EQ(store.domains(), (std::vector<std::string>{"book", "cc"}));
  const Documents& cc = store.documents("cc", "test");
  std::vector<int64_t> ids(size_t(cc.tokens()));
  cc.read(0, cc.tokens(), ids.data());
  auto expected = tokenizer.encode(first);
  expected.push_back(2);
  EXPECT_EQ(ids, std::vector<int64_t>(expected.begin(), expected.end()));
  EXPECT_EQ(cc.bytes(0), int64_t(first.size()));
  EXPECT_EQ(store.documents("book", "test").bytes(), int64_t(second.size()));
  EXPECT_EQ(store.separator(), 2);
  EXPECT_EQ(store.tokenizer().sha256, tokenizer.sha256());
  EXPECT_EQ(Tokenizer(store.tokenizer_file()).sha256(), tokenizer.sha256());
  EXPECT_EQ(report.at("total").at("documents"), 2);
  EXPECT_EQ(store.manifest().at("sources").at(0).at("documents"), 2);
  store.verify();
}

TEST(Prepare, IsTheSameForAnyNumberOfThreads) {
  const Folder folder;
  std::vector<fs::path> inputs;
  for (uint64_t file = 0; file < 3; ++file) {
    std::string text;
    for (uint64_t i = 0; i < 400; ++i)
      text +=
          document(prose(1000 * file + i, 20 + 10 * i), i % 3 ? "RedPajamaC4" : "RedPajamaGithub");
    inputs.push_back(folder.write("part" + std::to_string(file) + ".jsonl", text));
  }
  std::string fingerprint;
  for (const int threads : {1, 2, 7}) {
    auto options = options_for(folder, inputs);
    options.threads = threads;
    options.overwrite = true;
    options.valid_fraction = 0.1;
    prepare(options);
    const TokenStore store(folder / "store");
    if (fingerprint.empty()) fingerprint = store.fingerprint();
    EXPECT_EQ(store.fingerprint(), fingerprint) << threads << " threads";
    EXPECT_EQ(store.documents("c4", "train").size() + store.documents("c4", "valid").size(), 798)
        << threads << " threads";
  }
}

TEST(Prepare, ShortensTheSevenSetNamesAndCountsOthers) {
  const Folder folder;
  std::string text;
  for (const char* name :
       {"CommonCrawl", "C4", "Wikipedia", "Book", "ArXiv", "Github", "StackExchange"})
    text += document("text", std::string("RedPajama") + name);
  text += document("text", "Unheard") +
          "{\"text\": \"no set\"}\n{broken\n{\"text\": \"\"}\n{\"text\": \"\xff\"}\n";
  auto options = options_for(folder, {folder.write("a.jsonl", text)});
  options.valid_fraction = 0;
  const json report = prepare(options);
  EXPECT_EQ(TokenStore(folder / "store").domains(),
            (std::vector<std::string>{"arxiv", "book", "c4", "cc", "github", "stack", "wiki"}));
  const json& source = report.at("sources").at(0);
  EXPECT_EQ(source.at("documents"), 7);
  EXPECT_EQ(source.at("unknown_domain"), 2);
  EXPECT_EQ(source.at("broken_lines"), 1);
  EXPECT_EQ(source.at("empty"), 1);
  EXPECT_EQ(source.at("invalid_utf8"), 1);
  const auto left_out = source.at("left_out").get<std::string>();
  EXPECT_TRUE(left_out.starts_with("1 broken line (the first: line 10: ")) << left_out;
  EXPECT_TRUE(left_out.ends_with("), 1 with invalid UTF-8, 1 empty, 2 of no known domain"))
      << left_out;
  EXPECT_EQ(report.at("warnings")
                .at(0)
                .get<std::string>()
                .find("1 of 1 files have broken lines, "
                      "1 in all (the first: "),
            0);
}

TEST(Prepare, TakesTheDomainFromAFieldOrTheFileName) {
  const Folder folder;
  folder.write("in/a.test.jsonl", "{\"text\": \"t\", \"source\": \"my blog\"}\n");
  folder.write("in/test/poems/one.txt", "a poem");
  auto options = options_for(folder, {folder / "in"});
  options.field = "source";
  options.domains = {{"poems", "*/poems/*"}};
  prepare(options);
  EXPECT_EQ(TokenStore(folder / "store").domains(), (std::vector<std::string>{"my_blog", "poems"}));
}

std::string document_of(const std::string& text, const json& source) {
  json line = {{"text", text},
               {"meta", {{"redpajama_set_name", "RedPajamaC4"}, {"source", source}}}};
  return line.dump() + "\n";
}

std::vector<std::string> sources_of(const Documents& documents) {
  std::vector<std::string> sources;
  for (int64_t i = 0; i < documents.size(); ++i) {
    const int64_t source = documents.source(i);
    sources.push_back(source < 0 ? "" : documents.source_names()[size_t(source)]);
  }
  return sources;
}

TEST(Prepare, KeepsTheSourceOfEveryDocument) {
  const Folder folder;
  const std::string text = document("no source", "RedPajamaC4") + document_of("one", "owner/b") +
                           document_of("two", "owner/a") + document_of("a number", 3) +
                           document_of("empty", "") + document_of("three", "owner/b") +
                           document_of("汉字", "所有者/库");
  prepare(options_for(folder,
                      {folder.write("x.test.jsonl", text), folder.write("y.test.txt", "text")}));
  const TokenStore store(folder / "store");
  EXPECT_EQ(sources_of(store.documents("c4", "test")),
            (std::vector<std::string>{"", "owner/b", "owner/a", "", "", "owner/b", "所有者/库"}));
  store.verify();
}

TEST(Prepare, ReadsTheSourceFromTheGivenField) {
  const Folder folder;
  std::string text =
      json{{"text", "t"}, {"repository", "r"}, {"meta", {{"source", "s"}}}}.dump() + "\n";
  auto options = options_for(folder, {folder.write("x.test.jsonl", text)});
  options.domains = {{"code", "*"}};
  options.source_field = "repository";
  options.overwrite = true;
  prepare(options);
  EXPECT_EQ(sources_of(TokenStore(folder / "store").documents("code", "test")),
            std::vector<std::string>{"r"});
  options.source_field = "";
  prepare(options);
  EXPECT_FALSE(TokenStore(folder / "store").documents("code", "test").has_sources());
}

TEST(Prepare, SourcesAreTheSameForAnyNumberOfThreads) {
  const Folder folder;
  std::vector<fs::path> inputs;
  for (uint64_t file = 0; file < 3; ++file) {
    std::string text;
    for (uint64_t i = 0; i < 400; ++i)
      text += document_of(prose(1000 * file + i, 20 + 10 * i),
                          "source " + std::to_string(i % 7 + file));
    inputs.push_back(folder.write("part" + std::to_string(file) + ".jsonl", text));
  }
  std::vector<std::string> expected;
  for (const int threads : {1, 2, 7}) {
    auto options = options_for(folder, inputs);
    options.threads = threads;
    options.overwrite = true;
    prepare(options);
    const TokenStore store(folder / "store");
    const auto sources = sources_of(store.documents("c4", "train"));
    if (expected.empty()) expected = sources;
    EXPECT_EQ(sources, expected) << threads << " threads";
    EXPECT_EQ(store.documents("c4", "train").source_names().size(), 9u) << threads << " threads";
  }
}

TEST(Prepare, MovesAShareOfTheTrainingDocumentsByTheirContent) {
  const Folder folder;
  std::string text;
  std::string test;
  for (uint64_t i = 0; i < 2000; ++i) text += document(prose(i, 3), "RedPajamaC4");
  for (uint64_t i = 0; i < 50; ++i) test += document(prose(i, 3), "RedPajamaC4");
  auto options =
      options_for(folder, {folder.write("a.jsonl", text), folder.write("a.test.jsonl", test)});
  options.valid_fraction = 0.2;
  prepare(options);
  const TokenStore store(folder / "store");
  EXPECT_NEAR(double(store.documents("c4", "valid").size()), 400, 4 * std::sqrt(2000 * 0.2 * 0.8));
  EXPECT_EQ(store.documents("c4", "test").size(), 50);
}

TEST(Prepare, TextWithoutADomainGetsTheFoldersAsASuggestion) {
  const Folder folder;
  for (const char* name : {"in/train/a.txt", "in/test/b.txt", "in/test/my poems/c.txt"})
    folder.write(name, "text");
  const auto options = options_for(folder, {folder / "in"});
  const std::string in = (folder / "in").string();
  for (const std::string& domain :
       {"in=" + in + "/train/*", "in=" + in + "/test/*", "my_poems=" + in + "/test/my poems/*"})
    EXPECT_MESSAGE(prepare(options), "--domain '" + domain + "'");
}

TEST(Prepare, SuggestedDomainsAreAccepted) {
  const Folder folder;
  folder.write("in[1]/poems/train/a.txt", "text");
  auto options = options_for(folder, {folder / "in[1]"});
  const std::string message = message_of([&] { prepare(options); });
  const size_t begin = message.find("'poems=") + 7;
  options.domains = {{"poems", message.substr(begin, message.find('\'', begin) - begin)}};
  prepare(options);
  EXPECT_EQ(TokenStore(folder / "store").documents("poems", "train").size(), 1);
}

TEST(Prepare, SuggestedDomainsOfNestedFoldersTakeTheirFiles) {
  const Folder folder;
  for (const char* name : {"k/code/x.txt", "k/code/python/y.txt", "k/web/z.txt"})
    folder.write(name, "text");
  auto options = options_for(folder, {folder / "k"});
  const std::string message = message_of([&] { prepare(options); });
  for (size_t begin = 0; (begin = message.find("--domain '", begin)) != std::string::npos;) {
    begin += std::string("--domain '").size();
    const size_t equals = message.find('=', begin);
    const size_t end = message.find('\'', begin);
    options.domains.emplace_back(message.substr(begin, equals - begin),
                                 message.substr(equals + 1, end - equals - 1));
  }
  ASSERT_EQ(options.domains.size(), 3u) << message;
  options.valid_fraction = 0;
  EXPECT_TRUE(warnings_of(prepare(options)).empty());
  EXPECT_EQ(TokenStore(folder / "store").domains(),
            (std::vector<std::string>{"code", "python", "web"}));
}

TEST(Prepare, PatternsThatTakeNoFileAreWarnedOf) {
  const Folder folder;
  folder.write("in/code/python/a.txt", "text");
  auto options = options_for(folder, {folder / "in"});
  options.valid_fraction = 0;
  options.domains = {{"code", "*/code/*"}, {"python", "*/python/*"}, {"typo", "*/wbe/*"}};
  const auto warnings = warnings_of(prepare(options));
  ASSERT_EQ(warnings.size(), 2u);
  EXPECT_NE(warnings[0].find("'python=*/python/*' took no file"), std::string::npos) << warnings[0];
  EXPECT_NE(warnings[1].find("'typo=*/wbe/*' matches none of the 1"), std::string::npos)
      << warnings[1];
}

TEST(Prepare, WrongFieldListsTheFieldsThatArePresent) {
  const Folder folder;
  const json line = {{"text", "t"}, {"id", 3}, {"meta", {{"set", "a"}, {"more", {{"site", "b"}}}}}};
  auto options = options_for(folder, {folder.write("a.jsonl", line.dump() + "\n")});
  options.field = "meta.sets";
  EXPECT_MESSAGE(prepare(options),
                 "missing (there are: meta.more.site, meta.set; did you mean 'meta.set'?)");
}

TEST(Prepare, FilesWithoutADomainAreWarnedOf) {
  const Folder folder;
  const fs::path good = folder.write("a.test.jsonl", document("text", "RedPajamaC4"));
  const auto warnings =
      warnings_of(prepare(options_for(folder, {good, folder.write("poems/b.txt", "text")})));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("1 of 2 files were left out"), std::string::npos) << warnings[0];
  EXPECT_NE(warnings[0].find("--domain 'poems="), std::string::npos) << warnings[0];
}

TEST(Prepare, TrainingDomainWithoutAValidSplitIsWarnedOf) {
  const Folder folder;
  auto options = options_for(folder, {folder.write("a.jsonl", document("text", "RedPajamaC4"))});
  options.valid_fraction = 1e-9;
  options.overwrite = true;
  const auto warnings = warnings_of(prepare(options));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("domain c4 has no split valid"), std::string::npos) << warnings[0];
  EXPECT_NE(warnings[0].find("--valid-fraction 0.5"), std::string::npos) << warnings[0];
  options.valid_fraction = 0;  // asked for
  EXPECT_TRUE(warnings_of(prepare(options)).empty());
}

TEST(Prepare, FewHeldOutDocumentsAreWarnedOf) {
  const Folder folder;
  std::string text;
  for (int i = 0; i < 100; ++i) text += document("text " + std::to_string(i), "RedPajamaC4");
  auto options = options_for(folder, {folder.write("a.jsonl", text)});
  options.overwrite = true;
  options.valid_fraction = 0.03;
  const auto warnings = warnings_of(prepare(options));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("documents in split valid"), std::string::npos) << warnings[0];
  EXPECT_NE(warnings[0].find("--valid-fraction 0.1 chooses about 10"), std::string::npos)
      << warnings[0];
  options.valid_fraction = 0.3;
  EXPECT_TRUE(warnings_of(prepare(options)).empty());
}

// Two documents that give these names of domains in the field "d".
json prepare_named(const Folder& folder, const std::string& first, const std::string& second) {
  const std::string text = fmt::format(
      "{{\"text\": \"a\", \"d\": \"{}\"}}\n{{\"text\": \"b\", \"d\": \"{}\"}}\n", first, second);
  auto options = options_for(folder, {folder.write("a.test.jsonl", text)});
  options.field = "d";
  return prepare(options);
}

TEST(Prepare, DomainsInOtherScriptsStayApart) {
  const Folder folder;
  EXPECT_TRUE(warnings_of(prepare_named(folder, "日本", "中国")).empty());
  EXPECT_EQ(TokenStore(folder / "store").domains(), (std::vector<std::string>{"中国", "日本"}));
}

TEST(Prepare, DomainsThatBecomeOneAreWarnedOf) {
  EXPECT_EQ(warnings_of(prepare_named(Folder(), "my blog", "my_blog")),
            std::vector<std::string>{
                "domain my_blog holds the documents of 2 different names: 'my blog', 'my_blog'"});
}

TEST(Prepare, SetNameAndItsShortFormAreWarnedOf) {
  EXPECT_EQ(warnings_of(prepare_named(Folder(), "RedPajamaC4", "c4")),
            std::vector<std::string>{
                "domain c4 holds the documents of 2 different names: 'RedPajamaC4', 'c4'"});
}

TEST(Prepare, DocumentsWithoutATextAreCountedAndTheirFieldsListed) {
  const Folder folder;
  const fs::path good = folder.write("a.test.jsonl", document("text", "RedPajamaC4"));
  const fs::path other = folder.write("b.jsonl", "{\"content\": \"t\", \"id\": \"1\"}\n");
  EXPECT_MESSAGE(prepare(options_for(folder, {other})), "1 without a string 'text'");
  EXPECT_MESSAGE(prepare(options_for(folder, {other})), "(strings are in: content, id)");
  const auto warnings = warnings_of(prepare(options_for(folder, {good, other})));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("1 of 2 files have no document with a text"), std::string::npos)
      << warnings[0];
}

TEST(Prepare, EmptyTextFilesAreCounted) {
  const Folder folder;
  EXPECT_MESSAGE(prepare(options_for(folder, {folder.write("a.txt", "")})), "left out: 1 empty)");
}

TEST(Prepare, DomainWhoseDocumentsAllBecomeValidIsWarnedOf) {
  const Folder folder;
  auto options = options_for(folder, {folder.write("a.jsonl", document("text", "RedPajamaC4"))});
  options.valid_fraction = 0.999999;
  const auto warnings = warnings_of(prepare(options));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("domain c4 has no split train"), std::string::npos) << warnings[0];
}

TEST(Prepare, OneLineWithALongDomainIsLeftOut) {
  const Folder folder;
  const std::string text = "{\"text\": \"a\", \"d\": \"web\"}\n{\"text\": \"b\", \"d\": \"" +
                           std::string(300, 'x') + "\"}\n{\"text\": \"c\", \"d\": \"web\"}\n";
  auto options = options_for(folder, {folder.write("a.test.jsonl", text)});
  options.field = "d";
  const json report = prepare(options);
  EXPECT_EQ(report.at("total").at("documents"), 2);
  EXPECT_EQ(report.at("total").at("unknown_domain"), 1);
}

TEST(Prepare, ProgressDoesNotClaimZeroTokens) {
  const Folder folder;
  const auto options =
      options_for(folder, {folder.write("a.test.jsonl", document(prose(1, 100), "RedPajamaC4"))});
  testing::internal::CaptureStderr();
  prepare(options);
  const std::string progress = testing::internal::GetCapturedStderr();
  EXPECT_NE(progress.find("prepare"), std::string::npos) << progress;
  EXPECT_EQ(progress.find(" 0 tokens"), std::string::npos) << progress;
}

TEST(Prepare, PathsThatNameSeveralSplitsAreWarnedOf) {
  const Folder folder;
  folder.write("in/code/test/a.py", "text");
  folder.write("in/code/test/train/b.py", "text");
  auto options = options_for(folder, {folder / "in"});
  options.domains = {{"code", "*"}};
  const auto warnings = warnings_of(prepare(options));
  EXPECT_EQ(TokenStore(folder / "store").splits("code"), std::vector<std::string>{"test"});
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("1 files name several splits"), std::string::npos) << warnings[0];
  EXPECT_NE(warnings[0].find("train/b.py, taken as test"), std::string::npos) << warnings[0];
}

TEST(Prepare, SplitAboveTheGivenPathIsWarnedOf) {
  const Folder folder;
  folder.write("test/code/a.py", "text");
  folder.write("test/code/b.test.py", "text");
  auto options = options_for(folder, {folder / "test/code"});
  options.domains = {{"code", "*"}};
  options.valid_fraction = 0;
  const auto warnings = warnings_of(prepare(options));
  EXPECT_EQ(TokenStore(folder / "store").documents("code", "train").size(), 1);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("1 files are of split train"), std::string::npos) << warnings[0];
}

TEST(Prepare, NameOfAFileNeedNotBeUtf8) {
  const Folder folder;
  const fs::path input = folder.write("caf\xe9.jsonl", document("text", "RedPajamaC4"));
  prepare(options_for(folder, {input}));
  const std::string file = TokenStore(folder / "store").manifest().at("sources").at(0).at("file");
  EXPECT_TRUE(file.ends_with("caf\uFFFD.jsonl")) << file;
}

TEST(Prepare, LeavesNothingBehindWhenAFileIsUnreadable) {
  const Folder folder;
  const Folder out;
  const std::string bytes = zstd(document(prose(1, 3000), "RedPajamaC4"));
  const fs::path good = folder.write("a.jsonl.zst", bytes);
  const fs::path cut = folder.write("b.jsonl.zst", bytes.substr(0, bytes.size() / 2));
  auto options = options_for(out, {good, cut});
  EXPECT_MESSAGE(prepare(options), "b.jsonl.zst: line 1 or after it: the zstd stream is cut off");
  EXPECT_EQ(out.entries(), 0);
  options.inputs = {good, folder / "missing.jsonl"};
  EXPECT_MESSAGE(prepare(options), "missing.jsonl: no such file");
  EXPECT_EQ(out.entries(), 0);
}

TEST(Prepare, RefusesBeforeItStarts) {
  const Folder folder;
  const Folder out;
  const fs::path input = folder.write("a.jsonl", document("text", "RedPajamaC4"));
  auto options = options_for(out, {input});
  options.valid_fraction = 1;
  EXPECT_MESSAGE(prepare(options), "valid_fraction is 1");
  options.valid_fraction = 0;
  options.threads = 1025;
  EXPECT_MESSAGE(prepare(options), "threads is 1025; 1 … 1024");
  options.threads = 0;
  options.domains = {{"a b", "*"}};
  EXPECT_MESSAGE(prepare(options), "the name of the domain 'a b' is not allowed");
  options = options_for(out, {folder.write("none.jsonl", document("text", "Unheard"))});
  EXPECT_MESSAGE(prepare(options), "--field meta.redpajama_set_name accepts every name");
  options = options_for(out, {folder.write("empty.jsonl", "")});
  EXPECT_MESSAGE(prepare(options), "no document was found");
  options.tokenizer = input;
  EXPECT_MESSAGE(prepare(options), "not a SentencePiece model");
  EXPECT_EQ(out.entries(), 0);
  prepare(options_for(out, {input}));
  EXPECT_MESSAGE(prepare(options_for(out, {input})), "--overwrite");
}

TEST(Prepare, CtrlCLeavesNothingBehind) {
  const Folder folder;
  const Folder out;
  const fs::path input = folder.write("a.jsonl", document(prose(1, 1000), "RedPajamaC4"));
  EXPECT_EXIT(
      {
        catch_interrupts();
        ::kill(::getpid(), SIGINT);
        while (!interrupted()) std::this_thread::yield();
        const auto message = message_of<Interrupted>([&] { prepare(options_for(out, {input})); });
        ::_exit(  // not exit: static folders belong to the parent
            message.find("nothing was left behind") != std::string::npos && out.entries() == 0 ? 0
                                                                                               : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(Adopt, KeepsSources) {
  const Folder folder;
  prepare(options_for(
      folder, {folder.write("x.test.jsonl", document_of("one", "b") + document_of("two", "a"))}));
  adopt({.files = {folder / "store/c4.test.idx"},
         .tokenizer = tokenizer_file(),
         .store = folder / "adopted"});
  const TokenStore adopted(folder / "adopted");
  EXPECT_EQ(sources_of(adopted.documents("c4", "test")), (std::vector<std::string>{"b", "a"}));
  EXPECT_EQ(adopted.fingerprint(), TokenStore(folder / "store").fingerprint());
}

TEST(Adopt, GivesTheStoreThatPrepareWrote) {
  const Folder folder;
  const std::string text = document("Hello, world!\n  two  spaces", "RedPajamaC4") +
                           document("more text", "RedPajamaC4");
  prepare(options_for(folder, {folder.write("x.test.jsonl", text)}));
  const AdoptOptions options{.files = {folder / "store/c4.test.idx"},
                             .tokenizer = tokenizer_file(),
                             .store = folder / "adopted"};
  adopt(options);
  EXPECT_EQ(TokenStore(folder / "adopted").fingerprint(),
            TokenStore(folder / "store").fingerprint());
  EXPECT_MESSAGE(adopt(options), "--overwrite");
  AdoptOptions wrong = options;
  wrong.files = {folder / "store/c4.test.bin"};
  wrong.overwrite = true;
  EXPECT_MESSAGE(adopt(wrong), "the .idx file");
  wrong.files = {options.files[0], options.files[0]};
  EXPECT_MESSAGE(adopt(wrong), "the same file as");
}

// Megatron-LM keeps a document without sequences, or with an empty one, for a line without text.
TEST(Adopt, DocumentsWithoutTokensAreLeftOutAndCounted) {
  const Folder folder;
  using Documents = std::vector<std::vector<std::vector<uint16_t>>>;
  const auto write = [&](const std::string& name, const Documents& documents) {
    std::string tokens;
    std::string lengths;
    std::string offsets;
    std::string indices(8, '\0');
    int64_t sequences = 0;
    const auto append = [](std::string& out, auto number) {
      out.append(reinterpret_cast<const char*>(&number), sizeof number);
    };
    for (const auto& document : documents) {
      for (const auto& sequence : document) {
        append(lengths, int32_t(sequence.size()));
        append(offsets, int64_t(tokens.size()));
        for (const uint16_t token : sequence) append(tokens, token);
        ++sequences;
      }
      append(indices, sequences);
    }
    std::string index("MMIDIDX\0\0", 9);
    append(index, uint64_t{1});
    append(index, uint8_t{8});
    append(index, uint64_t(sequences));
    append(index, uint64_t(documents.size() + 1));
    write_file(folder / (name + ".bin"), tokens);
    write_file(folder / (name + ".idx"), index + lengths + offsets + indices);
    return folder / (name + ".idx");
  };
  const std::vector<uint16_t> a = {5, 6, 7, 2};
  const std::vector<uint16_t> b = {8, 9, 2};
  for (const auto& [name, documents] :
       std::vector<std::pair<std::string, Documents>>{{"middle", {{a}, {}, {b}}},
                                                      {"first", {{}, {a}, {b}}},
                                                      {"last", {{a}, {b}, {}}},
                                                      {"empty_sequence", {{a}, {{}}, {b}}}}) {
    const fs::path store = folder / ("store_" + name);
    EXPECT_EQ(
        adopt({.files = {write(name, documents)}, .tokenizer = tokenizer_file(), .store = store}),
        1)
        << name;
    EXPECT_EQ(TokenStore(store).documents(name, "train").size(), 2) << name;
    TokenStore(store).verify();
  }
}

}  // namespace
}  // namespace assay::data
