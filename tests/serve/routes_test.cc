// The other routes, and requests that are refused.
#include <torch/torch.h>

#include "server.h"

namespace assay::serve {
namespace {

TEST(Routes, TokenizerRoutesAgree) {
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

TEST(Routes, ModelIsFoundByItsName) {
  const Server server("--name my/model");
  for (const std::string name : {"my/model", "my%2Fmodel", "my%2fmodel"}) {
    const Answer answer = server.get("/v1/models/" + name);
    EXPECT_EQ(answer.status, 200) << name;
    EXPECT_EQ(json::parse(answer.body)["id"], "my/model");
  }
  for (const std::string name : {"", "my", "my%2Gmodel", "my%2", "%ff"}) {
    const Answer answer = server.get("/v1/models/" + name);
    EXPECT_EQ(answer.status, 404) << name;
    EXPECT_EQ(json::parse(answer.body)["error"]["code"], "model_not_found");
  }
  EXPECT_EQ(server.post("/v1/models/my", {}).status, 405);
}

TEST(Routes, PageNeedsNothingElse) {
  const Answer page = shared_server().get("/");
  EXPECT_EQ(page.status, 200);
  EXPECT_TRUE(page.headers.at("content-type").starts_with("text/html"));
  EXPECT_EQ(page.body.find("http://"), std::string::npos);
  EXPECT_EQ(page.body.find("https://"), std::string::npos);
  EXPECT_EQ(page.body.find("src="), std::string::npos);
}

TEST(Routes, BadRequestsGetOpenAIsErrors) {
  struct Case {
    json request;
    std::string param;
    std::string words;
  };
  const std::vector<std::string> many(10'000, "stop");
  const std::vector<Case> cases = {
      {{{"prompt", "a"}, {"max_tokens", -1}}, "max_tokens", "0"},
      {{{"prompt", "a"}, {"max_tokens", "7"}}, "max_tokens", "integer"},
      {{{"prompt", "a"}, {"max_tokens", 1.5}}, "max_tokens", "integer"},
      {{{"prompt", "a"}, {"max_token", 1}}, "max_token", "did you mean 'max_tokens'"},
      {{{"prompt", "a"}, {"temperature", -1}}, "temperature", "temperature"},
      {{{"prompt", "a"}, {"temperature", "hot"}}, "temperature", "number"},
      {{{"prompt", "a"}, {"top_p", 0}}, "top_p", "top_p"},
      {{{"prompt", "a"}, {"n", 0}}, "n", "1 to 128"},
      {{{"prompt", "a"}, {"n", 1000}}, "n", "1 to 128"},
      {{{"prompt", std::vector<std::string>(100, "a")}, {"n", 100}}, "n", "10000 choices"},
      {{{"prompt", std::vector<std::string>(5000, "a")}}, "prompt", "5000 prompts"},
      {{{"prompt", "a"}, {"logprobs", 100}}, "logprobs", "20"},
      {{{"prompt", std::vector<std::string>(16, "a")},
        {"n", 128},
        {"max_tokens", 500},
        {"logprobs", 20}},
       "logprobs",
       "could have 21504000 log-probabilities"},
      {{{"prompt", "a"}, {"stop", many}}, "stop", "10000 strings"},
      {{{"prompt", "a"}, {"stop", {"a", 3}}}, "stop", "3"},
      {{{"prompt", "a"}, {"stop", ""}}, "stop", "0 bytes"},
      {{{"prompt", "a"}, {"stop", std::string(5000, 'x')}}, "stop", "5000 bytes"},
      {{{"prompt", "a"}, {"best_of", 4}}, "best_of", "'best_of' = 4 is not supported"},
      {{{"prompt", "a"}, {"suffix", "b"}}, "suffix", "is not supported; leave it out"},
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
  EXPECT_EQ(shared_server().completion(
                {{"prompt", std::vector<int>(601, 5)}, {"max_tokens", 0}})["usage"]["total_tokens"],
            601);
}

TEST(Routes, UnsupportedFieldsAreNotSuggested) {
  const Answer answer = shared_server().post("/v1/completions", {{"prompt", "a"}, {"sufix", "b"}});
  EXPECT_EQ(answer.status, 400);
  EXPECT_EQ(answer.body.find("'suffix'"), std::string::npos) << answer.body;
}

TEST(Routes, MessagesHoldWhatFollowsANulByte) {
  const Answer answer =
      shared_server().post("/v1/completions", {{"prompt", "a"}, {std::string("a\0b", 3), 1}});
  EXPECT_EQ(json::parse(answer.body)["error"]["message"], std::string("unknown field 'a\0b'", 19));
}

TEST(Routes, UnknownPathsMethodsAndModelsAreNamed) {
  const auto error = [](const Answer& answer, int status) {
    EXPECT_EQ(answer.status, status);
    return json::parse(answer.body)["error"]["message"].get<std::string>();
  };
  EXPECT_NE(
      error(shared_server().get("/v1/completion"), 404).find("did you mean '/v1/completions'"),
      std::string::npos);
  EXPECT_NE(error(shared_server().get("/nothing"), 404).find("there is no '/nothing'. The paths"),
            std::string::npos);
  const Answer broken =
      Client(shared_server().port).request("POST", "/v1/completions", "{\"prompt\": ");
  EXPECT_NE(error(broken, 400).find("the body is not JSON: parse error at line 1"),
            std::string::npos);
  const Answer wrong_method = shared_server().get("/v1/completions");
  EXPECT_NE(error(wrong_method, 405).find("POST"), std::string::npos);
  EXPECT_EQ(wrong_method.headers.at("allow"), "POST");
  EXPECT_EQ(shared_server().post("/health", {}).headers.at("allow"), "GET, HEAD");
  EXPECT_NE(error(shared_server().post("/v1/completions", {{"model", "gpt"}, {"prompt", "a"}}), 404)
                .find("has 'model'"),
            std::string::npos);
}

TEST(Routes, HeadIsAnsweredAsGetWithoutABody) {
  // Only the head is read, so a body would be taken for the next answer.
  Client client(shared_server().port);
  client.send_request("HEAD", "/health");
  EXPECT_EQ(client.read_head().status, 200);
  EXPECT_EQ(client.request("GET", "/health").body, "{\"status\":\"ok\"}");
}

TEST(Routes, LongNamesAreShortenedInMessages) {
  const std::string name(1 << 20, 'a');
  const Answer answer = shared_server().post("/v1/completions", {{name, 1}, {"prompt", "a"}});
  EXPECT_EQ(answer.status, 400);
  EXPECT_LT(answer.body.size(), 400u);
}

TEST(Routes, AHundredMegabytesOfJsonAreRefused) {
  std::string body = "{\"prompt\": [1";
  body.reserve(101 << 20);
  while (body.size() < (100 << 20)) body += ",1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16";
  const Answer answer =
      Client(shared_server().port).request("POST", "/v1/completions", body + "]}");
  EXPECT_EQ(answer.status, 413);
  EXPECT_TRUE(json::parse(answer.body).contains("error"));
  EXPECT_EQ(shared_server().get("/health").status, 200);
}

TEST(Routes, AnApiKeyIsNeeded) {
  Server server("--api-key secret");
  const json request = {{"prompt", "a"}, {"max_tokens", 1}};
  EXPECT_EQ(server.post("/v1/completions", request).status, 401);
  EXPECT_EQ(server.post("/v1/completions", request, "Authorization: Bearer wrong\r\n").status, 401);
  EXPECT_EQ(server.post("/v1/completions", request, "Authorization: Basic secret\r\n").status, 401);
  EXPECT_EQ(server.get("/metrics", "Authorization: bearer secret\r\n").status, 200);
  EXPECT_EQ(server.get("/metrics").status, 401);
  EXPECT_EQ(server.get("/health").status, 200);
  EXPECT_EQ(server.get("/").status, 200);
  EXPECT_EQ(server.post("/v1/completions", request, "Authorization: Bearer secret\r\n").status,
            200);
}

}  // namespace
}  // namespace assay::serve
