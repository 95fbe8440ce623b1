#include "serve/http.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/experimental/as_tuple.hpp>
#include <boost/asio/experimental/awaitable_operators.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <deque>

#include "base/error.h"

namespace assay::serve {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;
using boost::system::error_code;

// Errors come back as values: a client that goes away is not an exception.
constexpr auto kAwait = asio::experimental::as_tuple(asio::use_awaitable);
constexpr size_t kLargestHeader = 16 << 10;

std::chrono::nanoseconds seconds(double count) {
  return std::chrono::nanoseconds(int64_t(count * 1e9));
}

// The answer that a handler has given so far, read by the connection's coroutine. The members below
// the functions belong to the thread of the connections.
class Exchange final : public Reply, public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(asio::io_context& io, size_t largest_backlog)
      : io_(io), largest_backlog_(largest_backlog), changed(io) {}

  void send(int status_code, const std::string& type, std::string body,
            const std::string& methods) override {
    ended_ = true;
    on_connections_thread([=, body = std::move(body)](Exchange& self) mutable {
      self.status = status_code;
      self.content_type = type;
      self.allow = methods;
      self.pieces.push_back(std::move(body));
      self.finished = true;
    });
  }
  void begin_stream(const std::string& type) override {
    on_connections_thread([=](Exchange& self) {
      self.status = 200;
      self.content_type = type;
      self.streams = true;
    });
  }
  void write(std::string piece) override {
    on_connections_thread([piece = std::move(piece)](Exchange& self) mutable {
      if (self.backlog > self.largest_backlog_) return self.set_gone();
      self.backlog += piece.size();
      self.pieces.push_back(std::move(piece));
    });
  }
  void end() override {
    ended_ = true;
    on_connections_thread([](Exchange& self) { self.finished = true; });
  }
  bool client_gone() const override { return gone_; }
  bool ended() const { return ended_; }

  void set_gone() {
    gone_ = true;
    pieces.clear();
    changed.cancel();
  }

 private:
  void on_connections_thread(auto action) {
    asio::post(io_, [self = shared_from_this(), action = std::move(action)]() mutable {
      if (self->gone_) return;
      action(*self);
      self->changed.cancel();
    });
  }

  asio::io_context& io_;
  size_t largest_backlog_;
  std::atomic<bool> gone_ = false;
  std::atomic<bool> ended_ = false;

 public:
  asio::steady_timer changed;  // cancelled when there is something to write
  int status = 0;              // 0: nothing was said yet
  // origin: of the page that may read the answer
  std::string content_type;
  std::string allow;
  std::string origin;
  std::deque<std::string> pieces;
  size_t backlog = 0;  // bytes of `pieces`
  bool streams = false;
  bool finished = false;
  bool only_head = false;
};

// The Reply that handlers receive. If it is destroyed before the answer ended, it sends status 500.
class OwnedReply final : public Reply {
 public:
  explicit OwnedReply(std::shared_ptr<Exchange> exchange, std::string error)
      : exchange_(std::move(exchange)), error_(std::move(error)) {}
  ~OwnedReply() override {
    if (!exchange_->ended()) exchange_->send(500, "application/json", std::move(error_), "");
  }
  void send(int status, const std::string& type, std::string body,
            const std::string& allow) override {
    exchange_->send(status, type, std::move(body), allow);
  }
  void begin_stream(const std::string& type) override { exchange_->begin_stream(type); }
  void write(std::string piece) override { exchange_->write(std::move(piece)); }
  void end() override { exchange_->end(); }
  bool client_gone() const override { return exchange_->client_gone(); }

 private:
  std::shared_ptr<Exchange> exchange_;
  std::string error_;
};

}  // namespace

struct HttpServer::Parts {
  HttpOptions options;
  Handler handler;
  ErrorBody error_body;
  std::atomic<int64_t> open_requests = 0;
  int64_t connections = 0;
  bool draining = false;
  asio::io_context io{1};  // below what its coroutines count with
  asio::thread_pool handlers{1};
  tcp::acceptor acceptor{io};
  asio::steady_timer clock{io};

  void listen();
  asio::awaitable<void> accept();
  asio::awaitable<void> tick(const std::function<void()>& work);
  asio::awaitable<void> serve(tcp::socket socket);
  asio::awaitable<bool> serve_one(beast::tcp_stream& stream, beast::flat_buffer& buffer);
  static bool skip_empty_lines(beast::flat_buffer& buffer);
  bool is_allowed(const std::string& origin, const std::string& host) const;
  asio::awaitable<bool> answer(beast::tcp_stream& stream,
                               const http::request<http::string_body>& request);
  asio::awaitable<bool> write_answer(beast::tcp_stream& stream, Exchange& exchange, bool keep_alive,
                                     unsigned version);
  asio::awaitable<bool> write_stream(beast::tcp_stream& stream, Exchange& exchange, bool keep_alive,
                                     unsigned version);
  asio::awaitable<void> client_closes(tcp::socket& socket);
  asio::awaitable<void> refuse(beast::tcp_stream& stream, int status, const std::string& message);
  http::response<http::string_body> response(int status, const std::string& type, std::string body,
                                             bool keep_alive, unsigned version = 11) const;
};

void HttpServer::Parts::listen() {
  error_code error;
  const asio::ip::address address = asio::ip::make_address(options.host, error);
  if (error) fail("--host {}: not an IP address, such as 127.0.0.1 or 0.0.0.0", options.host);
  const tcp::endpoint endpoint(address, options.port);
  acceptor.open(endpoint.protocol());
  acceptor.set_option(tcp::acceptor::reuse_address(true));
  acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
  if (!error) return;
  const bool foreign = error == boost::system::errc::address_not_available;
  fail("cannot listen on {}:{}: {}. {}", options.host, options.port, error.message(),
       foreign ? "--host takes an address of this machine, or 0.0.0.0 for all of them."
               : "Choose another port with --port; 0 takes a free one.");
}

asio::awaitable<void> HttpServer::Parts::accept() {
  for (;;) {
    auto [error, socket] = co_await acceptor.async_accept(kAwait);
    if (error == asio::error::operation_aborted || !acceptor.is_open()) co_return;
    if (error) {  // too many open files, for example
      asio::steady_timer pause(io, std::chrono::milliseconds(50));
      co_await pause.async_wait(kAwait);
      continue;
    }
    ++connections;
    asio::co_spawn(io, serve(std::move(socket)), asio::detached);
  }
}

asio::awaitable<void> HttpServer::Parts::tick(const std::function<void()>& work) {
  for (;;) {
    work();
    clock.expires_after(std::chrono::milliseconds(100));
    co_await clock.async_wait(kAwait);
  }
}

asio::awaitable<void> HttpServer::Parts::serve(tcp::socket socket) try {
  struct Count {
    int64_t& connections;
    ~Count() { --connections; }
  } count{connections};
  error_code ignored;
  socket.set_option(tcp::no_delay(true), ignored);
  beast::tcp_stream stream(std::move(socket));
  beast::flat_buffer buffer;
  if (connections > options.connections) {
    const auto text = fmt::format("the server has {} connections, its limit", options.connections);
    co_await refuse(stream, 503, text);
    co_return;
  }
  while (co_await serve_one(stream, buffer)) {
  }
  stream.socket().shutdown(tcp::socket::shutdown_send, ignored);
} catch (const std::exception& error) {
  std::fputs(fmt::format("assay: a connection failed: {}\n", error.what()).c_str(), stderr);
}

// Empty lines before a request are passed over [RFC 9112, 2.2]. True when a request has begun.
bool HttpServer::Parts::skip_empty_lines(beast::flat_buffer& buffer) {
  const auto starts_with = [&](std::string_view text) {
    const auto data = buffer.data();
    return std::string_view(static_cast<const char*>(data.data()), data.size()).starts_with(text);
  };
  while (starts_with("\r\n")) buffer.consume(2);
  return buffer.size() > 1 || (buffer.size() == 1 && !starts_with("\r"));
}

// Whether a page of `origin` may use this server. The server's own page has the origin of `host`.
bool HttpServer::Parts::is_allowed(const std::string& origin, const std::string& host) const {
  const auto listed = [&](const std::string& text) {
    return std::ranges::count(options.allowed_origins, text) > 0;
  };
  return origin.empty() || origin == "http://" + host || origin == "https://" + host ||
         listed(origin) || listed("*");
}

// Reads one request and answers it; false: the connection ends.
asio::awaitable<bool> HttpServer::Parts::serve_one(beast::tcp_stream& stream,
                                                   beast::flat_buffer& buffer) {
  http::request_parser<http::string_body> parser;
  parser.header_limit(kLargestHeader);
  parser.body_limit(uint64_t(options.largest_body));
  // An idle connection may wait longer than a request that has begun.
  stream.expires_after(seconds(buffer.size() > 0 ? options.timeout : options.idle_timeout));
  while (!skip_empty_lines(buffer)) {
    const auto [error, size] = co_await stream.async_read_some(buffer.prepare(4096), kAwait);
    if (error) co_return false;
    buffer.commit(size);
  }
  stream.expires_after(seconds(options.timeout));
  auto [error, size] = co_await http::async_read_header(stream, buffer, parser, kAwait);
  if (!error && beast::iequals(parser.get()[http::field::expect], "100-continue")) {
    const std::string go_on = "HTTP/1.1 100 Continue\r\n\r\n";
    co_await asio::async_write(stream, asio::buffer(go_on), kAwait);
  }
  if (!error) std::tie(error, size) = co_await http::async_read(stream, buffer, parser, kAwait);
  if (error == http::error::body_limit) {
    co_await refuse(stream, 413,
                    fmt::format("the request has more than {} bytes", options.largest_body));
  } else if (error == http::error::header_limit) {
    co_await refuse(stream, 431,
                    fmt::format("the headers have more than {} bytes", kLargestHeader));
  } else if (error && error != http::error::end_of_stream &&
             error != http::error::partial_message &&
             error.category() == http::make_error_code(http::error::bad_method).category()) {
    co_await refuse(stream, 400, fmt::format("not an HTTP request: {}", error.message()));
  }
  if (error) co_return false;
  co_return co_await answer(stream, parser.get());
}

// Answers, closes the sending side and reads what the client still sends for a while: closing a
// socket with unread data would destroy the answer before the client sees it.
asio::awaitable<void> HttpServer::Parts::refuse(beast::tcp_stream& stream, int status,
                                                const std::string& message) {
  auto refusal =
      response(status, "application/json", error_body(status, message), /*keep_alive=*/false);
  stream.expires_after(seconds(options.timeout));
  co_await http::async_write(stream, refusal, kAwait);
  error_code ignored;
  stream.socket().shutdown(tcp::socket::shutdown_send, ignored);
  std::string discarded(64 << 10, '\0');
  stream.expires_after(seconds(std::min(10.0, options.timeout)));
  for (;;) {
    const auto [error, size] = co_await stream.async_read_some(asio::buffer(discarded), kAwait);
    if (error) co_return;
  }
}

http::response<http::string_body> HttpServer::Parts::response(int status, const std::string& type,
                                                              std::string body, bool keep_alive,
                                                              unsigned version) const {
  http::response<http::string_body> out(http::status(status), version);
  if (!type.empty()) out.set(http::field::content_type, type);
  out.set(http::field::cache_control, "no-store");
  if (status == 429 || status == 503) out.set(http::field::retry_after, "1");
  if (status == 401) out.set(http::field::www_authenticate, "Bearer");
  out.keep_alive(keep_alive);
  out.body() = std::move(body);
  out.prepare_payload();
  return out;
}

asio::awaitable<bool> HttpServer::Parts::answer(beast::tcp_stream& stream,
                                                const http::request<http::string_body>& request) {
  using namespace asio::experimental::awaitable_operators;
  struct Count {
    std::atomic<int64_t>& requests;
    explicit Count(std::atomic<int64_t>& r) : requests(r) { ++requests; }
    ~Count() { --requests; }
  } count(open_requests);
  const auto exchange = std::make_shared<Exchange>(io, size_t(options.largest_backlog));
  const auto reply = [&] {
    return std::make_shared<OwnedReply>(exchange, error_body(500, "the request was not answered"));
  };
  // The answer to HEAD is that to GET without its body.
  exchange->only_head = request.method() == http::verb::head;
  HttpRequest plain{.method = exchange->only_head ? "GET" : std::string(request.method_string()),
                    .path = std::string(request.target()),
                    .authorization = std::string(request[http::field::authorization]),
                    .body = request.body()};
  // "http://host/path", as to a proxy [RFC 9112, 3.2.2]
  if (const size_t scheme = plain.path.find("://");
      !plain.path.starts_with('/') && scheme != std::string::npos)
    plain.path.erase(0, std::min(plain.path.find_first_of("/?", scheme + 3), plain.path.size()));
  if (!plain.path.starts_with('/') && plain.path != "*") plain.path.insert(0, "/");
  plain.path = plain.path.substr(0, plain.path.find('?'));
  const std::string origin(request[http::field::origin]);
  const bool allowed = is_allowed(origin, std::string(request[http::field::host]));
  if (allowed) exchange->origin = origin;
  if (!allowed) {
    const auto text = fmt::format(
        "pages of {} may not use this server; `assay serve --allow-origin` allows it", origin);
    exchange->send(403, "application/json", error_body(403, text), "");
  } else if (!origin.empty() && request.method() == http::verb::options &&
             !request[http::field::access_control_request_method].empty()) {
    exchange->send(204, "", "", "");  // a browser asks before it sends the request
  } else if (std::ranges::count(options.quick_paths, plain.path)) {
    handler(std::move(plain), reply());
  } else {
    asio::post(handlers, [this, plain = std::move(plain), reply = reply()]() mutable {
      handler(std::move(plain), std::move(reply));
    });
  }
  stream.expires_never();
  const bool keep_alive = request.keep_alive() && !draining;
  const auto done = co_await (write_answer(stream, *exchange, keep_alive, request.version()) ||
                              client_closes(stream.socket()));
  const bool answered = done.index() == 0 && std::get<0>(done);
  if (!answered) exchange->set_gone();
  co_return answered&& keep_alive;
}

// Returns when the client has closed its side. A next request that is sent early stays unread, so
// the socket is readable and the end is looked for again and again.
asio::awaitable<void> HttpServer::Parts::client_closes(tcp::socket& socket) {
  for (;;) {
    const auto [stopped] = co_await socket.async_wait(tcp::socket::wait_read, kAwait);
    pollfd watched{.fd = socket.native_handle(), .events = POLLRDHUP, .revents = 0};
    if (stopped || ::poll(&watched, 1, /*timeout=*/0) != 0) co_return;
    asio::steady_timer pause(io, std::chrono::milliseconds(100));
    if (const auto [cancelled] = co_await pause.async_wait(kAwait); cancelled) co_return;
  }
}

// Lets a browser give the answer to a page of `origin` [Fetch Standard, 3.3].
void set_origin(auto& response, const std::string& origin) {
  if (origin.empty()) return;
  response.set(http::field::access_control_allow_origin, origin);
  response.set(http::field::vary, "Origin");
  if (response.result() != http::status::no_content) return;
  response.set(http::field::access_control_allow_methods, "GET, POST");
  response.set(http::field::access_control_allow_headers, "authorization, content-type");
  response.set(http::field::access_control_max_age, "600");
}

// Writes what the handler says; false if the connection failed.
asio::awaitable<bool> HttpServer::Parts::write_answer(beast::tcp_stream& stream, Exchange& exchange,
                                                      bool keep_alive, unsigned version) {
  while (exchange.status == 0 && !exchange.client_gone()) {
    exchange.changed.expires_at(asio::steady_timer::time_point::max());
    co_await exchange.changed.async_wait(kAwait);
  }
  if (exchange.client_gone()) co_return false;
  if (exchange.streams) co_return co_await write_stream(stream, exchange, keep_alive, version);
  auto whole = response(exchange.status, exchange.content_type, std::move(exchange.pieces.front()),
                        keep_alive, version);
  if (!exchange.allow.empty()) whole.set(http::field::allow, exchange.allow);
  set_origin(whole, exchange.origin);
  // A large answer takes its time, so every part of it must progress, and not the whole.
  http::response_serializer<http::string_body> serializer(whole);
  serializer.split(exchange.only_head);
  while (!(exchange.only_head ? serializer.is_header_done() : serializer.is_done())) {
    stream.expires_after(seconds(options.timeout));
    const auto [error, size] = co_await http::async_write_some(stream, serializer, kAwait);
    if (error) co_return false;
  }
  co_return true;
}

asio::awaitable<bool> HttpServer::Parts::write_stream(beast::tcp_stream& stream, Exchange& exchange,
                                                      bool keep_alive, unsigned version) {
  const bool chunked = version >= 11;
  http::response<http::empty_body> head(http::status(exchange.status), version);
  head.set(http::field::content_type, exchange.content_type);
  head.set(http::field::cache_control, "no-store");
  head.keep_alive(keep_alive && chunked);
  head.chunked(chunked);
  set_origin(head, exchange.origin);
  http::response_serializer<http::empty_body> serializer(head);
  stream.expires_after(seconds(options.timeout));
  const auto [failed, written] = co_await http::async_write_header(stream, serializer, kAwait);
  if (failed) co_return false;
  for (;;) {
    if (exchange.client_gone()) co_return false;
    std::string bytes;
    for (const std::string& piece : exchange.pieces) bytes += piece;
    exchange.pieces.clear();
    if (bytes.empty() && exchange.finished) break;
    if (bytes.empty()) {
      stream.expires_never();
      exchange.changed.expires_at(asio::steady_timer::time_point::max());
      co_await exchange.changed.async_wait(kAwait);
      continue;
    }
    stream.expires_after(seconds(options.timeout));
    const std::string framed = chunked ? fmt::format("{:x}\r\n{}\r\n", bytes.size(), bytes) : bytes;
    const auto [error, size] = co_await asio::async_write(stream, asio::buffer(framed), kAwait);
    exchange.backlog -= bytes.size();
    if (error) co_return false;
  }
  if (!chunked) co_return false;
  const std::string last = "0\r\n\r\n";
  const auto [error, size] = co_await asio::async_write(stream, asio::buffer(last), kAwait);
  co_return !error;
}

HttpServer::HttpServer(const HttpOptions& options, Handler handler, ErrorBody error_body)
    : parts_(std::make_unique<Parts>()) {
  parts_->options = options;
  parts_->handler = std::move(handler);
  parts_->error_body = std::move(error_body);
  parts_->listen();
}

HttpServer::~HttpServer() { parts_->handlers.join(); }

uint16_t HttpServer::port() const { return parts_->acceptor.local_endpoint().port(); }

void HttpServer::run(const std::function<void()>& tick) {
  asio::co_spawn(parts_->io, parts_->accept(), asio::detached);
  asio::co_spawn(parts_->io, parts_->tick(tick), asio::detached);
  parts_->io.run();
}

void HttpServer::stop() { parts_->io.stop(); }

void HttpServer::stop_accepting() {
  asio::post(parts_->io, [this] {
    error_code ignored;
    parts_->draining = true;
    parts_->acceptor.close(ignored);
  });
}

int64_t HttpServer::open_requests() const { return parts_->open_requests; }

void HttpServer::on_handler_thread(std::function<void()> work) {
  asio::post(parts_->handlers, std::move(work));
}

}  // namespace assay::serve
