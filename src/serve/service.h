#pragma once
// `assay serve`: the routes of the server, and its life from loading to draining.
#include <functional>
#include <string>

#include "serve/api.h"
#include "serve/http.h"
#include "serve/scheduler.h"

namespace assay::serve {

struct ServiceOptions {
  HttpOptions http;
  SchedulerOptions scheduler;
  std::string api_key;        // empty: none is asked for
  double drain_seconds = 30;  // after SIGTERM, for answers that are not finished
};

// Serves until Ctrl-C or SIGTERM, and then until the requests that were accepted are answered, at
// most drain_seconds. `load` runs on a thread of its own while the server already answers /health
// with status 503; its error ends the server and is thrown. `listening` is told the port.
void run_service(const ServiceOptions& options,
                 const std::function<std::unique_ptr<ServedModel>()>& load,
                 const std::function<void(uint16_t port)>& listening);

}  // namespace assay::serve
