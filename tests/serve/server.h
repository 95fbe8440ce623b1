#pragma once
// `assay serve` as a process, with a small model that the test writes. Include <torch/torch.h>
// first.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/program.h"
#include "client.h"
#include "exchange/model_files.h"
#include "nn/testing.h"
#include "tasks/tokenizer_of_test.h"

namespace assay::serve {

using cli::Process;
using nlohmann::json;

constexpr int64_t kPositions = 600;

// Folders with a model that has a tokenizer ("model") and one that has none ("bare").
inline const data::Folder& folder() {
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
inline const Server& shared_server() {
  static const Server server;
  return server;
}

struct Events {
  std::vector<json> events;
  bool done = false;
};
inline Events events_of(const std::string& stream) {
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

}  // namespace assay::serve
