#include "data/token_store.h"

#include <cstring>

#include "data/store_writer.h"
#include "folder.h"

namespace assay::data {
namespace {

const TokenizerInfo kNone{"none", "", 300, 0};

fs::path small_store(const Folder& folder, int64_t vocabulary = 300) {
  StoreWriter writer(folder / "store", {"none", "", vocabulary, 0});
  writer.add("web", "train", std::vector<int32_t>{5, 6, 299}, 11);
  writer.add("web", "train", std::vector<int32_t>{}, 0);
  writer.add("web", "train", std::vector<int32_t>{7}, 2);
  writer.add("code", "test", std::vector<int32_t>{1, 2}, 4);
  writer.commit();
  return folder / "store";
}

template <class T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void replace(const fs::path& file, size_t at, std::string_view bytes) {
  std::string contents = read_file(file);
  contents.replace(at, bytes.size(), bytes);
  write_file(file, contents);
}

TEST(TokenStore, GivesBackWhatWasWritten) {
  const Folder folder;
  const TokenStore store(small_store(folder));
  EXPECT_EQ(store.domains(), (std::vector<std::string>{"code", "web"}));
  EXPECT_EQ(store.splits("web"), std::vector<std::string>{"train"});
  EXPECT_FALSE(store.has("web", "test"));
  const Documents& web = store.documents("web", "train");
  ASSERT_EQ(web.size(), 3);
  EXPECT_EQ(web.tokens(), 7);
  EXPECT_EQ(web.bytes(), 13);
  EXPECT_EQ(web.bytes(2), 2);
  std::vector<int64_t> all(7);
  web.read(0, 7, all.data());
  EXPECT_EQ(all, (std::vector<int64_t>{5, 6, 299, 0, 0, 7, 0}));
  EXPECT_EQ(web.document(0).size(), 4);
  EXPECT_EQ(web.document(1).size(), 1);
  EXPECT_EQ(web.document(2)[0], 7);
  EXPECT_EQ(web.begin(2), 5);
  store.verify();
  EXPECT_EQ(folder.entries(), 1);
}

TEST(TokenStore, MissingByteCountsAreRejected) {
  const Folder folder;
  const fs::path store = small_store(folder);
  fs::remove(store / "web.train.bytes");
  EXPECT_MESSAGE(TokenStore{store}, "web.train.bytes: the manifest has it, but it is missing");
}

TEST(StoreWriter, StoreIsWrittenBehindASymbolicLink) {
  const Folder folder;
  const TokenizerInfo tokenizer{"none", "", 300, 0};
  make_folder(folder / "big");
  fs::create_symlink("big/store", folder / "link");
  for (const bool overwrite : {false, true}) {
    StoreWriter writer(folder / "link", tokenizer, overwrite);
    writer.add("web", "train", std::vector<int32_t>(overwrite ? 5 : 3, 1), 1);
    writer.commit();
    EXPECT_TRUE(fs::is_symlink(folder / "link")) << overwrite;
    EXPECT_EQ(TokenStore(folder / "big/store").documents("web", "train").tokens(),
              overwrite ? 6 : 4);
  }
  EXPECT_EQ(folder.entries(), 2);
}

TEST(TokenStore, IsMegatronsLayoutByteByByte) {
  const Folder folder;
  const fs::path store = small_store(folder);
  std::string idx("MMIDIDX\0\0", 9);
  put<uint64_t>(idx, 1);
  put<uint8_t>(idx, 8);
  put<uint64_t>(idx, 3);
  put<uint64_t>(idx, 4);
  for (const int32_t length : {4, 1, 2}) put(idx, length);
  for (const int64_t offset : {0, 8, 10}) put(idx, offset);
  for (const int64_t first : {0, 1, 2, 3}) put(idx, first);
  EXPECT_EQ(read_file(store / "web.train.idx"), idx);
  std::string bin;
  for (const uint16_t token : {5, 6, 299, 0, 0, 7, 0}) put(bin, token);
  EXPECT_EQ(read_file(store / "web.train.bin"), bin);
}

TEST(TokenStore, UsesFourBytesFromAVocabularyOf65500) {
  const Folder folder;
  const fs::path store = small_store(folder, 65500);
  EXPECT_EQ(read_file(store / "web.train.idx")[17], 4);
  EXPECT_EQ(fs::file_size(store / "web.train.bin"), 28u);
  EXPECT_EQ(TokenStore(store).documents("web", "train").document(0)[2], 299);
}

TEST(TokenStore, ReadsFilesOfMegatronWithSeveralSequencesADocument) {
  const Folder folder;
  std::string idx("MMIDIDX\0\0", 9);
  std::string bin;
  put<uint64_t>(idx, 1);
  put<uint8_t>(idx, 4);
  put<uint64_t>(idx, 3);
  put<uint64_t>(idx, 3);
  for (const int32_t length : {2, 1, 3}) put(idx, length);
  for (const int64_t offset : {0, 8, 12}) put(idx, offset);
  for (const int64_t first : {0, 2, 3}) put(idx, first);
  for (const int32_t token : {10, 11, 12, 20, 21, 22}) put(bin, token);
  folder.write("a.bin", bin);
  folder.write("a.idx", idx);
  const Documents documents(folder / "a");
  ASSERT_EQ(documents.size(), 2);
  EXPECT_EQ(documents.document(0).size(), 3);
  EXPECT_EQ(documents.document(1)[0], 20);
  EXPECT_FALSE(documents.has_bytes());
}

TEST(TokenStore, FingerprintIsOfTheContent) {
  const Folder a;
  const Folder b;
  const Folder c;
  const auto first = TokenStore(small_store(a)).fingerprint();
  EXPECT_EQ(first, TokenStore(small_store(b)).fingerprint());
  EXPECT_NE(first, TokenStore(small_store(c, 301)).fingerprint());
}

TEST(TokenStore, RefusesDamagedFiles) {
  const Folder folder;
  const fs::path store = small_store(folder);
  const fs::path idx = store / "web.train.idx";
  const fs::path bin = store / "web.train.bin";
  const std::string good_idx = read_file(idx);
  const std::string good_bin = read_file(bin);
  auto expect = [&](const char* part) {
    EXPECT_MESSAGE(TokenStore{store}, part);
    write_file(idx, good_idx);
    write_file(bin, good_bin);
  };
  write_file(idx, good_idx.substr(0, 20));
  expect("wrong first bytes");
  write_file(idx, good_idx.substr(0, good_idx.size() - 8));
  expect("cut off or damaged");
  write_file(bin, good_bin.substr(0, 6));
  expect("cut off or damaged");
  replace(idx, 0, "X");
  expect("wrong first bytes");
  replace(idx, 9, "\2");
  expect("index version 2");
  replace(idx, 17, "\6");
  expect("dtype code 6");
  replace(idx, 18, "\xff\xff\xff\xff\xff\xff\xff\x7f");
  expect("cut off or damaged");
  replace(idx, 26, std::string_view("\0\0\0\0\0\0\0\0", 8));
  expect("cut off or damaged");
  fs::remove(bin);
  expect("web.train.bin");
  write_file(store / "web.train.bytes", "12345");
  expect("expected 8 for each");
}

TEST(TokenStore, NeverReadsOutsideItsFilesWhateverTheOffsetsSay) {
  const Folder folder;
  const fs::path store = small_store(folder);
  replace(store / "web.train.idx", 34 + 12 + 8, "\xff\xff\xff\xff\xff\xff\xff\x7f");
  const TokenStore opened(store);
  EXPECT_MESSAGE((void)opened.documents("web", "train").document(1), "begins at byte");
  EXPECT_THROW(opened.verify(), BadInput);
}

TEST(TokenStore, VerifySeesAChangedByte) {
  const Folder folder;
  const fs::path store = small_store(folder);
  replace(store / "web.train.bin", 0, "\x04");
  EXPECT_MESSAGE(TokenStore(store).verify(), "its contents changed");
}

TEST(TokenStore, SaysWhatIsNoStore) {
  const Folder folder;
  EXPECT_MESSAGE(TokenStore(folder / "missing"), "no such folder");
  EXPECT_MESSAGE(TokenStore(folder.path()), "it has no manifest.json");
  for (const char* text :
       {"", "{", "[]", "{\"format\":\"other\"}", "\xff\xfe",
        "{\"format\":\"assay token store\",\"version\":1}",
        "{\"format\":\"assay token store\",\"version\":1,\"tokenizer\":3,\"parts\":[{}]}"}) {
    folder.write("manifest.json", text);
    EXPECT_THROW(TokenStore{folder.path()}, BadInput) << text;
  }
}

TEST(TokenStore, NamesTheNearestDomain) {
  const Folder folder;
  const TokenStore store(small_store(folder));
  EXPECT_MESSAGE(store.documents("wob", "train"), "did you mean 'web'?");
  EXPECT_MESSAGE(store.documents("web", "tain"), "did you mean 'train'?");
}

// Domain a: documents of sources y, none, x, y; domain b: no document has a source.
fs::path store_with_sources(const Folder& folder, const std::string& last = "y") {
  StoreWriter writer(folder / "store", kNone);
  const std::vector<int32_t> tokens{1, 2};
  for (const std::string& source :
       {std::string(), std::string("y"), std::string(), std::string("x"), last})
    writer.add("a", "test", tokens, 2, source);
  writer.add("b", "test", tokens, 2);
  writer.commit();
  return folder / "store";
}

TEST(TokenStore, SourcesAreKeptInTheOrderOfFirstOccurrence) {
  const Folder folder;
  const TokenStore store(store_with_sources(folder));
  const Documents& a = store.documents("a", "test");
  ASSERT_TRUE(a.has_sources());
  EXPECT_EQ(a.source_names(), (std::vector<std::string>{"y", "x"}));
  std::vector<int64_t> sources;
  for (int64_t i = 0; i < a.size(); ++i) sources.push_back(a.source(i));
  EXPECT_EQ(sources, (std::vector<int64_t>{-1, 0, -1, 1, 0}));
  EXPECT_THROW((void)a.source(5), Error);
  store.verify();
}

TEST(TokenStore, DomainWithoutSourcesHasNoSourceFile) {
  const Folder folder;
  const fs::path path = store_with_sources(folder);
  const TokenStore store(path);
  EXPECT_FALSE(store.documents("b", "test").has_sources());
  EXPECT_EQ(store.documents("b", "test").source(0), -1);
  EXPECT_TRUE(store.documents("b", "test").source_names().empty());
  EXPECT_FALSE(fs::exists(path / "b.test.sources"));
  EXPECT_FALSE(store.manifest().at("parts").at(1).at("files").contains("sources"));
}

TEST(TokenStore, FingerprintOfAStoreWithoutSourcesIsThatOfEarlierVersions) {
  const Folder folder;
  EXPECT_EQ(TokenStore(small_store(folder)).fingerprint(),
            "c634a7c213032b061ca6bb5eb997345b5333ba413c5b5a2d43592690df8386d7");
}

TEST(TokenStore, FingerprintCoversTheSources) {
  const Folder first;
  const Folder same;
  const Folder other;
  const auto fingerprint = TokenStore(store_with_sources(first)).fingerprint();
  EXPECT_EQ(TokenStore(store_with_sources(same)).fingerprint(), fingerprint);
  EXPECT_NE(TokenStore(store_with_sources(other, "x")).fingerprint(), fingerprint);
}

TEST(TokenStore, DamagedSourcesAreRejected) {
  const Folder folder;
  const fs::path store = store_with_sources(folder);
  const fs::path sources = store / "a.test.sources";
  const fs::path names = store / "a.test.sources.json";
  const std::string good_sources = read_file(sources);
  const std::string good_names = read_file(names);
  auto restore = [&] {
    write_file(sources, good_sources);
    write_file(names, good_names);
  };
  write_file(sources, good_sources.substr(0, 12));
  EXPECT_MESSAGE(TokenStore{store}, "a.test.sources: 12 bytes, expected 4 for each of 5 documents");
  restore();
  for (const char* text : {"{}", "[1]"}) {
    write_file(names, text);
    EXPECT_MESSAGE(TokenStore{store}, "a JSON list of the names of the sources was expected");
  }
  for (const char* text : {"", "[\"y\""}) {
    write_file(names, text);
    EXPECT_MESSAGE(TokenStore{store}, "a.test.sources.json: broken JSON");
  }
  fs::remove(names);
  EXPECT_MESSAGE(TokenStore{store}, "a.test.sources.json: cannot be read");
  restore();
  fs::remove(sources);
  EXPECT_MESSAGE(TokenStore{store}, "a.test.sources: the manifest has it, but it is missing");
  restore();
  write_file(store / "b.test.sources", std::string(4, '\0'));
  write_file(store / "b.test.sources.json", "[\"y\"]");
  EXPECT_MESSAGE(TokenStore{store}, "b.test.sources: it is not in the manifest");
}

TEST(TokenStore, VerifyChecksTheSources) {
  const Folder folder;
  const fs::path store = store_with_sources(folder);
  const Documents before(store / "a.test");
  before.verify(300);
  replace(store / "a.test.sources", 4, "\2");
  EXPECT_MESSAGE(TokenStore(store).verify(), "a.test.sources: its contents changed");
  EXPECT_MESSAGE(Documents(store / "a.test").verify(300),
                 "document 1 has source 2, but 2 sources have a name");
  EXPECT_MESSAGE((void)Documents(store / "a.test").source(1), "document 1 has source 2");
  replace(store / "a.test.sources", 4, std::string_view("\0", 1));
  write_file(store / "a.test.sources.json", "[\"y\", \"y\"]");
  EXPECT_MESSAGE(Documents(store / "a.test").verify(300), "the name 'y' occurs twice");
}

// The store of small_store() with one string of its manifest replaced.
fs::path with_manifest(const Folder& folder, const std::string& from, const std::string& to) {
  const fs::path file = small_store(folder) / "manifest.json";
  std::string text = read_file(file);
  EXPECT_NE(text.find(from), std::string::npos) << from;
  text.replace(text.find(from), from.size(), to);
  write_file(file, text);
  return folder / "store";
}

TEST(TokenStore, IdOutsideTheVocabularyIsRejectedWhenItIsRead) {
  const Folder narrow;
  const Folder wide;
  const TokenStore store(with_manifest(narrow, "\"vocab_size\": 300", "\"vocab_size\": 299"));
  std::vector<int64_t> ids(7);
  store.documents("web", "train").read(0, 2, ids.data());
  EXPECT_MESSAGE(store.documents("web", "train").read(0, 7, ids.data()),
                 "web.train.bin: token 2 has id 299, but the vocabulary has 299 ids");
  EXPECT_MESSAGE(store.documents("web", "train").read(2, 1, ids.data()), "token 2 has id 299");
  const fs::path negative = small_store(wide, 70'000);
  replace(negative / "web.train.bin", 4, "\xff\xff\xff\xff");
  const TokenStore changed(negative);
  EXPECT_MESSAGE(changed.documents("web", "train").read(0, 7, ids.data()), "token 1 has id -1");
}

TEST(TokenStore, VocabularyAndSeparatorOutOfRangeAreRejected) {
  for (const char* size : {"0", "-1", "2147483649"}) {
    const Folder folder;
    const auto store =
        with_manifest(folder, "\"vocab_size\": 300", std::string("\"vocab_size\": ") + size);
    EXPECT_MESSAGE(TokenStore{store}, "manifest.json: vocab_size is");
  }
  for (const char* separator : {"-1", "300", "1000000000"}) {
    const Folder folder;
    const auto store =
        with_manifest(folder, "\"separator\": 0", std::string("\"separator\": ") + separator);
    EXPECT_MESSAGE(TokenStore{store}, "manifest.json: separator is");
  }
}

TEST(TokenStore, IncompleteManifestIsRejectedWithItsPath) {
  for (const char* key : {"files", "sha256", "size", "domain", "tokens", "separator"}) {
    const Folder folder;
    const auto store = with_manifest(folder, std::string("\"") + key + "\"", "\"other\"");
    EXPECT_MESSAGE(TokenStore{store}, "manifest.json: the key '");
    EXPECT_MESSAGE(TokenStore{store}, std::string(key) + "' is missing");
  }
  const Folder folder;
  const auto store = with_manifest(folder, "\"split\": \"train\"", "\"split\": 7");
  EXPECT_MESSAGE(TokenStore{store}, "manifest.json: the key 'parts.1.split' must be a string");
}

TEST(TokenStore, NumbersOfTheManifestThatAreNoIntegersAreRejected) {
  for (const char* size : {"1e308", "-1e308", "18446744073709551615", "1.5", "\"300\"", "null"}) {
    const Folder folder;
    const auto store =
        with_manifest(folder, "\"vocab_size\": 300", std::string("\"vocab_size\": ") + size);
    EXPECT_MESSAGE(TokenStore{store}, "the key 'tokenizer.vocab_size' must be an integer");
  }
}

TEST(TokenStore, DomainThatIsThereTwiceIsRejected) {
  const Folder folder;
  const fs::path store = small_store(folder);
  auto manifest = nlohmann::json::parse(read_file(store / "manifest.json"));
  manifest["parts"].push_back(manifest["parts"][0]);
  write_file(store / "manifest.json", manifest.dump());
  EXPECT_MESSAGE(TokenStore{store}, "'code.test' occurs twice");
}

TEST(TokenStore, DocumentOfTwoGibibytesIsRead) {
  const Folder folder;
  std::string idx("MMIDIDX\0\0", 9);
  put<uint64_t>(idx, 1);
  put<uint8_t>(idx, 8);
  put<uint64_t>(idx, 1);
  put<uint64_t>(idx, 2);
  put<int32_t>(idx, 1 << 30);
  put<int64_t>(idx, 0);
  put<int64_t>(idx, 0);
  put<int64_t>(idx, 1);
  folder.write("a.idx", idx);
  fs::resize_file(folder.write("a.bin", ""), uint64_t{1} << 31);  // sparse
  EXPECT_EQ(Documents(folder / "a").tokens(), int64_t{1} << 30);
}

TEST(StoreWriter, TwoWritersOfOneStoreDoNotMix) {
  const Folder folder;
  StoreWriter first(folder / "store", kNone);
  StoreWriter second(folder / "store", kNone);
  for (int32_t i = 0; i < 100; ++i) {
    first.add("web", "train", std::vector<int32_t>{1, i}, 2);
    second.add("web", "train", std::vector<int32_t>{2, i}, 2);
  }
  first.commit();
  EXPECT_MESSAGE(second.commit(), "--overwrite");
  const TokenStore store(folder / "store");
  store.verify();
  EXPECT_EQ(store.documents("web", "train").size(), 100);
  EXPECT_EQ(store.documents("web", "train").document(99)[0], 1);
}

TEST(StoreWriter, LeftoverOfAKilledWriterIsRemoved) {
  const Folder folder;
  make_old(folder.write("store.tmp00000000000000ff/web.train.bin", "1"));
  make_old(folder / "store.tmp00000000000000ff");
  small_store(folder);
  EXPECT_EQ(folder.entries(), 1);
}

TEST(StoreWriter, FolderWithOtherFilesIsNotOverwritten) {
  const Folder folder;
  folder.write("app/manifest.json", "{\"name\": \"my app\"}");
  folder.write("app/src/thesis.tex", "text");
  EXPECT_MESSAGE(StoreWriter(folder / "app", kNone, true), "is not a token store");
  folder.write("app/manifest.json", "{\"format\": \"assay token store\", \"parts\": [{}]}");
  EXPECT_MESSAGE(StoreWriter(folder / "app", kNone, true),
                 "has a manifest.json that is not a token store's");
  const fs::path store = small_store(folder);
  folder.write("store/notes.txt", "text");
  EXPECT_MESSAGE(StoreWriter(store, kNone, true),
                 "holds 'notes.txt', which is not part of a token store");
  fs::remove(store / "notes.txt");
  StoreWriter writer(store, kNone, true);
  writer.add("new", "train", std::vector<int32_t>{1}, 1);
  folder.write("store/notes.txt", "text");
  EXPECT_MESSAGE(writer.commit(), "holds 'notes.txt'");
  EXPECT_EQ(read_file(folder / "app" / "src" / "thesis.tex"), "text");
  EXPECT_EQ(read_file(store / "notes.txt"), "text");
  EXPECT_TRUE(TokenStore(store).has("web", "train"));
}

TEST(StoreWriter, LeavesNothingWithoutCommit) {
  const Folder folder;
  {
    StoreWriter writer(folder / "store", kNone);
    writer.add("web", "train", std::vector<int32_t>{1}, 1);
  }
  EXPECT_EQ(folder.entries(), 0);
}

TEST(StoreWriter, OverwritesOnlyAStoreAndOnlyWhenTold) {
  const Folder folder;
  const fs::path store = small_store(folder);
  EXPECT_MESSAGE(StoreWriter(store, kNone), "--overwrite");
  {
    StoreWriter writer(store, kNone, /*overwrite=*/true);
    writer.add("new", "train", std::vector<int32_t>{1}, 1);
    EXPECT_TRUE(TokenStore(store).has("web", "train"));
    writer.commit();
  }
  EXPECT_EQ(TokenStore(store).domains(), std::vector<std::string>{"new"});
  EXPECT_EQ(folder.entries(), 1);
  folder.write("precious/thesis.txt", "text");
  EXPECT_MESSAGE(StoreWriter(folder / "precious", kNone, true), "is not a token store");
}

TEST(StoreWriter, RefusesNamesThatAreNoFileNames) {
  const Folder folder;
  StoreWriter writer(folder / "store", kNone);
  const std::vector<int32_t> tokens{1};
  for (const std::string& name :
       {std::string(), std::string("a/b"), std::string("a.b"), std::string(".."),
        std::string("a b"), std::string("\xff"), std::string(101, 'a')})
    EXPECT_THROW(writer.add(name, "train", tokens, 1), BadInput) << name;
  writer.add("日本", "train", tokens, 1);
  writer.commit();
  EXPECT_TRUE(TokenStore(folder / "store").has("日本", "train"));
}

}  // namespace
}  // namespace assay::data
