#include "study/database.h"

#include <gtest/gtest.h>

#include <thread>

#include "data/folder.h"

namespace assay::study {
namespace {

// Connections of one process wait for each other as those of several processes do.
TEST(Database, NewFileIsOpenedByManyAtOnce) {
  const data::Folder folder;
  std::atomic<int> failed = 0;
  for (int round = 0; round < 40; ++round) {
    const fs::path file = folder / fmt::format("{}.sqlite", round);
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i)
      threads.emplace_back([&] {
        try {
          Database(file, Database::Mode::write).execute("CREATE TABLE IF NOT EXISTS t (x)");
        } catch (const Error& error) {
          ++failed;
        }
      });
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(failed, 0);
}

TEST(Database, OtherFileIsRefusedWithoutTheTextsOfSqlite) {
  const data::Folder folder;
  const fs::path file = folder.write("results.sqlite", "hi\n");
  try {
    Database(file, Database::Mode::write);
    FAIL() << "the file was accepted";
  } catch (const BadInput& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("it is not a database of Assay"), std::string::npos) << text;
    EXPECT_NE(text.find("Give another file, or remove this one."), std::string::npos) << text;
    EXPECT_EQ(text.find("PRAGMA"), std::string::npos) << text;
  }
  EXPECT_EQ(read_file(file), "hi\n");
}

}  // namespace
}  // namespace assay::study
