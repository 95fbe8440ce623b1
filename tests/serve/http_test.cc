// The HTTP server without a model: what clients send that no library would.
#include "serve/http.h"

#include <torch/torch.h>

#include <atomic>
#include <thread>

#include "client.h"
#include "data/folder.h"
#include "fuzz/mutation.h"

namespace assay::serve {
namespace {

using data::message_of;

struct HttpTest : testing::Test {
  void start(HttpOptions options = {}) {
    server = std::make_unique<HttpServer>(
        options,
        [this](HttpRequest request, std::shared_ptr<Reply> reply) {
          handle(request, std::move(reply));
        },
        [](int status, const std::string& message) {
          return fmt::format("{} {}", status, message);
        });
    thread = std::thread([this] { server->run([] {}); });
  }
  ~HttpTest() override {
    if (!server) return;
    held.clear();
    server->stop();
    thread.join();
  }
  uint16_t port() const { return server->port(); }

  void handle(const HttpRequest& request, std::shared_ptr<Reply> reply) {
    ++requests;
    if (request.path == "/echo") {
      reply->send(200, "text/plain", request.method + " " + request.body);
    } else if (request.path == "/block") {
      wait_for([this] { return is_released.load(); });
      reply->send(200, "text/plain", "released");
    } else if (request.path == "/hold") {
      held.push_back(reply);
    } else if (request.path == "/stream") {
      reply->begin_stream("text/event-stream");
      for (int i = 0; i < 5; ++i) reply->write(fmt::format("piece {}\n", i));
      reply->end();
    } else if (request.path == "/large") {
      reply->begin_stream("text/plain");
      reply->write(std::string(3 << 20, 'x'));
      reply->end();
    } else if (request.path == "/flood") {
      reply->begin_stream("text/plain");
      flood = std::thread([this, reply] {
        while (!reply->client_gone()) {
          reply->write(std::string(1 << 16, 'x'));
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        flood_ended = true;
      });
    }  // anything else is dropped without an answer
  }
  bool wait_for(auto&& condition) {
    for (int i = 0; i < 6000; ++i) {
      if (condition()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }

  std::unique_ptr<HttpServer> server;
  std::thread thread;
  std::thread flood;
  std::vector<std::shared_ptr<Reply>> held;
  std::atomic<int> requests = 0;
  std::atomic<bool> flood_ended = false;
  std::atomic<bool> is_released = false;
};

TEST_F(HttpTest, AConnectionServesManyRequests) {
  start();
  Client client(port());
  for (int i = 0; i < 50; ++i) {
    const Answer answer = client.request("POST", "/echo?query=1", fmt::format("body {}", i));
    EXPECT_EQ(answer.status, 200);
    EXPECT_EQ(answer.body, fmt::format("POST body {}", i));
  }
  EXPECT_EQ(client.request("POST", "/echo", "", "Connection: close\r\n").status, 200);
  EXPECT_TRUE(client.ended());
}

TEST_F(HttpTest, QuickPathsAreAnsweredWhileAnotherHandlerRuns) {
  start({.quick_paths = {"/echo"}});
  Client slow(port());
  slow.send_request("GET", "/block");
  ASSERT_TRUE(wait_for([&] { return requests == 1; }));
  EXPECT_EQ(Client(port()).request("GET", "/echo").status, 200);
  EXPECT_FALSE(is_released);
  is_released = true;
  EXPECT_EQ(slow.read_answer().body, "released");
}

TEST_F(HttpTest, RequestsSentAtOnceAreAnsweredInOrder) {
  start();
  Client client(port());
  std::string all;
  for (int i = 0; i < 20; ++i)
    all += fmt::format("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{:02}", i);
  ASSERT_TRUE(client.send(all));
  for (int i = 0; i < 20; ++i) EXPECT_EQ(client.read_answer().body, fmt::format("POST {:02}", i));
}

TEST_F(HttpTest, EmptyLinesBeforeARequestArePassedOver) {
  start();
  Client client(port());
  const std::string request = "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab";
  ASSERT_TRUE(client.send("\r\n" + request + "\r\n\r\n" + request + "\r"));
  for (int i = 0; i < 2; ++i) EXPECT_EQ(client.read_answer().body, "POST ab");
  ASSERT_TRUE(client.send("\n" + request));
  EXPECT_EQ(client.read_answer().body, "POST ab");
  ASSERT_TRUE(client.send("\rGET /echo HTTP/1.1\r\n\r\n"));
  EXPECT_EQ(client.read_answer().status, 400);
}

TEST_F(HttpTest, AbsoluteTargetsAreThePathsInThem) {
  start();
  Client client(port());
  for (const char* target : {"http://localhost:80/echo", "HTTP://x/echo?query=/", "/echo?a=b://c"})
    EXPECT_EQ(client.request("POST", target, "body").body, "POST body") << target;
}

TEST_F(HttpTest, PagesOfOtherOriginsAreRefused) {
  start({.allowed_origins = {"http://localhost:3000", "null"}});
  Client client(port());
  const auto answer_to = [&](const std::string& method, const std::string& path,
                             const std::string& origin, const std::string& more = "") {
    return client.request(method, path, "", "Origin: " + origin + "\r\n" + more);
  };
  const std::string asks = "Access-Control-Request-Method: POST\r\n";
  for (const char* origin : {"http://localhost:3000", "null", "http://localhost"}) {
    for (const char* path : {"/echo", "/stream"}) {
      const Answer answer = answer_to("POST", path, origin);
      EXPECT_EQ(answer.status, 200) << origin;
      EXPECT_EQ(answer.headers.at("access-control-allow-origin"), origin);
      EXPECT_EQ(answer.headers.at("vary"), "Origin");
    }
    const Answer asked = answer_to("OPTIONS", "/echo", origin, asks);
    EXPECT_EQ(asked.status, 204);
    EXPECT_EQ(asked.headers.at("access-control-allow-methods"), "GET, POST");
    EXPECT_EQ(asked.headers.at("access-control-allow-headers"), "authorization, content-type");
    EXPECT_EQ(asked.body, "");
  }
  const int before = requests;
  for (const char* origin : {"http://localhost:3001", "https://example.org"}) {
    const Answer answer = answer_to("POST", "/echo", origin);
    EXPECT_EQ(answer.status, 403) << origin;
    EXPECT_NE(answer.body.find("--allow-origin"), std::string::npos);
    EXPECT_FALSE(answer.headers.contains("access-control-allow-origin"));
    EXPECT_EQ(answer_to("OPTIONS", "/echo", origin, asks).status, 403);
  }
  EXPECT_EQ(requests, before);
  EXPECT_FALSE(client.request("POST", "/echo").headers.contains("access-control-allow-origin"));
}

TEST_F(HttpTest, StarAllowsPagesOfEveryOrigin) {
  start({.allowed_origins = {"*"}});
  EXPECT_EQ(Client(port()).request("POST", "/echo", "", "Origin: https://example.org\r\n").status,
            200);
}

TEST_F(HttpTest, StreamsArriveInChunks) {
  start();
  Client client(port());
  for (int round = 0; round < 3; ++round)
    EXPECT_EQ(client.request("GET", "/stream").body,
              "piece 0\npiece 1\npiece 2\npiece 3\npiece 4\n");
  Client old(port());
  old.send("GET /stream HTTP/1.0\r\n\r\n");
  EXPECT_FALSE(old.read_head().headers.contains("transfer-encoding"));
  while (old.receive()) {
  }
}

TEST_F(HttpTest, ADroppedRequestGetsStatus500) {
  start();
  Client client(port());
  EXPECT_EQ(client.request("GET", "/nothing").status, 500);
  EXPECT_EQ(client.request("POST", "/echo", "a").status, 200);
}

TEST_F(HttpTest, MalformedRequestsAreRefused) {
  start();
  for (const std::string bytes : {"nonsense\r\n\r\n", "GET / HTTP/9.9\r\n\r\n",
                                  "POST /echo HTTP/1.1\r\nContent-Length: -4\r\n\r\n",
                                  "GET /echo HTTP/1.1\r\nbad header\r\n\r\n"}) {
    Client client(port());
    client.send(bytes);
    EXPECT_EQ(client.read_answer().status, 400) << bytes;
    EXPECT_TRUE(client.ended());
  }
  Client large(port());
  large.send("GET /echo HTTP/1.1\r\nX: " + std::string(100'000, 'x') + "\r\n\r\n");
  EXPECT_EQ(large.read_answer().status, 431);
  EXPECT_EQ(requests, 0);
}

TEST_F(HttpTest, ChangedRequestsLeaveTheServerWorking) {
  constexpr int kRequests = 400;
  start({.timeout = 5});
  const std::vector<std::string> seeds = {
      "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody",
      "POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
      "GET /stream HTTP/1.0\r\nConnection: keep-alive\r\nExpect: 100-continue\r\n\r\n"};
  Random random(1, "requests");
  for (int i = 0; i < kRequests; ++i) {
    Client client(port());
    client.send(fuzz::mutated_bytes(seeds[random.below(seeds.size())], random));
    client.end_sending();
    while (client.receive()) {
    }
  }
  EXPECT_GT(requests, 0);
  EXPECT_LT(requests, kRequests);
  EXPECT_TRUE(wait_for([&] { return server->open_requests() == 0; }));
  EXPECT_EQ(Client(port()).request("POST", "/echo", "a").body, "POST a");
}

// The body is not read into memory, and the client sees the answer although it still sends.
TEST_F(HttpTest, ABodyPastTheLimitIsRefused) {
  start({.largest_body = 1000});
  Client client(port());
  EXPECT_TRUE(client.send_request("POST", "/echo", std::string(100 << 20, 'x')));
  const Answer answer = client.read_answer();
  EXPECT_EQ(answer.status, 413);
  EXPECT_EQ(answer.body, "413 the request has more than 1000 bytes");
  Client chunked(port());
  chunked.send("POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\n" +
               std::string(4096, 'x'));
  EXPECT_EQ(chunked.read_answer().status, 413);
  Client polite(port());
  polite.send("POST /echo HTTP/1.1\r\nContent-Length: 2000\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_EQ(polite.read_answer().status, 413);
  Client small(port());
  EXPECT_EQ(small.request("POST", "/echo", std::string(1000, 'x')).status, 200);
  EXPECT_EQ(requests, 1);
}

TEST_F(HttpTest, ClientsThatWaitForPermissionGetIt) {
  start();
  Client client(port());
  client.send("POST /echo HTTP/1.1\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_EQ(client.read_head().status, 100);
  client.send("body");
  EXPECT_EQ(client.read_answer().body, "POST body");
}

TEST_F(HttpTest, RequestsThatDoNotArriveEndTheConnection) {
  start({.timeout = 0.3});
  for (const std::string part :
       {"GET /ec", "POST /echo HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc"}) {
    Client client(port());
    client.send(part);
    EXPECT_TRUE(client.ended()) << part;
  }
  Client other(port());
  EXPECT_EQ(other.request("POST", "/echo", "a").status, 200);
  EXPECT_EQ(requests, 1);
}

TEST_F(HttpTest, TheHandlerSeesThatAClientHasGone) {
  start();
  auto client = std::make_unique<Client>(port());
  client->send_request("GET", "/hold");
  ASSERT_TRUE(wait_for([&] { return requests == 1; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(held[0]->client_gone());
  EXPECT_EQ(server->open_requests(), 1);
  client.reset();
  EXPECT_TRUE(wait_for([&] { return held[0]->client_gone(); }));
  EXPECT_TRUE(wait_for([&] { return server->open_requests() == 0; }));
  held[0]->send(200, "text/plain", "nobody");
  Client other(port());
  EXPECT_EQ(other.request("POST", "/echo", "a").status, 200);
}

TEST_F(HttpTest, TheEndOfAClientIsSeenPastItsNextRequest) {
  start();
  auto client = std::make_unique<Client>(port());
  client->send_request("GET", "/hold");
  ASSERT_TRUE(wait_for([&] { return requests == 1; }));
  client->send_request("POST", "/echo", "early");
  std::this_thread::sleep_for(std::chrono::milliseconds(250));
  EXPECT_FALSE(held[0]->client_gone());
  client.reset();
  EXPECT_TRUE(wait_for([&] { return held[0]->client_gone(); }));
  EXPECT_TRUE(wait_for([&] { return server->open_requests() == 0; }));
}

TEST_F(HttpTest, ANextRequestThatIsSentEarlyIsAnswered) {
  start();
  Client client(port());
  client.send_request("GET", "/hold");
  ASSERT_TRUE(wait_for([&] { return requests == 1; }));
  client.send_request("POST", "/echo", "early");
  std::this_thread::sleep_for(std::chrono::milliseconds(250));
  held[0]->send(200, "text/plain", "first");
  EXPECT_EQ(client.read_answer().body, "first");
  EXPECT_EQ(client.read_answer().body, "POST early");
}

// A client that does not read: first the kernel's buffers fill, then the backlog.
TEST_F(HttpTest, AClientThatReadsTooSlowlyIsDisconnected) {
  start({.largest_backlog = 1 << 20, .timeout = 60});
  Client client(port(), /*receive_buffer=*/4096);
  client.send_request("GET", "/flood");
  EXPECT_TRUE(wait_for([&] { return flood_ended.load(); }));
  flood.join();
  Client other(port());
  EXPECT_EQ(other.request("POST", "/echo", "a").status, 200);
}

TEST_F(HttpTest, APieceLargerThanTheBacklogIsSent) {
  start({.largest_backlog = 1 << 20});
  const Answer answer = Client(port()).request("GET", "/large");
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.body, std::string(3 << 20, 'x'));
}

TEST_F(HttpTest, AWriteThatMakesNoProgressIsGivenUp) {
  start({.largest_backlog = int64_t{1} << 40, .timeout = 0.5});
  Client client(port(), /*receive_buffer=*/4096);
  client.send_request("GET", "/flood");
  EXPECT_TRUE(wait_for([&] { return flood_ended.load(); }));
  flood.join();
}

TEST_F(HttpTest, ConnectionsPastTheLimitAreRefused) {
  start({.connections = 3});
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 3; ++i) {
    clients.push_back(std::make_unique<Client>(port()));
    EXPECT_EQ(clients.back()->request("POST", "/echo", "a").status, 200);
  }
  EXPECT_EQ(Client(port()).read_answer().status, 503);
  clients.pop_back();
  EXPECT_TRUE(wait_for([&] { return Client(port()).request("POST", "/echo", "a").status == 200; }));
}

TEST_F(HttpTest, AnAddressInUseIsNamed) {
  start();
  const auto second = [&](const HttpOptions& options) { HttpServer(options, {}, {}); };
  EXPECT_MESSAGE(second({.port = port()}),
                 fmt::format("127.0.0.1:{}: Address already in use", port()));
  EXPECT_MESSAGE(second({.host = "localhost"}), "not an IP address");
  EXPECT_MESSAGE(second({.host = "203.0.113.7"}), "203.0.113.7");
}

TEST_F(HttpTest, HundredsOfClientsAreServedByOneThread) {
  start();
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 300; ++i) {
    clients.push_back(std::make_unique<Client>(port()));
    ASSERT_TRUE(clients.back()->send_request("POST", "/echo", std::to_string(i)));
  }
  for (int i = 0; i < 300; ++i)
    EXPECT_EQ(clients[size_t(i)]->read_answer().body, fmt::format("POST {}", i));
}

}  // namespace
}  // namespace assay::serve
