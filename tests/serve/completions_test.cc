// POST /v1/completions: fields, texts, probabilities and streams.
#include <torch/torch.h>

#include "serve/text.h"
#include "server.h"

namespace assay::serve {
namespace {

TEST(Completions, CompletionHasOpenAIsFields) {
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

TEST(Completions, TextEqualsThatOfGenerate) {
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

TEST(Completions, EchoWithLogprobsEqualsScore) {
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
        EXPECT_EQ(choice["logprobs"]["text_offset"][i].get<size_t>(), joined.size());
        joined += choice["logprobs"]["tokens"][i].get<std::string>();
      }
      EXPECT_EQ(joined, text);
    }
}

TEST(Completions, SamplesHaveTheSeedsOfSingleRequests) {
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

TEST(Completions, StopStringsEndTheText) {
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

// A stop string drops tokens, so a stream may send a token only when its text is certain.
TEST(Completions, StreamsHaveTheTokensOfTheWholeAnswerWithStopStrings) {
  json request = {{"prompt", "The"}, {"max_tokens", 60}, {"seed", 9}, {"logprobs", 0}};
  const std::string text = shared_server().completion(request)["choices"][0]["text"];
  for (size_t begin = 5; begin + 7 < text.size(); begin += 5) {
    const std::string stop = text.substr(begin, 7);
    if (valid_utf8(stop) != stop || stop.find("\uFFFD") != std::string::npos) continue;
    json stopped = request;
    stopped["stop"] = stop;
    const json whole = shared_server().completion(stopped)["choices"][0]["logprobs"];
    stopped["stream"] = true;
    const Answer answer = shared_server().post("/v1/completions", stopped);
    json tokens = json::array();
    json offsets = json::array();
    for (const json& event : events_of(answer.body).events) {
      const json& part = event["choices"][0]["logprobs"];
      for (const json& token : part["tokens"]) tokens.push_back(token);
      for (const json& offset : part["text_offset"]) offsets.push_back(offset);
    }
    EXPECT_EQ(tokens, whole["tokens"]) << stop;
    EXPECT_EQ(offsets, whole["text_offset"]) << stop;
  }
}

TEST(Completions, StreamEqualsTheWholeAnswer) {
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
      json tokens = json::array();
      json logprobs = json::array();
      json top = json::array();
      json offsets = json::array();
      json reason;
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

TEST(Completions, ModelWithoutTokenizerTakesTokens) {
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

}  // namespace
}  // namespace assay::serve
