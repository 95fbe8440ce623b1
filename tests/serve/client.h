#pragma once
// An HTTP client over a plain socket, so that tests can also say what no library would send.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <string>

#include "base/error.h"

namespace assay::serve {

struct Answer {
  int status = 0;                              // 0: the connection ended without one
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;
};

class Client {
 public:
  explicit Client(uint16_t port, int receive_buffer = 0)
      : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    const timeval patience{.tv_sec = 60, .tv_usec = 0};
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    ::setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    if (receive_buffer > 0)
      ::setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = ::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }
  ~Client() { close(); }
  Client(const Client&) = delete;

  bool connected() const { return connected_; }
  void close() {
    if (socket_ >= 0) ::close(socket_);
    socket_ = -1;
  }
  // False when the server has closed the connection.
  bool send(const std::string& bytes) {
    for (size_t sent = 0; sent < bytes.size();) {
      const ssize_t size = ::send(socket_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (size <= 0) return false;
      sent += size_t(size);
    }
    return true;
  }
  bool send_request(const std::string& method, const std::string& path,
                    const std::string& body = "", const std::string& headers = "") {
    return send(fmt::format("{} {} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n{}\r\n",
                            method, path, body.size(), headers) +
                body);
  }
  void end_sending() { ::shutdown(socket_, SHUT_WR); }
  // More bytes into the buffer; false at the end of the connection or after a minute.
  bool receive() {
    char bytes[65536];
    const ssize_t size = ::recv(socket_, bytes, sizeof(bytes), 0);
    if (size <= 0) return false;
    buffer_.append(bytes, size_t(size));
    return true;
  }
  Answer read_head() {
    size_t end;
    while ((end = buffer_.find("\r\n\r\n")) == std::string::npos)
      if (!receive()) return {};
    Answer answer;
    answer.status = std::stoi(buffer_.substr(9, 3));
    for (size_t line = buffer_.find("\r\n") + 2; line < end + 2;) {
      const size_t next = buffer_.find("\r\n", line);
      const size_t colon = buffer_.find(": ", line);
      std::string name = buffer_.substr(line, colon - line);
      std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
      answer.headers[name] = buffer_.substr(colon + 2, next - colon - 2);
      line = next + 2;
    }
    buffer_.erase(0, end + 4);
    return answer;
  }
  // The next chunk of a stream; "" at its end, or when the connection ends (then cut() is true).
  std::string read_chunk() {
    size_t end;
    while ((end = buffer_.find("\r\n")) == std::string::npos)
      if (!receive()) return end_early();
    const size_t size = std::stoul(buffer_.substr(0, end), nullptr, 16);
    while (buffer_.size() < end + 2 + size + 2)
      if (!receive()) return end_early();
    std::string chunk = buffer_.substr(end + 2, size);
    buffer_.erase(0, end + 2 + size + 2);
    return chunk;
  }
  Answer read_answer() {
    Answer answer = read_head();
    if (answer.headers.contains("transfer-encoding")) {
      for (std::string chunk; !(chunk = read_chunk()).empty();) answer.body += chunk;
      return answer;
    }
    const size_t size = answer.headers.contains("content-length")
                            ? std::stoul(answer.headers["content-length"])
                            : 0;
    while (buffer_.size() < size)
      if (!receive()) return {};
    answer.body = buffer_.substr(0, size);
    buffer_.erase(0, size);
    return answer;
  }
  Answer request(const std::string& method, const std::string& path, const std::string& body = "",
                 const std::string& headers = "") {
    send_request(method, path, body, headers);
    return read_answer();
  }
  bool ended() { return buffer_.empty() && !receive(); }  // the server closes the connection
  bool cut() const { return cut_; }

 private:
  std::string end_early() {
    cut_ = true;
    return "";
  }
  int socket_;
  bool connected_ = false;
  bool cut_ = false;
  std::string buffer_;
};

}  // namespace assay::serve
