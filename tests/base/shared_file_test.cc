// A file that several processes write: parts at their places, and errors with path and reason.
#include "base/shared_file.h"

#include <gtest/gtest.h>

#include "data/folder.h"

namespace assay {
namespace {

using data::message_of;

void write(SharedFile& file, uint64_t offset, std::string_view text) {
  file.write(offset, std::as_bytes(std::span(text)));
}

TEST(SharedFile, PartsOfTwoWritersMakeOneFile) {
  const data::Folder folder;
  SharedFile first(folder / "f", 12);
  EXPECT_EQ(fs::file_size(folder / "f"), 12u);
  SharedFile second(folder / "f");
  write(second, 9, "cde");
  write(first, 0, "0123");
  write(second, 4, "45678");
  first.sync();
  second.sync();
  EXPECT_EQ(read_file(folder / "f"), "012345678cde");
}

TEST(SharedFile, EmptyFileIsMade) {
  const data::Folder folder;
  SharedFile(folder / "f", 0).sync();
  EXPECT_EQ(fs::file_size(folder / "f"), 0u);
}

TEST(SharedFile, ExistingFileIsNotReplaced) {
  const data::Folder folder;
  folder.write("f", "mine");
  const std::string message = message_of<Error>([&] { SharedFile(folder / "f", 12); });
  EXPECT_NE(message.find("cannot be opened for writing: File exists"), std::string::npos)
      << message;
  EXPECT_EQ(read_file(folder / "f"), "mine");
}

TEST(SharedFile, MissingFileIsNotMadeByASecondWriter) {
  const data::Folder folder;
  const std::string message = message_of<Error>([&] { SharedFile(folder / "f"); });
  EXPECT_NE(message.find((folder / "f").string()), std::string::npos) << message;
  EXPECT_NE(message.find("No such file"), std::string::npos) << message;
  EXPECT_FALSE(fs::exists(folder / "f"));
}

TEST(SharedFile, SizeThatTheDiskLacksIsRejectedAtOnce) {
  const data::Folder folder;
  const std::string message =
      message_of<Error>([&] { SharedFile(folder / "f", uint64_t{1} << 61); });
  EXPECT_NE(message.find("disk space cannot be reserved"), std::string::npos) << message;
}

TEST(SharedFile, FullDiskIsReportedByTheWriter) {
  SharedFile full("/dev/full");
  const std::string message = message_of<Error>([&] { write(full, 0, "text"); });
  EXPECT_EQ(message, "/dev/full: cannot be written: No space left on device");
}

}  // namespace
}  // namespace assay
