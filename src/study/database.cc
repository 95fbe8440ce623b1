#include "study/database.h"

#include <sqlite3.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <memory>
#include <thread>

#include "base/error.h"

namespace assay::study {
namespace {

using Statement = std::unique_ptr<sqlite3_stmt, decltype(&sqlite3_finalize)>;

int bind(sqlite3_stmt* statement, int index, const Json& value) {
  if (value.is_null()) return sqlite3_bind_null(statement, index);
  if (value.is_boolean()) return sqlite3_bind_int64(statement, index, value.get<bool>());
  if (value.is_number_integer()) return sqlite3_bind_int64(statement, index, value.get<int64_t>());
  if (value.is_number()) return sqlite3_bind_double(statement, index, value.get<double>());
  const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  return sqlite3_bind_text(statement, index, text.data(), int(text.size()), SQLITE_TRANSIENT);
}

Json column(sqlite3_stmt* statement, int index) {
  switch (sqlite3_column_type(statement, index)) {
    case SQLITE_INTEGER:
      return sqlite3_column_int64(statement, index);
    case SQLITE_FLOAT:
      return sqlite3_column_double(statement, index);
    case SQLITE_NULL:
      return nullptr;
    default:
      return reinterpret_cast<const char*>(sqlite3_column_text(statement, index));
  }
}

constexpr std::chrono::milliseconds kPatience(10'000);  // with other processes

// sqlite3_exec for a change of the journal mode. While another process makes the file, SQLite
// refuses the change without waiting.
int execute_patiently(sqlite3* handle, const char* pragma) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  int code = SQLITE_BUSY;
  while (code == SQLITE_BUSY && std::chrono::steady_clock::now() < end) {
    code = sqlite3_exec(handle, pragma, nullptr, nullptr, nullptr);
    if (code == SQLITE_BUSY) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return code;
}

// A reader of a database with a write-ahead log makes files next to it. Where this is not possible,
// and no writer has left a log, SQLite can read the file alone.
std::string name_for_reading(const fs::path& file) {
  const fs::path folder = file.has_parent_path() ? file.parent_path() : fs::path(".");
  if (::access(folder.c_str(), W_OK) == 0 || fs::exists(file.string() + "-wal")) return file;
  std::string uri = "file:";
  for (const char c : fs::absolute(file).string())
    uri += c == '%' || c == '?' || c == '#' ? fmt::format("%{:02x}", int(c)) : std::string(1, c);
  return uri + "?immutable=1";
}

}  // namespace

Database::Database(const fs::path& file, Mode mode, std::string if_damaged)
    : path_(file.string()), if_damaged_(std::move(if_damaged)) {
  const bool reads = mode == Mode::read;
  const int flags =
      reads ? SQLITE_OPEN_READONLY | SQLITE_OPEN_URI : SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE;
  const std::string name = reads ? name_for_reading(file) : path_;
  if (sqlite3_open_v2(name.c_str(), &handle_, flags, nullptr) != SQLITE_OK) {
    const std::string reason = sqlite3_errmsg(handle_);
    sqlite3_close(std::exchange(handle_, nullptr));
    fail<Error>("{}: {}", path_, reason);
  }
  try {
    sqlite3_busy_timeout(handle_, kPatience.count());
    const char* journal =
        mode == Mode::write ? "PRAGMA journal_mode = WAL" : "PRAGMA journal_mode = DELETE";
    if (mode != Mode::read && execute_patiently(handle_, journal) != SQLITE_OK) raise(journal);
    if (mode == Mode::write) execute("PRAGMA synchronous = NORMAL");
    if (mode != Mode::read) execute("PRAGMA foreign_keys = ON");
  } catch (...) {
    sqlite3_close(handle_);
    throw;
  }
}

Database::~Database() { sqlite3_close(handle_); }

void Database::refuse() const {
  fail("{}: The file is damaged, or it is not a database of Assay. Nothing was changed. {}", path_,
       if_damaged_);
}

void Database::raise(const std::string& sql) const {
  const int code = sqlite3_errcode(handle_);
  const int reason = sqlite3_system_errno(handle_);
  if (code == SQLITE_CORRUPT || code == SQLITE_NOTADB) refuse();
  if (code == SQLITE_FULL || reason == ENOSPC || reason == EDQUOT)
    fail<DiskFull>("{}: the disk is full", path_);
  fail<Error>("{}: {} (in: {})", path_, sqlite3_errmsg(handle_), sql.substr(0, 80));
}

void Database::execute(const std::string& sql) {
  if (sqlite3_exec(handle_, sql.c_str(), nullptr, nullptr, nullptr) != SQLITE_OK) raise(sql);
}

std::vector<Json> Database::query(const std::string& sql, const std::vector<Json>& values) {
  sqlite3_stmt* raw = nullptr;
  if (sqlite3_prepare_v2(handle_, sql.c_str(), int(sql.size()), &raw, nullptr) != SQLITE_OK)
    raise(sql);
  const Statement statement(raw, sqlite3_finalize);
  for (size_t i = 0; i < values.size(); ++i)
    if (bind(raw, int(i) + 1, values[i]) != SQLITE_OK) raise(sql);
  std::vector<Json> rows;
  int code;
  while ((code = sqlite3_step(raw)) == SQLITE_ROW) {
    Json& row = rows.emplace_back(Json::object());
    for (int i = 0; i < sqlite3_column_count(raw); ++i)
      row[sqlite3_column_name(raw, i)] = column(raw, i);
  }
  if (code != SQLITE_DONE) raise(sql);
  return rows;
}

Transaction::~Transaction() {
  if (!open_) return;
  try {
    database_.execute("ROLLBACK");
  } catch (const Error&) {  // SQLite rolls back by itself after some errors
  }
}

void Transaction::commit() {
  database_.execute("COMMIT");
  open_ = false;
}

}  // namespace assay::study
