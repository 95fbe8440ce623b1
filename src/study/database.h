#pragma once
// SQLite, as rows of JSON. Errors name the file and carry SQLite's reason.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/files.h"

struct sqlite3;

namespace assay::study {

using Json = nlohmann::json;

// The disk, or the quota of the user, is full. The message says what to do.
struct DiskFull : Error {
  explicit DiskFull(const std::string& message) : Error(message) {}
};

class Database {
 public:
  enum class Mode { read, write, write_shared };
  // `write` makes the file when it is absent and uses a write-ahead log, so that readers never wait
  // for the writer. Such a log needs memory that reader and writer share; `write_shared` does
  // without it, for readers on other hosts of a shared file system.
  // `if_damaged`: what the user can do when the file is cut off or is not a database.
  Database(const fs::path& file, Mode mode,
           std::string if_damaged = "Give another file, or remove this one.");
  ~Database();
  Database(const Database&) = delete;

  void execute(const std::string& sql);  // one or more statements without values
  // One statement, `values` bound to its ?s in order (null, number, text; true and false are 1 and
  // 0). Each row an object.
  std::vector<Json> query(const std::string& sql, const std::vector<Json>& values = {});
  // Throws BadInput: the file is damaged.
  [[noreturn]] void refuse() const;

 private:
  [[noreturn]] void raise(const std::string& sql) const;
  std::string path_;
  std::string if_damaged_;
  sqlite3* handle_ = nullptr;
};

// Everything between construction and commit() happens, or nothing.
class Transaction {
 public:
  explicit Transaction(Database& database) : database_(database) {
    database_.execute("BEGIN IMMEDIATE");
  }
  ~Transaction();
  void commit();

 private:
  Database& database_;
  bool open_ = true;
};

}  // namespace assay::study
