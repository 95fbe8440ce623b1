// assay serve MODEL [--port N]: an HTTP server with OpenAI's completions.
#include <torch/torch.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/model.h"
#include "exchange/model_files.h"
#include "serve/service.h"

namespace assay::cli {
namespace {

struct Options {
  ModelOptions model;
  serve::ServiceOptions service;
  std::string name;
  int64_t max_context = 0;
  int64_t slots = 0;
  int64_t piece = 0;
  int64_t cache_megabytes = 256;
  int64_t body_megabytes = 16;
};

constexpr int64_t kDefaultContext = 32768;  // for models that can read texts of any length

std::unique_ptr<serve::ServedModel> load(const Options& options) {
  TrainedModel opened(options.model);
  const int64_t longest = opened.model->max_time();
  int64_t context = std::min(longest, kDefaultContext);
  if (options.max_context > longest)
    fail("--max-context {}: the model reads at most {} tokens", options.max_context, longest);
  if (options.max_context > 0) context = options.max_context;
  auto served = std::make_unique<serve::ServedModel>(
      options.name, opened.model->spec.config.vocab_size, std::move(opened.tokenizer), context);
  served->model = opened.model;
  std::fputs(fmt::format("assay: {} is loaded\n", options.name).c_str(), stderr);
  return served;
}

// A decode step always computes all slots, so a CPU has fewer of them.
void set_defaults_of_device(Options& options) {
  const bool cuda = options.model.device != "cpu" &&
                    (options.model.device != "auto" || torch::cuda::is_available());
  options.service.scheduler.slots = options.slots > 0 ? options.slots : cuda ? 64 : 8;
  options.service.scheduler.piece = options.piece > 0 ? options.piece : cuda ? 1024 : 128;
  options.service.scheduler.batch_tokens = cuda ? 512 : 0;
  options.service.scheduler.cache_bytes = options.cache_megabytes << 20;
  options.service.http.largest_body = options.body_megabytes << 20;
}

void announce(const Options& options, uint16_t port) {
  const std::string host = options.service.http.host;
  const bool is_v6 = host.find(':') != std::string::npos;
  const std::string url = fmt::format("http://{}:{}", is_v6 ? "[" + host + "]" : host, port);
  print({{"url", url}, {"host", host}, {"port", port}, {"model", options.name}},
        fmt::format("listening on {}; loading {}\n", url, options.name));
  document_is_printed();
  std::fflush(stdout);
}

void run(Options& options, bool has_key) {
  if (has_key && options.service.api_key.empty())
    fail("--api-key is empty; leave it out to serve without a key");
  if (const char* key = std::getenv("ASSAY_API_KEY"); key && options.service.api_key.empty())
    options.service.api_key = key;
  if (options.name.empty())
    options.name = fs::absolute(options.model.model + "/").parent_path().filename();
  // Before the port is opened; the rest of the model is checked while it is loaded
  if (!fs::exists(options.model.model)) exchange::open_model(options.model.model);
  set_defaults_of_device(options);
  serve::run_service(
      options.service, [&] { return load(options); },
      [&](uint16_t port) { announce(options, port); });
}

void add(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* command =
      subcommand(app, "serve", "serve a model over HTTP with OpenAI's completions API",
                 {"serve run --port 8000"});
  add_model_options(*command, o->model, "MODEL");
  serve::ServiceOptions& s = o->service;
  s.http.port = 8000;
  command
      ->add_option("--host", s.http.host,
                   "address to listen on; 0.0.0.0: all addresses of this machine")
      ->capture_default_str();
  command->add_option("--port", s.http.port, "port; 0 takes a free port and prints it")
      ->capture_default_str()
      ->check(in_range(0, 65535));
  command->add_option("--name", o->name,
                      "name of the model in requests; default: that of its folder");
  CLI::Option* key = command->add_option(
      "--api-key", s.api_key,
      "key that requests must send; default: the environment variable ASSAY_API_KEY");
  command->add_option("--allow-origin", s.http.allowed_origins,
                      "origin whose web pages may use the server, such as http://localhost:3000; "
                      "several may be given; *: all");
  command
      ->add_option("--slots", o->slots,
                   "sequences decoded at the same time; default: 8, on CUDA 64")
      ->check(in_range(1, 4096));
  command->add_option("--queue", s.scheduler.queue, "requests that may wait; more get status 429")
      ->capture_default_str()
      ->check(in_range(0, 1000000));
  command
      ->add_option(
          "--max-context", o->max_context,
          "tokens of a prompt and its answer; default: what the model reads, at most 32768")
      ->check(in_range(1, 1 << 30));
  command
      ->add_option("--prefill", o->piece,
                   "tokens of prompts read between two decode steps; default: 128, on CUDA 1024")
      ->check(in_range(1, 1 << 20));
  command
      ->add_option("--prefix-cache", o->cache_megabytes,
                   "memory for the states of prompts, in MiB; 0: none")
      ->capture_default_str()
      ->check(in_range(0, 1 << 20));
  command->add_option("--max-body", o->body_megabytes, "largest request, in MiB")
      ->capture_default_str()
      ->check(in_range(1, 1024));
  command
      ->add_option("--timeout", s.http.timeout,
                   "seconds for a request to arrive, and for a client to read its answer")
      ->capture_default_str()
      ->check(positive_number());
  command->add_option("--drain", s.drain_seconds, "seconds for open requests after SIGTERM")
      ->capture_default_str()
      ->check(non_negative_number());
  command->callback([o, key] { run(*o, /*has_key=*/key->count() > 0); });
}
[[maybe_unused]] const bool registered = commands().add("serve", add);

}  // namespace
}  // namespace assay::cli
