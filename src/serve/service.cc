#include "serve/service.h"

#include <torch/torch.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/error.h"
#include "base/files.h"
#include "base/interrupt.h"
#include "serve/completion.h"
#include "serve/page.h"

namespace assay::serve {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr const char* kJson = "application/json";

std::string dump(const json& document) {
  return document.dump(-1, ' ', false, json::error_handler_t::replace);
}

void report(const std::string& message) {
  std::fputs(fmt::format("assay: {}\n", message).c_str(), stderr);
}

// %2F → /; what is not two hexadecimal digits after a % stays as it is.
std::string percent_decoded(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const std::string_view digits = text.substr(i + 1, 2);
    unsigned byte = 0;
    const auto [end, error] = std::from_chars(digits.begin(), digits.end(), byte, 16);
    const bool coded = text[i] == '%' && digits.size() == 2 && end == digits.end();
    out += coded ? char(byte) : text[i];
    if (coded) i += 2;
  }
  return out;
}

// "Bearer KEY" → KEY; the name of the scheme may be in lower case. "" for another scheme.
std::string bearer_token(const std::string& authorization) {
  constexpr std::string_view kScheme = "bearer ";
  std::string scheme = authorization.substr(0, kScheme.size());
  std::ranges::transform(scheme, scheme.begin(), [](unsigned char c) { return std::tolower(c); });
  return scheme == kScheme ? authorization.substr(kScheme.size()) : "";
}

// Requests of a supervisor must not wait for the text of other requests.
HttpOptions with_quick_paths(HttpOptions options) {
  options.quick_paths = {"/health", "/metrics"};
  return options;
}

class Service {
 public:
  explicit Service(const ServiceOptions& options)
      : options_(options),
        key_hash_(options.api_key.empty() ? "" : sha256(options.api_key)),
        http_(
            with_quick_paths(options.http),
            [this](HttpRequest request, std::shared_ptr<Reply> reply) {
              handle(request, std::move(reply));
            },
            [](int status, const std::string& message) { return error_body(status, message); }) {}

  void run(const std::function<std::unique_ptr<ServedModel>()>& load,
           const std::function<void(uint16_t port)>& listening) {
    std::thread model_thread([&] { load_and_work(load); });
    try {
      listening(http_.port());
      http_.run([this] { tick(); });
    } catch (...) {
      stop_model();
      model_thread.join();
      throw;
    }
    stop_model();
    model_thread.join();
    if (error_) std::rethrow_exception(error_);
  }

 private:
  struct Route {
    const char* method;
    const char* path;
    bool is_public;
    bool needs_model;
    void (Service::*answer)(const HttpRequest&, const std::shared_ptr<Reply>&);
  };
  static const std::vector<Route>& routes() {
    static const std::vector<Route> all = {
        {"GET", "/", true, false, &Service::page},
        {"GET", "/health", true, false, &Service::health},
        {"GET", "/metrics", false, false, &Service::metrics},
        {"GET", "/v1/models", false, true, &Service::models},
        {"GET", "/v1/models/", false, true, &Service::model_by_name},
        {"GET", "/tokenizer_info", false, true, &Service::tokenizer_information},
        {"POST", "/tokenize", false, true, &Service::tokens_of_text},
        {"POST", "/detokenize", false, true, &Service::text_of_tokens},
        {"POST", "/v1/completions", false, true, &Service::completions},
    };
    return all;
  }

  // A path that ends in / is followed by the name of a model.
  static bool matches(const Route& route, std::string_view path) {
    const std::string_view known = route.path;
    return path == known || (known.size() > 1 && known.ends_with('/') && path.starts_with(known));
  }

  // The model's thread: loads it, and then is the scheduler.
  void load_and_work(const std::function<std::unique_ptr<ServedModel>()>& load) {
    try {
      std::shared_ptr<ServedModel> model = load();
      auto scheduler = std::make_shared<Scheduler>(*model->model, options_.scheduler, metrics_);
      {
        const std::lock_guard lock(mutex_);
        model_ = std::move(model);
        scheduler_ = scheduler;
        if (stopping_) return;
      }
      scheduler->run();
    } catch (...) {
      error_ = std::current_exception();
      http_.stop();
    }
  }

  void stop_model() {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (scheduler_) scheduler_->stop();
  }

  // Ten times per second: begins and ends the drain. When its time is over, open requests are
  // answered with status 503; clients have one second to read it.
  void tick() {
    if (!interrupted()) return;
    if (!drain_began_) {
      drain_began_ = Clock::now();
      draining_ = true;
      http_.stop_accepting();
      report(fmt::format("stopping; waiting for {}",
                         counted(int64_t(http_.open_requests()), "open request")));
      return;
    }
    const double waited = std::chrono::duration<double>(Clock::now() - *drain_began_).count();
    const bool open = http_.open_requests() > 0;
    if (open && waited < options_.drain_seconds) return;
    if (open && !cut_off_) {
      cut_off_ = true;
      report(fmt::format("{} requests were cut off after {} seconds", http_.open_requests(),
                         options_.drain_seconds));
      stop_model();
    }
    if (open && waited < options_.drain_seconds + 1) return;
    http_.stop();
  }

  std::shared_ptr<ServedModel> model() const {
    const std::lock_guard lock(mutex_);
    return model_;
  }

  void handle(const HttpRequest& request, const std::shared_ptr<Reply>& reply) {
    const auto refuse = [&](const ApiError& error) {
      send(request.path, reply, error.status, kJson,
           error_body(error.status, error.message, error.param, error.code), error.allow);
    };
    try {
      const Route& route = route_of(request);
      if (!route.is_public) check_key(request);
      if (route.needs_model && !model())
        throw ApiError(503, "the model is being loaded", "", "loading");
      (this->*route.answer)(request, reply);
    } catch (const ApiError& error) {
      refuse(error);
    } catch (const BadInput& error) {
      refuse(ApiError(400, error.what()));
    } catch (const std::bad_alloc&) {
      refuse(ApiError(500, "out of memory"));
    } catch (const std::exception& error) {
      refuse(ApiError(500, error.what()));
    }
  }

  static const Route& route_of(const HttpRequest& request) {
    std::vector<std::string> paths;
    std::string methods;
    for (const Route& route : routes()) {
      paths.push_back(route.path);
      if (!matches(route, request.path)) continue;
      if (request.method == route.method) return route;
      methods = route.method;
    }
    if (!methods.empty()) {
      ApiError error(405, fmt::format("{} takes {}, not {}", valid_utf8(request.path), methods,
                                      request.method));
      error.allow = methods == "GET" ? "GET, HEAD" : methods;
      throw error;
    }
    const std::string nearest = did_you_mean(request.path, paths);
    throw ApiError(404, fmt::format("there is no '{}'{} The paths are {}", valid_utf8(request.path),
                                    nearest.empty() ? "." : nearest, join(paths)));
  }

  // Hashes are compared, so that the time of the comparison says nothing about the key.
  void check_key(const HttpRequest& request) const {
    if (key_hash_.empty() || sha256(bearer_token(request.authorization)) == key_hash_) return;
    throw ApiError(401,
                   request.authorization.empty()
                       ? "an API key is needed: send the header 'Authorization: Bearer KEY'"
                       : "the API key is wrong",
                   "", "invalid_api_key");
  }

  void send(const std::string& path, const std::shared_ptr<Reply>& reply, int status,
            const char* type, std::string body, const std::string& allow = "") {
    count(path, status);
    reply->send(status, type, std::move(body), allow);
  }
  // Paths that do not exist are counted together, because a client could name any number.
  void count(const std::string& path, int status) {
    const auto route =
        std::ranges::find_if(routes(), [&](const Route& known) { return matches(known, path); });
    metrics_.count_request(route == routes().end() ? "other" : route->path, status);
  }
  void send_json(const HttpRequest& request, const std::shared_ptr<Reply>& reply,
                 const json& document) {
    send(request.path, reply, 200, kJson, dump(document));
  }

  void page(const HttpRequest& request, const std::shared_ptr<Reply>& reply) {
    send(request.path, reply, 200, "text/html; charset=utf-8", kPage);
  }
  void health(const HttpRequest& request, const std::shared_ptr<Reply>& reply) {
    const char* status = draining_ ? "stopping" : model() ? "ok" : "loading";
    send(request.path, reply, draining_ || !model() ? 503 : 200, kJson, dump({{"status", status}}));
  }
  void metrics(const HttpRequest& request, const std::shared_ptr<Reply>& reply) {
    send(request.path, reply, 200, "text/plain; version=0.0.4", metrics_.prometheus());
  }
  void models(const HttpRequest& request, const std::shared_ptr<Reply>& reply) {
    send_json(request, reply, {{"object", "list"}, {"data", json::array({model_card(*model())})}});
  }
  void model_by_name(const HttpRequest& request, const std::shared_ptr<Reply>& reply) {
    check_model_name(percent_decoded(request.path.substr(std::strlen("/v1/models/"))), *model());
    send_json(request, reply, model_card(*model()));
  }
  void tokenizer_information(const HttpRequest& request, const std::shared_ptr<Reply>& reply) {
    send_json(request, reply, tokenizer_info(*model()));
  }
  void tokens_of_text(const HttpRequest& request, const std::shared_ptr<Reply>& reply) {
    send_json(request, reply, tokenize(parse_body(request.body), *model()));
  }
  void text_of_tokens(const HttpRequest& request, const std::shared_ptr<Reply>& reply) {
    send_json(request, reply, detokenize(parse_body(request.body), *model()));
  }
  void completions(const HttpRequest& request, const std::shared_ptr<Reply>& reply) {
    if (draining_) throw ApiError(503, "the server is stopping", "", "stopping");
    const std::shared_ptr<ServedModel> served = model();
    const auto completion = std::make_shared<Completion>(
        parse_completion(parse_body(request.body), *served), served, reply,
        Completion::Surroundings{
            .later =
                [this](std::function<void()> work) { http_.on_handler_thread(std::move(work)); },
            .answered = [this](int status) { count("/v1/completions", status); }});
    if (!scheduler_->submit(completion))
      throw ApiError(
          429, fmt::format("{} requests are waiting, the limit of this server; try again later",
                           options_.scheduler.queue));
  }

  const ServiceOptions options_;
  const std::string key_hash_;
  Metrics metrics_;
  HttpServer http_;
  mutable std::mutex mutex_;
  std::shared_ptr<ServedModel> model_;    // null while it is being loaded
  std::shared_ptr<Scheduler> scheduler_;  // set with model_
  bool stopping_ = false;
  std::exception_ptr error_;
  std::atomic<bool> draining_ = false;
  std::optional<Clock::time_point> drain_began_;
  bool cut_off_ = false;
};

}  // namespace

void run_service(const ServiceOptions& options,
                 const std::function<std::unique_ptr<ServedModel>()>& load,
                 const std::function<void(uint16_t port)>& listening) {
  Service(options).run(load, listening);
}

}  // namespace assay::serve
