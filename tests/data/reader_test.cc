#include "data/reader.h"

#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "base/random.h"
#include "compressed.h"
#include "folder.h"

namespace assay::data {
namespace {

using namespace std::string_literals;

struct Found {
  std::vector<std::string> texts;
  std::vector<std::string> domains;
  std::vector<int64_t> lines;
  ReadCounts counts;
};

Found read_all(const fs::path& file, const std::string& field = "meta.redpajama_set_name") {
  Found found;
  BlockReader reader(file);
  DocumentParser parser(field);
  for (Block block; reader.next(block);)
    parser.parse(block, found.counts, [&](const Document& document) {
      found.texts.emplace_back(document.text);
      found.domains.emplace_back(document.domain);
      found.lines.push_back(document.line);
    });
  found.counts += reader.counts();
  return found;
}

TEST(Reader, DevicesAndPipesAreRejected) {
  const Folder folder;
  const fs::path fifo = folder / "a.jsonl";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_MESSAGE(input_files({fifo}), "a.jsonl: neither a regular file nor a folder");
  EXPECT_MESSAGE(input_files({"/dev/zero"}), "/dev/zero: neither a regular file nor a folder");
  EXPECT_MESSAGE(BlockReader{fifo}, "a.jsonl: cannot be read: not a regular file");
}

TEST(Reader, AFileIsReadOnce) {
  const Folder folder;
  const fs::path file = folder.write("a.txt", "text");
  fs::create_symlink("a.txt", folder / "b.txt");
  EXPECT_MESSAGE(input_files({file, file}), "a.txt: the same file as");
  EXPECT_MESSAGE(input_files({folder.path()}), "its text would count twice");
  fs::remove(folder / "b.txt");
  fs::create_hard_link(file, folder / "b.txt");
  EXPECT_MESSAGE(input_files({folder.path()}), "b.txt: the same file as");
}

TEST(Reader, LinksToFoldersAndToNothingAreNotFollowed) {
  const Folder folder;
  const fs::path in = folder / "in";
  const fs::path file = folder.write("in/a.txt", "text");
  folder.write("other/b.txt", "text");
  fs::create_symlink("loop", in / "loop");
  fs::create_symlink("nothing", in / "broken");
  fs::create_symlink("../other", in / "other");
  EXPECT_EQ(input_files({in}), (std::vector<InputFile>{{file, in}}));
  EXPECT_MESSAGE(input_files({in / "loop"}), "loop: cannot be read: Too many levels");
}

TEST(Reader, CompressedFilesWithoutContentsAreCutOff) {
  const Folder folder;
  for (const char* name : {"a.jsonl.gz", "a.jsonl.zst"}) {
    EXPECT_MESSAGE(read_all(folder.write(name, "")), "stream is cut off") << name;
  }
}

TEST(Reader, ZeroBytesAfterAGzipMemberAreAccepted) {
  const Folder folder;
  const std::string one = gzip("{\"text\": \"one\"}\n");
  const std::string two = gzip("{\"text\": \"two\"}\n");
  for (const size_t zeros : {1, 512, 300'000}) {
    const std::string padding(zeros, '\0');
    EXPECT_EQ(read_all(folder.write("a.jsonl.gz", one + padding + two + padding)).texts,
              (std::vector<std::string>{"one", "two"}))
        << zeros;
  }
  EXPECT_MESSAGE(read_all(folder.write("a.jsonl.gz", one + "garbage")), "stream is corrupt");
}

std::string line(const std::string& text, const std::string& set = "RedPajamaC4") {
  return nlohmann::json{{"text", text}, {"meta", {{"redpajama_set_name", set}}}}.dump() + "\n";
}

// Random printable text, so that it compresses badly and spans many blocks.
std::string noise(size_t size, uint64_t seed) {
  Random random(seed, "noise");
  std::string text;
  while (text.size() < size) text += char('!' + random.below(90));
  return text;
}

TEST(Reader, ReadsPlainZstdAndGzipAlike) {
  const Folder folder;
  std::string text;
  std::vector<std::string> expected;
  for (uint64_t i = 0; i < 300; ++i) {
    expected.push_back(noise(1 + 97 * i, i));
    text += line(expected.back());
  }
  const auto plain = read_all(folder.write("a.jsonl", text));
  EXPECT_EQ(plain.texts, expected);
  EXPECT_EQ(plain.lines.back(), 300);
  EXPECT_EQ(plain.domains[7], "RedPajamaC4");
  EXPECT_EQ(read_all(folder.write("a.jsonl.zst", zstd(text))).texts, expected);
  EXPECT_EQ(read_all(folder.write("long.jsonl.zst", zstd(text, 27))).texts, expected);
  EXPECT_EQ(read_all(folder.write("longest.jsonl.zst", zstd(text, 30))).texts, expected);
  EXPECT_EQ(read_all(folder.write("a.jsonl.gz", gzip(text))).texts, expected);
  // Frames and members that follow each other, cut inside a line
  const size_t half = text.size() / 2;
  EXPECT_EQ(
      read_all(folder.write("two.jsonl.zst", zstd(text.substr(0, half)) + zstd(text.substr(half))))
          .texts,
      expected);
  EXPECT_EQ(
      read_all(folder.write("two.jsonl.gz", gzip(text.substr(0, half)) + gzip(text.substr(half))))
          .texts,
      expected);
}

TEST(Reader, CutOffStreamsAreNamedWithFileAndLine) {
  const Folder folder;
  std::string text;
  for (uint64_t i = 0; i < 3000; ++i) text += line(noise(1000, i));
  for (const auto& [name, bytes] :
       {std::pair{"a.jsonl.zst", zstd(text)}, std::pair{"a.jsonl.gz", gzip(text)}})
    for (const double share : {0.1, 0.5, 0.999}) {
      const fs::path file =
          folder.write(name, bytes.substr(0, size_t(share * double(bytes.size()))));
      EXPECT_MESSAGE(read_all(file), "stream is cut off") << name << " " << share;
      EXPECT_MESSAGE(read_all(file), std::string(name) + ": line ") << name << " " << share;
    }
}

TEST(Reader, CorruptStreamsAreRefused) {
  const Folder folder;
  std::string text;
  for (uint64_t i = 0; i < 100; ++i) text += line(noise(1000, i));
  for (auto [name, bytes] :
       {std::pair{"a.jsonl.zst", zstd(text)}, std::pair{"a.jsonl.gz", gzip(text)}}) {
    bytes.replace(bytes.size() / 2, 64, noise(64, 1));
    EXPECT_THROW(read_all(folder.write(name, bytes)), BadInput) << name;
    EXPECT_MESSAGE(read_all(folder.write(name, noise(5000, 2))), "stream is corrupt");
  }
}

TEST(Reader, CountsWhatIsLeftOut) {
  const Folder folder;
  const auto found = read_all(folder.write(
      "a.jsonl", line("good") + "{\"text\": \"cut off\n" + "\n" + line("") + line(" \n\t ") +
                     "{\"text\": \"\xff\xfe\"}\n" + "{\"txt\": \"no text\"}\n" + "{\"text\": 3}\n" +
                     "[1]\n" + "{\"text\": \"no set\"}\n" + "{\"text\": \"last\", \"meta\": 5}"));
  EXPECT_EQ(found.texts, (std::vector<std::string>{"good", "no set", "last"}));
  EXPECT_EQ(found.domains, (std::vector<std::string>{"RedPajamaC4", "", ""}));
  EXPECT_EQ(found.lines, (std::vector<int64_t>{1, 10, 11}));
  EXPECT_EQ(found.counts.broken_lines, 2);
  EXPECT_EQ(found.counts.without_text, 2);
  EXPECT_EQ(found.counts.invalid_utf8, 1);
  EXPECT_EQ(found.counts.empty, 2);
}

TEST(Reader, LinesThatPythonReadsAreDocuments) {
  const Folder folder;
  const std::vector<std::string> lines = {
      R"({"id": 123456789012345678901234567890, "text": "big integer"})",
      R"({"id": -9223372036854775809, "text": "below int64"})",
      R"({"score": 1e400, "text": "large float"})",
      R"({"score": NaN, "text": "nan"})",
      R"({"score": -Infinity, "text": "infinity", "source": "s"})",
      R"({"title": "half \ud83d of a pair", "text": "surrogate"})",
      R"({"text": "half \ude00"})",
      R"({"text": "first", "text": "last"})"};
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  const auto found = read_all(folder.write("a.jsonl", text), "source");
  EXPECT_EQ(found.texts,
            (std::vector<std::string>{"big integer", "below int64", "large float", "nan",
                                      "infinity", "surrogate", "half \uFFFD", "last"}));
  EXPECT_EQ(found.domains[4], "s");
  EXPECT_EQ(found.counts.all_left_out(), 0);
}

TEST(Reader, FirstBrokenLineIsNamedWithItsReason) {
  const Folder folder;
  auto found = read_all(folder.write("a.jsonl", line("good") + "\n[1]\n{\"text\": nan}\n"));
  EXPECT_EQ(found.counts.left_out(), "2 broken lines (the first: line 3: not a JSON object)");
  found = read_all(folder.write("b.jsonl", line("good") + "{\"text\": nan}\n"));
  EXPECT_TRUE(found.counts.left_out().starts_with("1 broken line (the first: line 2: "))
      << found.counts.left_out();
}

TEST(Reader, OtherFormatsAreRefusedByTheirFirstBytes) {
  const Folder folder;
  const std::string tar = "a.txt" + std::string(252, '\0') + "ustar\0"s + std::string(249, '\0');
  const std::vector<std::tuple<std::string, std::string, std::string>> files = {
      {"a.txt", gzip("text"), "a gzip stream"},
      {"a.jsonl.zstd", zstd("text"), "a zstd stream"},
      {"a.bz2", "BZh91AY&SY...", "a bzip2 stream"},
      {"a.xz", "\3757zXZ\0..."s, "an xz stream"},
      {"a.zip", "PK\x03\x04...", "a zip archive"},
      {"a.parquet", "PAR1\x15\x04...", "a Parquet table"},
      {"a.tar.gz", gzip(tar), "a tar archive"},
      {"a.tar", tar, "a tar archive"},
      {"a.json", " [\n{\"text\": \"t\"}]\n", "holds a JSON list"},
      {"a.jsonl.gz", gzip("\n{ \r\n  \"text\": \"t\"\n}\n"),
       "holds a JSON object over several lines"}};
  for (const auto& [name, contents, words] : files)
    EXPECT_MESSAGE(read_all(folder.write(name, contents)), words) << name;
  for (const char* text : {"BZhou was here", "PAR1 is a gene", "[a list]", "{"})
    EXPECT_EQ(read_all(folder.write("b.txt", text)).texts, std::vector<std::string>{text});
}

TEST(Reader, KeepsEveryCharacter) {
  const Folder folder;
  const std::string text = "nul \0 tab \t quote \" 汉 😀 \r\n"s;
  EXPECT_EQ(read_all(folder.write("a.jsonl", "\xEF\xBB\xBF" + line(text))).texts,
            std::vector<std::string>{text});
  EXPECT_EQ(read_all(folder.write("a.txt", text)).texts, std::vector<std::string>{text});
}

TEST(Reader, TakesATextFileAsADocument) {
  const Folder folder;
  const std::string text = noise(3 << 20, 1) + "\n\n" + noise(100, 2) + "\n";
  EXPECT_EQ(read_all(folder.write("a.txt", text)).texts, std::vector<std::string>{text});
  EXPECT_EQ(read_all(folder.write("a.txt.zst", zstd(text))).texts, std::vector<std::string>{text});
  EXPECT_EQ(read_all(folder.write("b.txt", "\xff")).counts.invalid_utf8, 1);
  for (const char* name : {"c.txt", "d.txt.zst", "e.txt.gz"}) {
    const std::string contents = name[0] == 'c' ? "" : name[0] == 'd' ? zstd("") : gzip("");
    const auto found = read_all(folder.write(name, contents));
    EXPECT_EQ(found.texts.size(), 0u) << name;
    EXPECT_EQ(found.counts.empty, 1) << name;
  }
}

TEST(Reader, SkipsLinesThatMemoryCannotHold) {
  const Folder folder;
  const std::string huge(40 << 20, 'x');
  const auto found = read_all(folder.write("a.jsonl", line("before") + line(huge) + line("after")));
  EXPECT_EQ(found.texts, (std::vector<std::string>{"before", "after"}));
  EXPECT_EQ(found.lines, (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(found.counts.too_long, 1);
  EXPECT_EQ(read_all(folder.write("b.jsonl.zst", zstd(line("before") + huge))).counts.too_long, 1);
  EXPECT_EQ(read_all(folder.write("c.txt", huge)).counts.too_long, 1);
}

TEST(Reader, ReadsTheDomainFromAnyField) {
  const Folder folder;
  const fs::path file = folder.write(
      "a.jsonl", "{\"source\": \"blog\", \"a\": {\"b\": {\"c\": \"deep\"}}, \"text\": \"t\"}\n");
  EXPECT_EQ(read_all(file, "source").domains, std::vector<std::string>{"blog"});
  EXPECT_EQ(read_all(file, "a.b.c").domains, std::vector<std::string>{"deep"});
  EXPECT_EQ(read_all(file, "a.b").domains, std::vector<std::string>{""});
  EXPECT_EQ(read_all(file, "none").domains, std::vector<std::string>{""});
}

TEST(Reader, FindsFilesInFolders) {
  const Folder folder;
  folder.write("in/b/z.jsonl", "");
  folder.write("in/b/a.txt", "");
  folder.write("in/.git/x", "");
  folder.write("in/.hidden", "");
  folder.write("one", "");
  const fs::path one = folder / "one";
  const fs::path in = folder / "in";
  EXPECT_EQ(input_files({one, in}),
            (std::vector<InputFile>{{one, one}, {in / "b/a.txt", in}, {in / "b/z.jsonl", in}}));
  EXPECT_MESSAGE(input_files({folder / "two"}), "no such file or folder");
  make_folder(folder / "empty");
  EXPECT_MESSAGE(input_files({folder / "empty"}), "holds no file");
}

TEST(Reader, SplitIsNamedByTheFileOrTheOutermostFolder) {
  auto split = [](const fs::path& file, const fs::path& input = "") {
    return split_of({file, input.empty() ? file : input});
  };
  EXPECT_EQ(split("cc.train.jsonl.zst"), "train");
  EXPECT_EQ(split("/data/cc.test.jsonl"), "test");
  EXPECT_EQ(split("cc.test.00001.jsonl.zst"), "test");
  EXPECT_EQ(split("SlimPajama/validation/chunk1/0.jsonl.zst", "SlimPajama"), "valid");
  EXPECT_EQ(split("SlimPajama/validation/chunk1/0.jsonl.zst", "SlimPajama/validation/"), "valid");
  EXPECT_EQ(split("code/test/project/train/x.py", "code"), "test");
  EXPECT_EQ(split("code/test/project/train/a.py", "code/test"), "test");
  EXPECT_EQ(split("code/train/project/test.py", "code"), "train");
  EXPECT_EQ(split("code/test/project/train.py", "code"), "test");
  EXPECT_EQ(split("test/a.valid.jsonl", "test"), "valid");
  EXPECT_EQ(split("contest/attest.jsonl", "contest"), "train");
  EXPECT_EQ(split("test/a.jsonl"), "test");
  for (const char* name : {"test", "test.py", "a.test", ".test.txt"})
    EXPECT_EQ(split(name), "train") << name;
}

TEST(Reader, SplitDoesNotDependOnFoldersAboveTheInput) {
  EXPECT_EQ(split_of({"/home/test/corpus/a.txt", "/home/test/corpus"}), "train");
  EXPECT_EQ(split_of({"corpus/a.txt", "corpus"}), "train");
  EXPECT_EQ(split_of({"/home/test/corpus/valid/a.txt", "/home/test/corpus"}), "valid");
}

TEST(Reader, KnowsJsonLinesByName) {
  for (const char* name : {"a.jsonl", "a.json", "a.jsonl.zst", "a.json.gz", "example_train_0.zst",
                           "a.gz", "a.test.zst", "UP.JSONL", "UP.JSON.GZ"})
    EXPECT_TRUE(is_json_lines(name)) << name;
  for (const char* name : {"a.txt", "a.txt.zst", "README.md", "notes", "a.md.gz", "b.py.zst"})
    EXPECT_FALSE(is_json_lines(name)) << name;
}

}  // namespace
}  // namespace assay::data
