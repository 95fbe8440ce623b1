// The start and the end of the server.
#include <torch/torch.h>

#include <future>
#include <memory>
#include <thread>

#include "serve/service.h"
#include "server.h"

namespace assay::serve {
namespace {

TEST(Lifecycle, HealthIs503WhileTheModelIsLoaded) {
  ServiceOptions options;
  options.http.port = 0;
  std::promise<uint16_t> listening;
  std::promise<void> asked;
  const auto load = [&]() -> std::unique_ptr<ServedModel> {
    asked.get_future().wait();
    fail("the model is broken");
  };
  std::thread server([&] {
    EXPECT_THROW(run_service(options, load, [&](uint16_t port) { listening.set_value(port); }),
                 BadInput);
  });
  const uint16_t port = listening.get_future().get();
  const Answer health = Client(port).request("GET", "/health", "", "");
  const Answer early = Client(port).request("POST", "/v1/completions", R"({"prompt": "a"})", "");
  const Answer metrics = Client(port).request("GET", "/metrics", "", "");
  asked.set_value();
  server.join();
  EXPECT_EQ(health.status, 503);
  EXPECT_EQ(json::parse(health.body)["status"], "loading");
  EXPECT_EQ(early.status, 503);
  EXPECT_EQ(json::parse(early.body)["error"]["code"], "loading");
  EXPECT_EQ(metrics.status, 200);
}

TEST(Lifecycle, BadStartsAreExplained) {
  const auto expect = [](int code, const std::string& arguments, const std::string& words) {
    const cli::Outcome outcome = cli::run(folder().path(), "serve " + arguments);
    EXPECT_EQ(outcome.exit_code, code) << arguments << outcome.error;
    EXPECT_NE(outcome.error.find(words), std::string::npos) << outcome.error;
    return outcome.out;
  };
  expect(2, fmt::format("model --port {}", shared_server().port), "Address already in use");
  EXPECT_EQ(expect(2, "absent --port 0", "no such model"), "") << "the port was opened";
  expect(2, "model --port 0 --max-context 10000", "the model reads at most 600 tokens");
  expect(2, "model --port 70000", "not in range 0 to 65535");
  expect(2, "model --port 0 --slots 0", "--slots");
  expect(2, "model --port 0 --host nowhere", "not an IP address");
  expect(2, "model --port 0 --host 192.0.2.1", "an address of this machine");
  expect(2, "", "MODEL");
}

TEST(Lifecycle, SigtermFinishesOpenRequests) {
  Server server;
  Client idle(server.port);
  Client open(server.port);
  EXPECT_EQ(idle.request("GET", "/health").status, 200);
  open.send_request(
      "POST", "/v1/completions",
      json({{"prompt", "a"}, {"max_tokens", 590}, {"ignore_eos", true}, {"stream", true}}).dump());
  ASSERT_EQ(open.read_head().status, 200);
  server.process().signal(SIGTERM);
  std::string body;
  for (std::string chunk; !(chunk = open.read_chunk()).empty();) body += chunk;
  EXPECT_TRUE(events_of(body).done);
  const cli::Outcome outcome = server.process().wait();
  EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
  EXPECT_NE(outcome.error.find("waiting for 1 open request"), std::string::npos) << outcome.error;
  EXPECT_FALSE(Client(server.port).connected());
}

TEST(Lifecycle, DrainEndsAtItsLimit) {
  Server server("--drain 0.3 --slots 1");
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 12; ++i) {
    clients.push_back(std::make_unique<Client>(server.port));
    clients.back()->send_request(
        "POST", "/v1/completions",
        json({{"prompt", "a"}, {"max_tokens", 590}, {"n", 100}, {"ignore_eos", true}}).dump());
  }
  while (server.metric("assay_sequences_decoding") != "1" ||
         server.metric("assay_requests_queued") == "0") {
  }
  server.process().signal(SIGTERM);
  for (const auto& client : clients) {
    const Answer answer = client->read_answer();
    EXPECT_EQ(answer.status, 503);
    EXPECT_NE(answer.body.find("the server is stopping"), std::string::npos) << answer.body;
  }
  const cli::Outcome outcome = server.process().wait();
  EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
  EXPECT_NE(outcome.error.find("cut off after 0.3 seconds"), std::string::npos) << outcome.error;
}

}  // namespace
}  // namespace assay::serve
