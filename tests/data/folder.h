#pragma once
// Helpers for the tests of the data layer: a temporary folder, golden files, error messages.
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "base/error.h"
#include "base/files.h"
#include "golden_files.h"

namespace assay::data {

class Folder {
 public:
  Folder()
      : path_(fs::temp_directory_path() /
              ("assay_data_test" + std::to_string(::getpid()) + "_" + std::to_string(count()++))) {
    make_folder(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;
  fs::path operator/(const std::string& name) const { return path_ / name; }
  const fs::path& path() const { return path_; }
  fs::path write(const std::string& name, std::string_view contents) const {
    make_folder((path_ / name).parent_path());
    write_file(path_ / name, contents);
    return path_ / name;
  }
  int64_t entries() const {
    return std::distance(fs::directory_iterator(path_), fs::directory_iterator());
  }

 private:
  static int& count() {
    static int number = 0;
    return number;
  }
  fs::path path_;
};

// Sets the time of the last change back by two hours.
inline void make_old(const fs::path& path) {
  fs::last_write_time(path, fs::file_time_type::clock::now() - std::chrono::hours(2));
}

// ThreadSanitizer itself writes files that are larger than the limits of tests.
#if __has_feature(thread_sanitizer)
inline constexpr bool kLimitsOfFilesHold = false;
#else
inline constexpr bool kLimitsOfFilesHold = true;
#endif

#define ASSAY_NEEDS_FILE(file) \
  if (!fs::exists(file)) GTEST_SKIP() << (file).string() << " is in the complete golden data only"

// The message of the E that `action` throws.
template <class E = BadInput>
std::string message_of(auto&& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing was thrown";
}
#define EXPECT_MESSAGE(action, part)                                   \
  EXPECT_NE(message_of([&] { action; }).find(part), std::string::npos) \
      << message_of([&] { action; })

}  // namespace assay::data
