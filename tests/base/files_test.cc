// Files are whole or absent; a folder belongs to one process.
#include "base/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "base/truncated_files.h"
#include "data/folder.h"

namespace assay {
namespace {

using data::Folder, data::make_old, data::message_of;

TEST(AtomicFile, ReplacesAtCommitAndNotBefore) {
  const Folder folder;
  const fs::path path = folder.write("a", "old");
  {
    AtomicFile file(path);
    file.write("new");
    EXPECT_EQ(read_file(path), "old");
    file.commit();
  }
  EXPECT_EQ(read_file(path), "new");
  EXPECT_EQ(folder.entries(), 1);
}

TEST(AtomicFile, WithoutCommitNothingChanges) {
  const Folder folder;
  const fs::path path = folder.write("a", "old");
  {
    AtomicFile(path).write("half of the ne");
  }
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(folder.entries(), 1);
}

TEST(AtomicFile, FailureNamesThePathAndLeavesNothing) {
  const Folder folder;
  EXPECT_NE(message_of<Error>([&] { AtomicFile(folder / "no" / "a"); }).find("No such file"),
            std::string::npos);
  fs::create_directories(folder / "taken" / "x");
  const std::string message = message_of<Error>([&] { write_file(folder / "taken", "text"); });
  EXPECT_NE(message.find("taken"), std::string::npos) << message;
  EXPECT_TRUE(fs::exists(folder / "taken" / "x"));
  EXPECT_EQ(folder.entries(), 1);
}

TEST(AtomicFile, ReplacesTheFileBehindALinkAndNoDevice) {
  const Folder folder;
  folder.write("file", "old");
  fs::create_symlink("file", folder / "link");
  write_file(folder / "link", "new");
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(read_file(folder / "file"), "new");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  for (const fs::path& path : {folder / "pipe", fs::path("/dev/null"), folder.path()})
    EXPECT_NE(message_of<BadInput>([&] { write_file(path, "text"); }).find("not a regular file"),
              std::string::npos)
        << path;
  EXPECT_TRUE(fs::is_fifo(folder / "pipe"));
}

TEST(AtomicFile, OutputsAreCheckedBeforeTheWork) {
  const Folder folder;
  check_output(folder / "new");
  EXPECT_EQ(folder.entries(), 0);
  EXPECT_NE(message_of<BadInput>([&] { check_output(folder / "no" / "a"); }).find("no folder"),
            std::string::npos);
  EXPECT_NE(message_of<BadInput>([&] { check_output("/dev/null"); }).find("not a regular file"),
            std::string::npos);
}

TEST(AtomicFile, TwoWritersOfOneFileDoNotShareTheTemporaryFile) {
  const Folder folder;
  AtomicFile first(folder / "a");
  AtomicFile second(folder / "a");
  first.write("first");
  second.write("second");
  first.commit();
  EXPECT_EQ(read_file(folder / "a"), "first");
  second.commit();
  EXPECT_EQ(read_file(folder / "a"), "second");
  EXPECT_EQ(folder.entries(), 1);
}

TEST(AtomicFile, KilledWriterLeavesNothing) {
  const Folder folder;
  if (::open(folder.path().c_str(), O_WRONLY | O_TMPFILE, 0600) < 0)
    GTEST_SKIP() << "the file system has no files without a name";
  const pid_t child = ::fork();
  if (child == 0) {
    AtomicFile file(folder / "a");
    file.write("half");
    ::kill(::getpid(), SIGKILL);
  }
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(folder.entries(), 0);
}

TEST(TemporaryFolder, FolderOfADeadProcessIsRemovedAndAHeldOneIsKept) {
  const Folder folder;
  const fs::path abandoned = folder / "store.tmp0123456789abcdef";
  const fs::path young = folder / "store.tmpfedcba9876543210";
  folder.write("store.tmpfedcba9876543210/web.train.bin", "1");
  make_old(folder.write("store.tmp0123456789abcdef/web.train.bin", "1"));
  make_old(abandoned);
  make_old(young);
  folder.write("store.tmp/mine", "2");
  folder.write("other.tmp0123456789abcdef/mine", "3");
  const TemporaryFolder held(folder / "store");
  EXPECT_FALSE(fs::exists(abandoned));
  EXPECT_TRUE(fs::exists(young / "web.train.bin"));
  EXPECT_TRUE(fs::exists(folder / "store.tmp" / "mine"));
  EXPECT_TRUE(fs::exists(folder / "other.tmp0123456789abcdef" / "mine"));
  fs::path path;
  {
    const TemporaryFolder second(folder / "store");
    path = second.path();
    EXPECT_NE(held.path(), path);
    make_old(held.path());
    const TemporaryFolder third(folder / "store");
    EXPECT_TRUE(fs::exists(held.path()));
    EXPECT_TRUE(fs::exists(path));
  }
  EXPECT_FALSE(fs::exists(path));
}

TEST(Folders, ExchangeLeavesTheOldFolderUnderTheTemporaryName) {
  const Folder folder;
  folder.write("writing/new", "1");
  folder.write("there/old", "2");
  exchange_folders(folder / "writing", folder / "there");
  EXPECT_EQ(read_file(folder / "there" / "new"), "1");
  EXPECT_EQ(read_file(folder / "writing" / "old"), "2");
}

TEST(Folders, PublishedWholeOrRefused) {
  const Folder folder;
  folder.write("writing/a", "1");
  folder.write("there/b", "2");
  EXPECT_NE(message_of<Error>([&] {
              publish_folder(folder / "writing", folder / "there");
            }).find("there"),
            std::string::npos);
  EXPECT_EQ(read_file(folder / "there" / "b"), "2");
  publish_folder(folder / "writing", folder / "done");
  EXPECT_EQ(read_file(folder / "done" / "a"), "1");
  EXPECT_FALSE(fs::exists(folder / "writing"));
  folder.write("file", "");
  EXPECT_NE(
      message_of<Error>([&] { make_folder(folder / "file" / "below"); }).find("Not a directory"),
      std::string::npos);
  EXPECT_NE(message_of<Error>([&] { make_folder(folder / "file"); }).find("file"),
            std::string::npos);
}

TEST(MappedFile, ReadsWholeFilesAndRefusesOthers) {
  const Folder folder;
  EXPECT_EQ(read_file(folder.write("empty", "")), "");
  EXPECT_EQ(read_file(folder.write("zeros", std::string(100'000, '\0'))),
            std::string(100'000, '\0'));
  EXPECT_MESSAGE(read_file(folder / "missing"), "No such file");
  EXPECT_MESSAGE(read_file(folder.path()), "not a regular file");
  EXPECT_MESSAGE(read_file("/dev/null"), "not a regular file");
  ASSERT_EQ(::mkfifo((folder / "fifo").c_str(), 0600), 0);
  EXPECT_MESSAGE(read_file(folder / "fifo"), "not a regular file");
}

TEST(MappedFile, FileThatBecomesShorterIsNamed) {
  const Folder folder;
  const fs::path path = folder.write("tokens.bin", std::string(100'000, 'x'));
  const auto read_truncated = [&] {
    catch_truncated_files();
    const MappedFile file(path);
    fs::resize_file(path, 10);
    std::exit(file.bytes()[90'000] == std::byte{'x'} ? 3 : 4);
  };
  EXPECT_EXIT(read_truncated(), testing::ExitedWithCode(1),
              "tokens.bin: the file became shorter while it was read");
}

TEST(Sha256, PublishedVectors) {
  const Folder folder;
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_of_file(folder.write("abc", "abc")), sha256("abc"));
}

TEST(FolderLock, RefusesTheSecondAndNamesTheFirst) {
  const Folder folder;
  {
    const FolderLock lock(folder.path());
    EXPECT_MESSAGE(FolderLock(folder.path()), "in use by process " + std::to_string(::getpid()));
  }
  FolderLock(folder.path());
}

TEST(FolderLock, EndsWithTheProcessHoweverItEnds) {
  const Folder folder;
  int held[2];
  ASSERT_EQ(::pipe(held), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const FolderLock lock(folder.path());
    [[maybe_unused]] const auto written = ::write(held[1], "x", 1);
    ::pause();
  }
  char byte;
  ASSERT_EQ(::read(held[0], &byte, 1), 1);
  EXPECT_MESSAGE(FolderLock(folder.path()), "in use by process " + std::to_string(child));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  FolderLock(folder.path());
  ::close(held[0]);
  ::close(held[1]);
}

}  // namespace
}  // namespace assay
