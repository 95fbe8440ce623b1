// Many requests at the same time: the queue, clients that leave, the prefix cache.
#include <torch/torch.h>

#include <memory>

#include "server.h"

namespace assay::serve {
namespace {

TEST(Load, FullQueueGets429) {
  Server server("--slots 1 --queue 1");
  const json endless = {
      {"prompt", "a"}, {"max_tokens", 590}, {"n", 16}, {"ignore_eos", true}, {"stream", true}};
  Client working(server.port);
  Client waiting(server.port);
  working.send_request("POST", "/v1/completions", endless.dump());
  ASSERT_EQ(working.read_head().status, 200);
  waiting.send_request("POST", "/v1/completions", endless.dump());
  while (server.metric("assay_requests_queued") != "1") {
  }
  const Answer refused = server.post("/v1/completions", endless);
  EXPECT_EQ(refused.status, 429);
  EXPECT_EQ(json::parse(refused.body)["error"]["type"], "rate_limit_error");
  EXPECT_TRUE(refused.headers.contains("retry-after"));
  EXPECT_EQ(server.get("/health").status, 200);
  working.close();
  EXPECT_EQ(waiting.read_head().status, 200);
}

TEST(Load, ClientsThatDisconnectFreeTheirPlaces) {
  Server server("--slots 2 --queue 100");
  const json endless = {{"prompt", "a"}, {"max_tokens", 590}, {"n", 16}, {"ignore_eos", true}};
  for (int i = 0; i < 12; ++i) {
    Client client(server.port);
    json request = endless;
    request["stream"] = i % 2 == 0;
    client.send_request("POST", "/v1/completions", request.dump());
    if (i % 2 == 0) client.read_head();
  }
  const json body = server.completion({{"prompt", "Where"}, {"max_tokens", 5}});
  EXPECT_EQ(body["choices"].size(), 1u);
  const auto becomes = [&](const char* metric, const char* value) {
    while (server.metric(metric) != value && server.process().running()) cli::sleep_seconds(0.01);
  };
  becomes("assay_requests_cancelled_total", "12");
  becomes("assay_sequences_decoding", "0");  // a step that was under way still counts its rows
  EXPECT_TRUE(server.process().running());
}

TEST(Load, PrefixCacheDoesNotChangeAnswers) {
  Server cached("--prefill 16");
  Server uncached("--prefill 16 --prefix-cache 0");
  std::string shared;
  for (int i = 0; i < 8; ++i)
    shared += fmt::format("The answer to question {} is number {}. ", i, 7 * i);
  for (const int64_t logprobs : {-1, 2}) {
    for (const std::string rest : {"Where", "It is", "", "Where"}) {
      json request = {{"prompt", shared + rest}, {"max_tokens", 20}, {"seed", 5}, {"echo", true}};
      if (logprobs >= 0) request["logprobs"] = logprobs;
      EXPECT_EQ(cached.completion(request)["choices"], uncached.completion(request)["choices"]);
    }
  }
  EXPECT_GT(std::stod(cached.metric("assay_prompt_tokens_cached_total")), 300);
  EXPECT_EQ(uncached.metric("assay_prompt_tokens_cached_total"), "0");
}

// Mixed requests from many clients at the same time; every answer equals that of a request alone.
TEST(Load, ManyClientsGetTheAnswersOfRequestsAlone) {
  Server server("--queue 1000 --prefill 32");
  const auto request = [](int i) {
    json body = {{"prompt", fmt::format("The answer to question {} is number", i % 7)},
                 {"max_tokens", i * 13 % 41},
                 {"seed", i}};
    if (i % 3 == 0) body.update({{"logprobs", 1}, {"echo", true}});
    if (i % 4 == 0) body["n"] = 3;
    if (i % 5 == 0) body["prompt"] = std::vector<int>(size_t(i * 7 % 300 + 1), 5);
    return body;
  };
  constexpr int count = 60;
  std::vector<json> alone;
  for (int i = 0; i < count; ++i) alone.push_back(server.completion(request(i))["choices"]);
  std::vector<std::unique_ptr<Client>> clients;
  for (int round = 0; round < 2; ++round)
    for (int i = 0; i < count; ++i) {
      clients.push_back(std::make_unique<Client>(server.port));
      if (i % 10 == 7) {  // leaves early, or talks nonsense
        Client leaving(server.port);
        if (round == 0) leaving.send_request("POST", "/v1/completions", request(i).dump());
        else leaving.send("POST /v1/completions HTTP/1.1\r\nContent-Le");
      }
      clients.back()->send_request("POST", "/v1/completions", request(i).dump());
    }
  for (size_t c = 0; c < clients.size(); ++c) {
    const Answer answer = clients[c]->read_answer();
    ASSERT_EQ(answer.status, 200) << answer.body;
    EXPECT_EQ(json::parse(answer.body)["choices"], alone[c % count]) << "request " << c % count;
  }
}

}  // namespace
}  // namespace assay::serve
