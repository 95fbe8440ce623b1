// safetensors: what is written reads back; a file that breaks the format is refused
// with the reason.
#include "base/safetensors.h"

#include <cstring>
#include <nlohmann/json.hpp>

#include "data/folder.h"

namespace assay {
namespace {

using data::Folder, data::message_of;

std::string file_of(const std::string& header, size_t data, uint64_t length = UINT64_MAX) {
  if (length == UINT64_MAX) length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + std::string(data, '\1');
}
std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   uint64_t begin, uint64_t end) {
  return "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape +
         R"(,"data_offsets":[)" + std::to_string(begin) + "," + std::to_string(end) + "]}";
}

TEST(Safetensors, WhatIsWrittenReadsBack) {
  const Folder folder;
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  const std::vector<int64_t> b = {-1};
  write_safetensors(folder / "f",
                    {{"z", "F32", {2, 3}, std::as_bytes(std::span(a))},
                     {"empty", "F32", {0, 5}, {}},
                     {"a é\"", "I64", {}, std::as_bytes(std::span(b))}},
                    {{"format", "pt"}});
  const Safetensors in(folder / "f");
  ASSERT_EQ(in.tensors().size(), 3u);
  EXPECT_EQ(in.at("z").shape, (std::vector<int64_t>{2, 3}));
  EXPECT_TRUE(std::ranges::equal(in.values<float>("z"), a));
  EXPECT_TRUE(std::ranges::equal(in.values<int64_t>("a é\""), b));
  EXPECT_TRUE(in.at("empty").bytes.empty());
  EXPECT_EQ(in.metadata().at("format"), "pt");
  uint64_t length = 0;
  std::memcpy(&length, read_file(folder / "f").data(), 8);
  EXPECT_EQ(length % 8, 0u);
  EXPECT_MESSAGE(in.at("zz"), "no tensor 'zz'; did you mean 'z'?");
}

TEST(Safetensors, LayoutIsThatOfTheWrittenFile) {
  const Folder folder;
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  const std::vector<int64_t> b = {-1, 7};
  const std::vector<TensorEntry> entries = {{"a", "F32", {2, 3}, std::as_bytes(std::span(a))},
                                            {"empty", "F32", {0, 5}, {}},
                                            {"b", "I64", {2}, std::as_bytes(std::span(b))}};
  write_safetensors(folder / "f", entries, {{"format", "pt"}});
  std::vector<TensorEntry> without_bytes = entries;
  for (TensorEntry& entry : without_bytes) entry.bytes = {};
  const SafetensorsLayout layout = safetensors_layout(without_bytes, {{"format", "pt"}});
  std::string expected = layout.header;
  for (size_t i = 0; i < entries.size(); ++i) {
    EXPECT_EQ(layout.offsets.at(i), expected.size()) << entries[i].name;
    expected.append(reinterpret_cast<const char*>(entries[i].bytes.data()),
                    entries[i].bytes.size());
  }
  EXPECT_EQ(layout.file_size, expected.size());
  EXPECT_EQ(read_file(folder / "f"), expected);
}

TEST(Safetensors, EveryTruncationIsRefused) {
  const Folder folder;
  const std::vector<float> a(4);
  write_safetensors(folder / "f", {{"a", "F32", {4}, std::as_bytes(std::span(a))}});
  const std::string whole = read_file(folder / "f");
  for (size_t size = 0; size < whole.size(); ++size)
    EXPECT_THROW(Safetensors(folder.write("cut", whole.substr(0, size))), BadInput)
        << size << " of " << whole.size() << " bytes";
}

TEST(Safetensors, BrokenFilesAreRefusedWithTheReason) {
  const Folder folder;
  const auto refuses = [&](const std::string& contents, const std::string& reason) {
    const fs::path file = folder.write("f", contents);
    const std::string message = message_of([&] { Safetensors{file}; });
    EXPECT_NE(message.find(reason), std::string::npos) << reason << " / " << message;
    EXPECT_NE(message.find(file.string()), std::string::npos) << message;
  };
  const std::string a = tensor("a", "F32", "[2]", 0, 8);
  refuses(file_of("{" + a + "}", 8, UINT64_MAX - 1), "not a safetensors file");
  refuses(file_of("{" + a + "}", 8, uint64_t{1} << 40), "not a safetensors file");
  refuses(file_of("{" + a + "}", 8, uint64_t{1} << 63), "not a safetensors file");
  refuses(std::string(4000, '\x93'), "not a safetensors file");
  refuses(file_of("{" + a, 8), "broken safetensors header");
  refuses(file_of("[]", 0), "is not a JSON object");
  refuses(file_of("{\"a\":3}", 0), "broken safetensors header");
  refuses(file_of("{" + a + "}", 9), "belong to no tensor");
  refuses(file_of("{" + a + "}", 7), "outside the file");
  // A hole
  refuses(file_of("{" + a + "," + tensor("b", "F32", "[1]", 12, 16) + "}", 16),
          "does not start where");
  // An overlap
  refuses(file_of("{" + a + "," + tensor("b", "F32", "[2]", 4, 12) + "}", 12),
          "does not start where");
  refuses(file_of("{" + a + "," + tensor("b", "F32", "[2]", 0, 8) + "}", 8),
          "does not start where");  // twice the same bytes
  refuses(file_of("{" + tensor("a", "F32", "[3]", 0, 8) + "}", 8), "another number of bytes");
  refuses(file_of("{" + tensor("a", "F64", "[2]", 0, 8) + "}", 8), "another number of bytes");
  refuses(file_of("{" + tensor("a", "F33", "[2]", 0, 8) + "}", 8), "dtype F33 is not supported");
  refuses(file_of("{" + tensor("a", "F32", "[-2]", 0, 8) + "}", 8), "negative");
  refuses(file_of("{" + tensor("a", "F32", "[4611686018427387904,4]", 0, 0) + "}", 0), "overflows");
  refuses(file_of("{" + tensor("a", "F64", "[2305843009213693952]", 0, 0) + "}", 0),
          "another number of bytes");  // 2^61 · 8 wraps to 0
  refuses(file_of("{" + tensor("a", "F32", "[2]", 8, 0) + "}", 8), "does not start where");
  refuses(file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", 8), "header");
  refuses(file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,-8]}})", 8), "a");
  refuses(file_of(R"({"__metadata__":{"a":3}})", 0), "broken safetensors header");
  // One name twice
  refuses(file_of("{" + a + "," + tensor("a", "F32", "[2]", 8, 16) + "}", 16), "a");
  refuses(file_of(std::string(200'000, '['), 0), "safetensors");
}

}  // namespace
}  // namespace assay
