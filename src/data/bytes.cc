#include "data/bytes.h"

#include <fcntl.h>
#include <simdjson.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

#include "base/error.h"

namespace assay::data {
namespace {

class PlainSource final : public ByteSource {
 public:
  explicit PlainSource(const fs::path& file) {
    // O_NONBLOCK: opening a FIFO must not wait for a writer.
    const int descriptor = ::open(file.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (descriptor < 0) fail("{}: cannot be read: {}", file.string(), std::strerror(errno));
    struct stat status;
    const bool regular = ::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
    if (regular) file_ = ::fdopen(descriptor, "rb");
    if (file_) return;
    ::close(descriptor);
    fail("{}: cannot be read: {}", file.string(),
         S_ISDIR(status.st_mode) ? "it is a folder" : "not a regular file");
  }
  ~PlainSource() override { std::fclose(file_); }
  size_t read(char* out, size_t capacity) override {
    const size_t count = std::fread(out, 1, capacity, file_);
    if (count == 0 && std::ferror(file_)) fail("cannot be read: {}", std::strerror(errno));
    consumed_ += count;
    return count;
  }
  size_t consumed() const override { return consumed_; }

 private:
  std::FILE* file_ = nullptr;
  size_t consumed_ = 0;
};

// Base class of the decompressors: a buffer of compressed bytes.
class Compressed : public ByteSource {
 public:
  explicit Compressed(const fs::path& file) : file_(file) {}
  size_t consumed() const override { return file_.consumed(); }

 protected:
  bool refill() {  // when the buffer is used up; false at the end of the file
    if (begin_ == end_) {
      begin_ = 0;
      end_ = file_.read(buffer_.data(), buffer_.size());
    }
    return begin_ < end_;
  }
  std::vector<char> buffer_ = std::vector<char>(1 << 17);
  size_t begin_ = 0;
  size_t end_ = 0;

 private:
  PlainSource file_;
};

class ZstdSource final : public Compressed {
 public:
  explicit ZstdSource(const fs::path& file) : Compressed(file), context_(ZSTD_createDCtx()) {
    ZSTD_DCtx_setParameter(context_, ZSTD_d_windowLogMax, 31);
  }
  ~ZstdSource() override { ZSTD_freeDCtx(context_); }
  size_t read(char* out, size_t capacity) override {
    ZSTD_outBuffer output{out, capacity, 0};
    while (output.pos == 0) {
      const bool more = refill();
      if (!more && frame_done_) return 0;
      ZSTD_inBuffer input{buffer_.data(), end_, begin_};
      const size_t left = ZSTD_decompressStream(context_, &output, &input);
      if (ZSTD_isError(left)) fail("the zstd stream is corrupt: {}", ZSTD_getErrorName(left));
      if (!more && output.pos == 0) fail("the zstd stream is cut off");
      begin_ = input.pos;
      frame_done_ = left == 0;
    }
    return output.pos;
  }

 private:
  ZSTD_DCtx* context_;
  bool frame_done_ = false;  // a file without a frame is cut off
};

class GzipSource final : public Compressed {
 public:
  explicit GzipSource(const fs::path& file) : Compressed(file) { inflateInit2(&stream_, 15 + 16); }
  ~GzipSource() override { inflateEnd(&stream_); }
  size_t read(char* out, size_t capacity) override {
    stream_.next_out = reinterpret_cast<Bytef*>(out);
    stream_.avail_out = uInt(capacity);
    while (stream_.avail_out == capacity) {
      if (!refill()) {
        if (member_done_) return 0;
        fail("the gzip stream is cut off");
      }
      if (member_done_) {  // gzip accepts zero bytes after a member
        while (begin_ < end_ && buffer_[begin_] == 0) ++begin_;
        if (begin_ == end_) continue;
        inflateReset(&stream_);
        member_done_ = false;
      }
      inflate_some();
    }
    return capacity - stream_.avail_out;
  }

 private:
  void inflate_some() {
    stream_.next_in = reinterpret_cast<Bytef*>(buffer_.data() + begin_);
    stream_.avail_in = uInt(end_ - begin_);
    const int status = inflate(&stream_, Z_NO_FLUSH);
    if (status != Z_OK && status != Z_STREAM_END && status != Z_BUF_ERROR)
      fail("the gzip stream is corrupt: {}", stream_.msg ? stream_.msg : "unknown reason");
    begin_ = end_ - stream_.avail_in;
    member_done_ = status == Z_STREAM_END;
  }
  z_stream stream_{};
  bool member_done_ = false;  // a file without a member is cut off
};

}  // namespace

std::string extension_of(const fs::path& file) {
  std::string extension = file.extension().string();
  for (char& c : extension)
    if (c >= 'A' && c <= 'Z') c = char(c - 'A' + 'a');
  return extension;
}

std::unique_ptr<ByteSource> open_bytes(const fs::path& file) {
  const std::string extension = extension_of(file);
  if (extension == ".zst") return std::make_unique<ZstdSource>(file);
  if (extension == ".gz") return std::make_unique<GzipSource>(file);
  return std::make_unique<PlainSource>(file);
}

bool is_utf8(std::string_view text) { return simdjson::validate_utf8(text); }

}  // namespace assay::data
