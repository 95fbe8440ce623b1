// `assay serve` as a process, with a small model that the test writes.
#include <torch/torch.h>

#include <future>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/program.h"
#include "client.h"
#include "exchange/model_files.h"
#include "nn/testing.h"
#include "serve/service.h"
#include "tasks/tokenizer_of_test.h"

namespace assay::serve {
namespace {

using cli::Process;
using nlohmann::json;

constexpr int64_t kPositions = 600;

// Folders with a model that has a tokenizer ("model") and one that has none ("bare").
const data::Folder& folder() {
  static const data::Folder made;
  static const bool written = [] {
    const auto& tokenizer = tasks::small_tokenizer();
    write_file(made / "tokenizer", tokenizer.contents());
    const std::string toml = fmt::format(
        "[model]\nvocab_size = {}\nd_model = 32\nnum_layers = 3\npattern = [\"attention\", "
        "\"mamba1\", \"top1_chunk\"]\n"
        "positions = \"learned\"\nmax_positions = {}\n[model.top1_chunk]\nchunk_size = 32\n",
        tokenizer.vocab_size(), kPositions);
    exchange::OpenModel model{nn::random_model(toml), {}, made / "tokenizer"};
    model.model->to(at::kFloat);
    exchange::save_model(made / "model", model);
    model.tokenizer.clear();
    exchange::save_model(made / "bare", model);
    return true;
  }();
  EXPECT_TRUE(written);
  return made;
}

class Server {
 public:
  explicit Server(const std::string& options = "", const std::string& model = "model")
      : process_(folder().path(),
                 fmt::format("serve {} --port 0 --threads 1 --device cpu --json {} > {}", model,
                             options, log_name())) {
    const fs::path log = folder() / log_name();
    cli::wait_until(process_, [&] {
      return fs::exists(log) && read_file(log).find("\n}") != std::string::npos;
    });
    if (!process_.running()) return;
    port = json::parse(read_file(log))["port"];
    while (get("/health").status == 503 && process_.running()) cli::sleep_seconds(0.01);
  }
  Answer get(const std::string& path, const std::string& headers = "") const {
    return Client(port).request("GET", path, "", headers);
  }
  Answer post(const std::string& path, const json& body, const std::string& headers = "") const {
    return Client(port).request("POST", path, body.dump(), headers);
  }
  // The body of an answer with status 200.
  json completion(const json& body) const {
    const Answer answer = post("/v1/completions", body);
    EXPECT_EQ(answer.status, 200) << answer.body;
    return answer.status == 200 ? json::parse(answer.body) : json();
  }
  std::string metric(const std::string& name) const {
    const std::string all = get("/metrics").body;
    const size_t at = all.find("\n" + name + " ");
    return at == std::string::npos
               ? "absent"
               : all.substr(at + name.size() + 2, all.find('\n', at + 1) - at - name.size() - 2);
  }
  Process& process() { return process_; }
  uint16_t port = 0;

 private:
  std::string log_name() {
    static int count = 0;
    if (name_.empty()) name_ = fmt::format("log{}", count++);
    return name_;
  }
  std::string name_;
  Process process_;
};

// One server for the tests that leave nothing behind.
const Server& shared_server() {
  static const Server server;
  return server;
}

struct Events {
  std::vector<json> events;
  bool done = false;
};
Events events_of(const std::string& stream) {
  Events out;
  for (size_t at = 0; at < stream.size();) {
    const size_t end = stream.find("\n\n", at);
    EXPECT_EQ(stream.substr(at, 6), "data: ");
    if (end == std::string::npos) break;
    const std::string data = stream.substr(at + 6, end - at - 6);
    if (data == "[DONE]") out.done = true;
    else out.events.push_back(json::parse(data));
    at = end + 2;
  }
  return out;
}

TEST(Serve, CompletionHasOpenAIsFields) {
  const json body = shared_server().completion(
      {{"model", "model"}, {"prompt", "Where is"}, {"max_tokens", 7}, {"seed", 1}});
  EXPECT_EQ(body["object"], "text_completion");
  EXPECT_TRUE(body["id"].get<std::string>().starts_with("cmpl-"));
  EXPECT_EQ(body["model"], "model");
  EXPECT_GT(body["created"], 1'700'000'000);
  ASSERT_EQ(body["choices"].size(), 1u);
  EXPECT_EQ(body["choices"][0]["index"], 0);
  EXPECT_TRUE(body["choices"][0]["logprobs"].is_null());
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
  const auto prompt = tasks::small_tokenizer().encode("Where is");
  EXPECT_EQ(body["usage"], json({{"prompt_tokens", prompt.size()},
                                 {"completion_tokens", 7},
                                 {"total_tokens", prompt.size() + 7}}));
}

TEST(Serve, TextEqualsThatOfGenerate) {
  for (const std::string options : {"--seed 3", "--seed 4 --temperature 0.7 --top-p 0.9",
                                    "--seed 5 --top-k 3", "--temperature 0"}) {
    json request = {{"prompt", "The answer"}, {"max_tokens", 30}, {"seed", 3}};
    if (options.find("0.7") != std::string::npos)
      request.update({{"seed", 4}, {"temperature", 0.7}, {"top_p", 0.9}});
    if (options.find("top-k") != std::string::npos) request.update({{"seed", 5}, {"top_k", 3}});
    if (options == "--temperature 0") request.update({{"temperature", 0}});
    request["echo"] = true;
    const auto made = cli::run(
        folder().path(),
        "generate --model model --prompt 'The answer' --max-tokens 30 --device cpu --json " +
            options);
    ASSERT_EQ(made.exit_code, 0) << made.error;
    EXPECT_EQ(shared_server().completion(request)["choices"][0]["text"],
              json::parse(made.out)["samples"][0]["text"])
        << options;
  }
}

TEST(Serve, EchoWithLogprobsEqualsScore) {
  const std::string text =
      "Where is the blue house? It is in the garden. The answer to question 3 is number 10.";
  const auto ids = tasks::small_tokenizer().encode(text);
  write_file(folder() / "lines", json({{"text", text}}).dump() + "\n");
  const auto scored = cli::run(folder().path(), "score --model model lines --device cpu");
  ASSERT_EQ(scored.exit_code, 0) << scored.error;
  const json expected = json::parse(scored.out)["logprobs"];
  for (const int64_t max_tokens : {0, 1})
    for (const json& prompt : {json(text), json(ids)}) {
      const json body = shared_server().completion({{"prompt", prompt},
                                                    {"max_tokens", max_tokens},
                                                    {"echo", true},
                                                    {"logprobs", 1},
                                                    {"temperature", 0},
                                                    {"seed", 1}});
      const json& choice = body["choices"][0];
      const json& found = choice["logprobs"]["token_logprobs"];
      ASSERT_EQ(found.size(), ids.size() + size_t(max_tokens));
      EXPECT_TRUE(found[0].is_null());
      EXPECT_TRUE(choice["logprobs"]["top_logprobs"][0].is_null());
      for (size_t i = 1; i < ids.size(); ++i) {
        EXPECT_NEAR(found[i].get<double>(), expected[i].get<double>(), 2e-5) << i;
        const json& top = choice["logprobs"]["top_logprobs"][i];
        const std::string name = choice["logprobs"]["tokens"][i];
        EXPECT_EQ(top.at(name), found[i]);
        for (const auto& [other, logprob] : top.items()) EXPECT_GE(logprob, found[i]) << other;
      }
      EXPECT_TRUE(choice["text"].get<std::string>().starts_with(text));
      std::string joined;
      for (size_t i = 0; i < ids.size(); ++i) {
        EXPECT_EQ(choice["logprobs"]["text_offset"][i].get<size_t>(),
                  i == 0 ? 0 : joined.size() - 1);
        joined += choice["logprobs"]["tokens"][i].get<std::string>();
      }
      EXPECT_EQ(joined, " " + text);
    }
}

TEST(Serve, SamplesHaveTheSeedsOfSingleRequests) {
  const json all = shared_server().completion(
      {{"prompt", {"Where", "The answer"}}, {"n", 3}, {"seed", 20}, {"max_tokens", 12}});
  ASSERT_EQ(all["choices"].size(), 6u);
  for (int p = 0; p < 2; ++p)
    for (int i = 0; i < 3; ++i) {
      const json one = shared_server().completion(
          {{"prompt", p ? "The answer" : "Where"}, {"seed", 20 + i}, {"max_tokens", 12}});
      EXPECT_EQ(all["choices"][size_t(3 * p + i)]["text"], one["choices"][0]["text"]);
      EXPECT_EQ(all["choices"][size_t(3 * p + i)]["index"], 3 * p + i);
    }
  const auto unseeded = [] {
    return shared_server().completion(
        {{"prompt", "Where"}, {"max_tokens", 20}})["choices"][0]["text"];
  };
  EXPECT_NE(unseeded(), unseeded());
}

TEST(Serve, StopStringsEndTheText) {
  const json request = {{"prompt", "The"}, {"max_tokens", 60}, {"seed", 9}};
  const std::string whole = shared_server().completion(request)["choices"][0]["text"];
  for (size_t begin = 5; begin + 4 < whole.size(); begin += 3) {
    if ((whole[begin] & 0xC0) == 0x80 || (whole[begin + 4] & 0xC0) == 0x80)
      continue;  // inside a character
    const std::string stop = whole.substr(begin, 4);
    if (stop.find("\uFFFD") != std::string::npos) continue;
    json stopped = request;
    stopped["stop"] = json::array({"not there", stop});
    stopped["logprobs"] = 0;
    const json choice = shared_server().completion(stopped)["choices"][0];
    EXPECT_EQ(choice["text"], json(whole.substr(0, whole.find(stop)))) << stop;
    EXPECT_EQ(choice["finish_reason"], "stop");
    stopped["stream"] = true;
    std::string streamed;
    for (const json& event :
         events_of(shared_server().post("/v1/completions", stopped).body).events)
      streamed += event["choices"][0]["text"].get<std::string>();
    EXPECT_EQ(streamed, whole.substr(0, whole.find(stop))) << stop;
  }
}

TEST(Serve, StreamEqualsTheWholeAnswer) {
  for (const bool echo : {false, true}) {
    json request = {{"prompt", {"Where is", "It"}},
                    {"max_tokens", 25},
                    {"seed", 2},
                    {"n", 2},
                    {"logprobs", 2},
                    {"echo", echo}};
    const json whole = shared_server().completion(request);
    request.update({{"stream", true}, {"stream_options", {{"include_usage", true}}}});
    const Answer answer = shared_server().post("/v1/completions", request);
    EXPECT_EQ(answer.headers.at("content-type"), "text/event-stream");
    Events stream = events_of(answer.body);
    EXPECT_TRUE(stream.done);
    EXPECT_GT(stream.events.size(), 20u);
    EXPECT_EQ(stream.events.back()["usage"], whole["usage"]);
    stream.events.pop_back();
    for (size_t i = 0; i < 4; ++i) {
      std::string text;
      json tokens = json::array(), logprobs = json::array(), top = json::array(),
           offsets = json::array(), reason;
      for (const json& event : stream.events) {
        const json& choice = event["choices"][0];
        if (choice["index"] != i) continue;
        EXPECT_TRUE(reason.is_null());
        reason = choice["finish_reason"];
        text += choice["text"].get<std::string>();
        const auto add = [&](json& list, const char* name) {
          for (const json& entry : choice["logprobs"][name]) list.push_back(entry);
        };
        add(tokens, "tokens");
        add(logprobs, "token_logprobs");
        add(top, "top_logprobs");
        add(offsets, "text_offset");
      }
      const json& expected = whole["choices"][i];
      EXPECT_EQ(json(text), expected["text"]);
      EXPECT_EQ(reason, expected["finish_reason"]);
      EXPECT_EQ(json({{"tokens", tokens},
                      {"token_logprobs", logprobs},
                      {"top_logprobs", top},
                      {"text_offset", offsets}}),
                expected["logprobs"]);
    }
  }
}

TEST(Serve, TokenizerRoutesAgree) {
  const std::string text = "Where is the blue house?";
  const auto ids = tasks::small_tokenizer().encode(text);
  const json tokens = json::parse(
      shared_server().post("/tokenize", {{"prompt", text}, {"add_special_tokens", false}}).body);
  EXPECT_EQ(tokens["tokens"], json(ids));
  EXPECT_EQ(tokens["count"], ids.size());
  EXPECT_EQ(json::parse(shared_server().post("/detokenize", {{"tokens", ids}}).body)["prompt"],
            json(text));
  const json info = json::parse(shared_server().get("/tokenizer_info").body);
  EXPECT_EQ(info["eos_token"], "</s>");
  EXPECT_EQ(info["vocab_size"], 340);
  EXPECT_EQ(json::parse(shared_server().post("/tokenize", {{"prompt", "</s>"}}).body)["tokens"],
            json::array({2}));
  const json models = json::parse(shared_server().get("/v1/models").body);
  EXPECT_EQ(models["data"][0]["id"], "model");
  EXPECT_EQ(models["data"][0]["max_model_len"], kPositions);
}

TEST(Serve, BadRequestsGetOpenAIsErrors) {
  struct Case {
    json request;
    std::string param, words;
  };
  const std::vector<std::string> many(10'000, "stop");
  const std::vector<Case> cases = {
      {{{"prompt", "a"}, {"max_tokens", -1}}, "max_tokens", "0"},
      {{{"prompt", "a"}, {"max_tokens", "7"}}, "max_tokens", "integer"},
      {{{"prompt", "a"}, {"max_tokens", 1.5}}, "max_tokens", "integer"},
      {{{"prompt", "a"}, {"max_token", 1}}, "max_token", "did you mean 'max_tokens'"},
      {{{"prompt", "a"}, {"temperature", -1}}, "", "temperature"},
      {{{"prompt", "a"}, {"temperature", "hot"}}, "temperature", "number"},
      {{{"prompt", "a"}, {"top_p", 0}}, "", "top_p"},
      {{{"prompt", "a"}, {"n", 0}}, "n", "1 to 128"},
      {{{"prompt", "a"}, {"n", 1000}}, "n", "1 to 128"},
      {{{"prompt", std::vector<std::string>(100, "a")}, {"n", 100}}, "n", "10000 choices"},
      {{{"prompt", std::vector<std::string>(5000, "a")}}, "prompt", "5000 prompts"},
      {{{"prompt", "a"}, {"logprobs", 100}}, "logprobs", "20"},
      {{{"prompt", "a"}, {"stop", many}}, "stop", "10000 strings"},
      {{{"prompt", "a"}, {"stop", {"a", 3}}}, "stop", "3"},
      {{{"prompt", "a"}, {"stop", ""}}, "stop", "0 bytes"},
      {{{"prompt", "a"}, {"stop", std::string(5000, 'x')}}, "stop", "5000 bytes"},
      {{{"prompt", "a"}, {"best_of", 4}}, "best_of", "supports only"},
      {{{"prompt", "a"}, {"suffix", "b"}}, "suffix", "supports only"},
      {{{"prompt", "a"}, {"stream_options", {{"include_usage", true}}}},
       "stream_options",
       "stream"},
      {{{"prompt", json::array()}}, "prompt", "expected a string"},
      {{{"prompt", json::array({json::array()})}}, "prompt", "empty"},
      {{{"prompt", {1, "a"}}}, "prompt", "\"a\""},
      {{{"prompt", {"a", 1}}}, "prompt", "1"},
      {{{"prompt", {1, 340}}}, "prompt", "token 340 is outside the model's vocabulary of 340"},
      {{{"prompt", {-1}}}, "prompt", "token -1"},
      {{{"prompt", {18446744073709551615u}}}, "prompt", "outside"},
      {{{"prompt", {1.5}}}, "prompt", "1.5"},
      {{{"prompt", {{"a", 1}}}}, "prompt", "expected"},
      {{{"prompt", std::vector<int>(595, 5)}, {"max_tokens", 7}},
       "prompt",
       "maximum context length is 600"}};
  for (const auto& [request, param, words] : cases) {
    const Answer answer = shared_server().post("/v1/completions", request);
    EXPECT_EQ(answer.status, 400) << request.dump().substr(0, 200);
    const json error = json::parse(answer.body)["error"];
    EXPECT_EQ(error["type"], "invalid_request_error");
    EXPECT_EQ(error["param"].is_null() ? "" : error["param"].get<std::string>(), param);
    EXPECT_NE(error["message"].get<std::string>().find(words), std::string::npos)
        << error["message"];
    EXPECT_LE(error["message"].get<std::string>().size(), 400u);
  }
  for (const std::string body :
       {"", "{", "[1]", "{\"prompt\": \"\\ud800\"}", "{\"prompt\": \"\xff\"}", "nul"}) {
    const Answer answer = Client(shared_server().port).request("POST", "/v1/completions", body);
    EXPECT_EQ(answer.status, 400) << body;
    EXPECT_TRUE(json::accept(answer.body));
  }
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  EXPECT_EQ(Client(shared_server().port)
                .request("POST", "/v1/completions", "{\"prompt\": " + deep + "}")
                .status,
            400);
  EXPECT_EQ(shared_server().completion(
                {{"prompt", std::vector<int>(594, 5)}, {"max_tokens", 7}})["usage"]["total_tokens"],
            601);
}

TEST(Serve, UnknownPathsMethodsAndModelsAreNamed) {
  const auto error = [](const Answer& answer, int status) {
    EXPECT_EQ(answer.status, status);
    return json::parse(answer.body)["error"]["message"].get<std::string>();
  };
  EXPECT_NE(
      error(shared_server().get("/v1/completion"), 404).find("did you mean '/v1/completions'"),
      std::string::npos);
  EXPECT_NE(error(shared_server().get("/v1/completions"), 405).find("POST"), std::string::npos);
  EXPECT_NE(error(shared_server().post("/v1/completions", {{"model", "gpt"}, {"prompt", "a"}}), 404)
                .find("has 'model'"),
            std::string::npos);
}

TEST(Serve, AHundredMegabytesOfJsonAreRefused) {
  std::string body = "{\"prompt\": [1";
  body.reserve(101 << 20);
  while (body.size() < (100 << 20)) body += ",1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16";
  const Answer answer =
      Client(shared_server().port).request("POST", "/v1/completions", body + "]}");
  EXPECT_EQ(answer.status, 413);
  EXPECT_TRUE(json::parse(answer.body).contains("error"));
  EXPECT_EQ(shared_server().get("/health").status, 200);
}

TEST(Serve, PageNeedsNothingElse) {
  const Answer page = shared_server().get("/");
  EXPECT_EQ(page.status, 200);
  EXPECT_TRUE(page.headers.at("content-type").starts_with("text/html"));
  EXPECT_EQ(page.body.find("http://"), std::string::npos);
  EXPECT_EQ(page.body.find("https://"), std::string::npos);
  EXPECT_EQ(page.body.find("src="), std::string::npos);
}

TEST(Serve, ModelWithoutTokenizerTakesTokens) {
  Server server("--name numbers", "bare");
  const json body = server.completion({{"model", "numbers"},
                                       {"prompt", {5, 6, 7}},
                                       {"max_tokens", 4},
                                       {"seed", 1},
                                       {"logprobs", 1}});
  EXPECT_EQ(body["choices"][0]["text"], "");
  ASSERT_EQ(body["choices"][0]["token_ids"].size(), 4u);
  EXPECT_EQ(body["choices"][0]["logprobs"]["tokens"][0],
            json("token_id:" + body["choices"][0]["token_ids"][0].dump()));
  const auto made =
      cli::run(folder().path(),
               "generate --model bare --tokens 5,6,7 --max-tokens 4 --seed 1 --device cpu --json");
  EXPECT_EQ(body["choices"][0]["token_ids"], json::parse(made.out)["samples"][0]["tokens"]);
  const Events stream =
      events_of(server
                    .post("/v1/completions",
                          {{"prompt", {5, 6, 7}}, {"max_tokens", 4}, {"seed", 1}, {"stream", true}})
                    .body);
  json streamed = json::array();
  for (const json& event : stream.events)
    for (const json& token : event["choices"][0]["token_ids"]) streamed.push_back(token);
  EXPECT_EQ(streamed, body["choices"][0]["token_ids"]);
  for (const auto& [path, request] :
       {std::pair<std::string, json>{"/v1/completions", {{"prompt", "text"}}},
        {"/v1/completions", {{"prompt", {1}}, {"stop", "x"}}},
        {"/tokenize", {{"prompt", "text"}}}}) {
    const Answer answer = server.post(path, request);
    EXPECT_EQ(answer.status, 400);
    EXPECT_NE(answer.body.find("has no tokenizer"), std::string::npos) << answer.body;
  }
}

TEST(Serve, AnApiKeyIsNeeded) {
  Server server("--api-key secret");
  const json request = {{"prompt", "a"}, {"max_tokens", 1}};
  EXPECT_EQ(server.post("/v1/completions", request).status, 401);
  EXPECT_EQ(server.post("/v1/completions", request, "Authorization: Bearer wrong\r\n").status, 401);
  EXPECT_EQ(server.get("/metrics").status, 401);
  EXPECT_EQ(server.get("/health").status, 200);
  EXPECT_EQ(server.get("/").status, 200);
  EXPECT_EQ(server.post("/v1/completions", request, "Authorization: Bearer secret\r\n").status,
            200);
}

TEST(Serve, FullQueueGets429) {
  Server server("--slots 1 --queue 1");
  const json endless = {
      {"prompt", "a"}, {"max_tokens", 590}, {"ignore_eos", true}, {"stream", true}};
  Client working(server.port), waiting(server.port);
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

TEST(Serve, ClientsThatDisconnectFreeTheirPlaces) {
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

TEST(Serve, PrefixCacheDoesNotChangeAnswers) {
  Server cached("--prefill 16"), uncached("--prefill 16 --prefix-cache 0");
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

TEST(Serve, SigtermFinishesOpenRequests) {
  Server server;
  Client idle(server.port), open(server.port);
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
  EXPECT_NE(outcome.error.find("1 requests are open"), std::string::npos) << outcome.error;
  EXPECT_FALSE(Client(server.port).connected());
}

TEST(Serve, DrainEndsAtItsLimit) {
  Server server("--drain 0.3 --slots 1");
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 12; ++i) {
    clients.push_back(std::make_unique<Client>(server.port));
    clients.back()->send_request(
        "POST", "/v1/completions",
        json({{"prompt", "a"}, {"max_tokens", 590}, {"n", 100}, {"ignore_eos", true}}).dump());
  }
  while (server.metric("assay_sequences_decoding") != "1") {
  }
  server.process().signal(SIGTERM);
  const cli::Outcome outcome = server.process().wait();
  EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
  EXPECT_NE(outcome.error.find("cut off after 0.3 seconds"), std::string::npos) << outcome.error;
}

TEST(Serve, HealthIs503WhileTheModelIsLoaded) {
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

TEST(Serve, BadStartsAreExplained) {
  const auto expect = [](int code, const std::string& arguments, const std::string& words) {
    const cli::Outcome outcome = cli::run(folder().path(), "serve " + arguments);
    EXPECT_EQ(outcome.exit_code, code) << arguments << outcome.error;
    EXPECT_NE(outcome.error.find(words), std::string::npos) << outcome.error;
  };
  expect(2, fmt::format("model --port {}", shared_server().port), "Address already in use");
  expect(2, "absent --port 0", "no such model");
  expect(2, "model --port 0 --max-context 10000", "the model reads at most 600 tokens");
  expect(2, "model --port 70000", "70000");
  expect(2, "model --port 0 --slots 0", "--slots");
  expect(2, "model --port 0 --host nowhere", "not an IP address");
  expect(2, "", "MODEL");
}

// Mixed requests from many clients at the same time; every answer equals that of a request alone.
TEST(Serve, ManyClientsGetTheAnswersOfRequestsAlone) {
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
