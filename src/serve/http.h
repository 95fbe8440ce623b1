#pragma once
// An asynchronous HTTP/1.1 server: all connections on one thread, the handlers of requests on a
// second one. The only file that includes Boost is http.cc.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace assay::serve {

struct HttpRequest {
  std::string method;
  std::string path;           // without the query
  std::string authorization;  // the header's value
  std::string body;
};

// The answer to one request: either send(), or begin_stream(), any number of write(), end(). Every
// function may be called from any thread and returns at once. An answer that is dropped before it
// ends is replaced with status 500, or the stream is cut.
class Reply {
 public:
  virtual ~Reply() = default;
  // `allow`: the methods of the path, for status 405.
  virtual void send(int status, const std::string& content_type, std::string body,
                    const std::string& allow = "") = 0;
  virtual void begin_stream(const std::string& content_type) = 0;
  virtual void write(std::string piece) = 0;
  virtual void end() = 0;
  // The client has disconnected, or reads so slowly that it was disconnected.
  virtual bool client_gone() const = 0;
};

struct HttpOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 0;                  // 0: the kernel chooses one
  int64_t largest_body = 16 << 20;    // bytes; a larger one gets status 413
  int64_t connections = 1024;         // at the same time; more get status 503
  int64_t largest_backlog = 4 << 20;  // bytes of a stream that the client has not read yet
  double timeout = 30;       // seconds for a request to arrive, and for a write to progress
  double idle_timeout = 75;  // seconds between two requests on a connection
  // Requests of these paths never wait for others: their handler must return soon, because it
  // runs on the thread of the connections.
  std::vector<std::string> quick_paths;
  // Origins ("https://example.org") whose pages may send requests from a browser; "*": all. Pages
  // of other origins than these and the server's own get status 403.
  std::vector<std::string> allowed_origins;
};

class HttpServer {
 public:
  // Called on the handlers' thread, one request at a time; for quick_paths on the connections'.
  using Handler = std::function<void(HttpRequest request, std::shared_ptr<Reply> reply)>;
  // Error bodies for what the server answers by itself: too large, malformed, too many connections.
  using ErrorBody = std::function<std::string(int status, const std::string& message)>;

  // Binds and listens; BadInput if the address is in use or not one of this machine.
  HttpServer(const HttpOptions& options, Handler handler, ErrorBody error_body);
  ~HttpServer();
  uint16_t port() const;
  // Serves until stop(). `tick` is called ten times per second on the thread of the connections.
  void run(const std::function<void()>& tick);
  void stop();
  void stop_accepting();          // closes the port; connections are closed after their answer
  int64_t open_requests() const;  // whose answer is not written yet
  void on_handler_thread(std::function<void()> work);

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace assay::serve
