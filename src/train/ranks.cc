#include "train/ranks.h"

#include <netdb.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <thread>

#include "base/build.h"
#include "base/error.h"
#include "train/device.h"
#include "train/peer_memory.h"

#define USE_C10D_GLOO
#ifdef ASSAY_CUDA
#define USE_C10D_NCCL
#include <c10/cuda/CUDAFunctions.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace assay::train {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::seconds;

// Rank 0 evaluates and saves while the others wait for it. Lost ranks are noticed by the thread.
constexpr seconds kLongestExchange{2 * 60 * 60};

const char* kFailure = "failure";  // "<exit code> <message>"
std::string key(const char* what, int64_t rank) { return fmt::format("{}/{}", what, rank); }

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? std::optional<std::string>(value) : std::nullopt;
}

int64_t number(const char* name) {
  const auto text = variable(name);
  if (!text) fail("the environment variable {} is missing; it says which rank this is", name);
  if (text->size() > 9 || text->find_first_not_of("0123456789") != std::string::npos)
    fail("the environment variable {} = '{}' is not a number of a rank or port", name, *text);
  return std::stoll(*text);
}
int64_t number_or(const char* name, int64_t otherwise) {
  return variable(name) ? number(name) : otherwise;
}

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

// The first line of `text` that is not in the same place in `expected`.
std::string first_difference(const std::string& text, const std::string& expected) {
  std::istringstream lines(text);
  std::istringstream others(expected);
  std::string line;
  std::string other;
  while (true) {
    const bool more = bool(std::getline(lines, line));
    const bool others_more = bool(std::getline(others, other));
    if (!more && !others_more) return "";
    if (!more) line = "nothing";
    if (!others_more) other = "nothing";
    if (line != other) return fmt::format("{} instead of {}", line, other);
  }
}

std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace

std::string first_host(const std::string& list) {
  const size_t open = list.find('[');
  if (open == std::string::npos || list.find(',') < open) return list.substr(0, list.find(','));
  const size_t close = list.find(']', open);
  const size_t end = list.find_first_of(",-]", open + 1);
  if (close == std::string::npos) fail("the list of Slurm's nodes '{}' cannot be read", list);
  return list.substr(0, open) + list.substr(open + 1, end - open - 1) +
         first_host(list.substr(close + 1));
}

int64_t tasks_of_node(const std::string& list, int64_t node) {
  for (size_t begin = 0; begin < list.size();) {
    int64_t tasks = 0;
    int64_t nodes = 1;
    const size_t end = std::min(list.find(',', begin), list.size());
    const int read =
        std::sscanf(list.substr(begin, end - begin).c_str(), "%ld(x%ld)", &tasks, &nodes);
    if (read < 1 || tasks < 1 || nodes < 1) break;
    if (node < nodes) return tasks;
    node -= nodes;
    begin = end + 1;
  }
  fail("Slurm's list of tasks per node '{}' cannot be read", list);
}

RankPlace place_from_environment() {
  RankPlace place{.launched = true};
  if (variable("RANK") && variable("WORLD_SIZE")) {
    place.rank = number("RANK");
    place.size = number("WORLD_SIZE");
    place.local_rank = number_or("LOCAL_RANK", 0);
    place.local_size = number_or("LOCAL_WORLD_SIZE", 1);
    place.served_outside = variable("TORCHELASTIC_USE_AGENT_STORE") == "True";
    place.attempt = variable("TORCHELASTIC_RESTART_COUNT").value_or("");
    place.listening = number_or("ASSAY_LISTENING_SOCKET", 0);
    if (place.listening == 0) place.listening = -1;
  } else if (number_or("SLURM_STEP_NUM_TASKS", 1) > 1) {
    place.rank = number("SLURM_PROCID");
    place.size = number("SLURM_STEP_NUM_TASKS");
    place.local_rank = number("SLURM_LOCALID");
    if (const auto tasks = variable("SLURM_STEP_TASKS_PER_NODE"))
      place.local_size = tasks_of_node(*tasks, number_or("SLURM_NODEID", 0));
    place.address = first_host(variable("SLURM_STEP_NODELIST").value_or("127.0.0.1"));
    place.port = 20000 + number_or("SLURM_JOB_ID", 0) % 10000;  // jobs can share a host
  } else if (number_or("OMPI_COMM_WORLD_SIZE", 1) > 1) {
    place.rank = number("OMPI_COMM_WORLD_RANK");
    place.size = number("OMPI_COMM_WORLD_SIZE");
    place.local_rank = number("OMPI_COMM_WORLD_LOCAL_RANK");
    place.local_size = number("OMPI_COMM_WORLD_LOCAL_SIZE");
    if (place.local_size < place.size && !variable("MASTER_ADDR"))
      fail(
          "Open MPI started ranks on several hosts. "
          "Set MASTER_ADDR to the host of rank 0 (mpirun -x MASTER_ADDR=HOST).");
  } else if (!variable("RANK") && number_or("WORLD_SIZE", 1) > 1) {
    fail("WORLD_SIZE = {} is set, but RANK, the number of this process, is not",
         number("WORLD_SIZE"));
  } else {
    return {};
  }
  place.address = variable("MASTER_ADDR").value_or(place.address);
  place.port = number_or("MASTER_PORT", place.port);
  if (place.size < 1 || place.rank >= place.size)
    fail("rank {} does not exist among {} ranks (RANK and WORLD_SIZE, or those of Slurm or MPI)",
         place.rank, place.size);
  if (place.port < 1 || place.port > 65535) fail("MASTER_PORT = {} is not a port", place.port);
  if (place.size == 1 && place.listening < 0) return {};  // nobody to meet
  return place;
}

struct Ranks::Group {
  // `watched`: the thread's own connection
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::Store> watched;
  c10::intrusive_ptr<c10d::Backend> backend;
  std::unique_ptr<PeerMemory> peers;  // null on CPUs, and if ranks run on several hosts
  std::thread thread;
  std::mutex mutex;
  std::condition_variable wake;
  bool stopping = false;
  bool over = false;  // the others know that this rank has ended
  bool on_gpu = false;

  explicit Group(const RankPlace& place) : place_(place) {
    // Its warnings are stack traces; what they mean is said by this class
    if (!variable("TORCH_CPP_LOG_LEVEL")) FLAGS_caffe2_log_level = 2;
    connect();
    take_place();
    meet();
    // From now on ranks may work for long between two messages.
    store->setTimeout(kLongestExchange);
    watched = store->clone();
    watched->setTimeout(seconds(Ranks::kSilence));
    thread = std::thread([this] { watch(); });
  }

  // Rank 0 runs on this host. The name of a host that has not started may be unknown for a while,
  // so the other ranks wait for it.
  void check_address() const {
    addrinfo* found = nullptr;
    const int code = ::getaddrinfo(place_.address.c_str(), nullptr, nullptr, &found);
    if (code == 0) return ::freeaddrinfo(found);
    fail("MASTER_ADDR = '{}': the host is unknown ({}). Nothing was changed.", place_.address,
         ::gai_strerror(code));
  }

  void connect() {
    c10d::TCPStoreOptions options;
    options.port = uint16_t(place_.port);
    options.isServer = place_.rank == 0 && !place_.served_outside;
    options.waitWorkers = false;
    options.timeout = seconds(Ranks::kMeeting);
    if (options.isServer && place_.listening >= 0) options.masterListenFd = int(place_.listening);
    if (place_.rank == 0) check_address();
    c10::intrusive_ptr<c10d::Store> tcp;
    const int level = FLAGS_caffe2_log_level;
    FLAGS_caffe2_log_level = 3;  // its errors are stack traces, too, and are said below
    try {
      tcp = c10::make_intrusive<c10d::TCPStore>(place_.address, options);
      FLAGS_caffe2_log_level = level;
    } catch (const std::exception& error) {
      std::string text = first_line(error);
      if (options.isServer && text.find("EADDRINUSE") != std::string::npos)
        fail(
            "port {} is used by another program, so the ranks cannot meet. "
            "Set MASTER_PORT to a free port. Nothing was changed.",
            place_.port);
      if (text.find("timed out") != std::string::npos)
        text = fmt::format("nothing answered for {} seconds", Ranks::kMeeting);
      fail<Error>(
          "rank {} cannot reach rank 0 at {}:{}: {}. Is rank 0 running, "
          "and do MASTER_ADDR and MASTER_PORT name its host and port? Nothing was changed.",
          place_.rank, place_.address, place_.port, text);
    }
    store = c10::make_intrusive<c10d::PrefixStore>("assay" + place_.attempt, tcp);
  }

  // Two processes cannot be the same rank, not even of two runs that were given the same port.
  void take_place() {
    const std::string self =
        fmt::format("{} process {} of {} ranks", host_name(), ::getpid(), place_.size);
    const std::string holder = store->compareSet(key("rank", place_.rank), "", self);
    if (holder != self)
      fail(
          "rank {} at {}:{} is taken already ({}). "
          "Another run uses this port: set MASTER_PORT to a free one. Nothing was changed.",
          place_.rank, place_.address, place_.port, holder);
  }

  // Waits for a key of another rank, or for the end of another rank.
  bool wait_for(const std::string& name, seconds limit) {
    const Clock::time_point end = Clock::now() + limit;
    while (Clock::now() < end) {
      if (store->check({kFailure})) end_process(store->get_to_str(kFailure));
      if (store->check({name})) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return false;
  }

  void meet() {
    if (place_.rank != 0) {
      if (!wait_for("met", seconds(Ranks::kMeeting + 5)))
        fail<Error>("rank {} waited {} s for rank 0 at {}:{}. Nothing was changed.", place_.rank,
                    Ranks::kMeeting + 5, place_.address, place_.port);
      if (const std::string size = store->get_to_str("met"); size != std::to_string(place_.size))
        announce(2, fmt::format("rank {} was started as one of {} ranks, and rank 0 as one of {}",
                                place_.rank, place_.size, size));
      return;
    }
    std::vector<std::string> missing;
    const Clock::time_point start = Clock::now();
    for (int64_t rank = 1; rank < place_.size; ++rank) {
      const auto left = seconds(Ranks::kMeeting) - (Clock::now() - start);
      if (!wait_for(key("rank", rank), std::chrono::duration_cast<seconds>(left)) &&
          !store->check({key("rank", rank)}))
        missing.push_back(std::to_string(rank));
    }
    if (!missing.empty()) {
      const std::string message =
          fmt::format("of {} ranks, rank {} did not come within {} s. Nothing was changed.",
                      place_.size, join(missing), Ranks::kMeeting);
      announce(kFailed, message);
      say_goodbye();
      fail<Error>("{}", message);
    }
    store->set("met", std::to_string(place_.size));
  }

  void wait_until_all_are_idle();

  // The first failure is the cause of the later ones.
  void announce(int code, const std::string& message) {
    store->compareSet(kFailure, "", fmt::format("{} {}", code, message));
  }

  // Ends this process because another rank failed; its main thread may wait for an exchange.
  [[noreturn]] void end_process(const std::string& failure) {
    const size_t blank = failure.find(' ');
    const std::string line =
        fmt::format("assay: rank {} stops: {}\n", place_.rank, failure.substr(blank + 1));
    std::fputs(line.c_str(), stderr);
    std::fflush(stderr);
    try {
      say_goodbye();
    } catch (const std::exception&) {  // rank 0 has gone
    }
    std::_Exit(std::stoi(failure.substr(0, blank)));
  }

  // Rank 0 hears every rank, and every rank hears rank 0.
  void watch() {
    std::map<int64_t, std::pair<int64_t, Clock::time_point>> heard;
    if (place_.rank != 0) heard[0] = {-1, Clock::now()};
    for (int64_t rank = 1; rank < place_.size && place_.rank == 0; ++rank)
      heard[rank] = {-1, Clock::now()};
    std::unique_lock lock(mutex);
    while (!wake.wait_for(lock, seconds(1), [&] { return stopping; })) {
      try {
        watched->add(key("beat", place_.rank), 1);
        if (watched->check({kFailure})) end_process(watched->get_to_str(kFailure));
        for (auto& [rank, last] : heard) listen(rank, last);
      } catch (const std::exception&) {
        end_process(
            fmt::format("{} rank 0, which serves the store at {}:{}, is lost. "
                        "Continue with --resume.",
                        int(kFailed), place_.address, place_.port));
      }
    }
  }
  void listen(int64_t rank, std::pair<int64_t, Clock::time_point>& last) {
    if (watched->check({key("done", rank)})) return;
    const int64_t beats = watched->add(key("beat", rank), 0);
    if (beats != last.first) last = {beats, Clock::now()};
    if (Clock::now() - last.second < seconds(Ranks::kSilence)) return;
    const std::string who = watched->get_to_str(key("rank", rank));
    const std::string failure =
        fmt::format("{} rank {} is lost ({}): no sign of life for {} s. Continue with --resume.",
                    int(kFailed), rank, who, Ranks::kSilence);
    end_process(watched->compareSet(kFailure, "", failure));
  }
  void stop_watching() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    wake.notify_all();
    if (thread.joinable()) thread.join();
  }

  // The store ends with rank 0, so rank 0 ends last.
  void say_goodbye(seconds patience = seconds(5)) {
    over = true;
    c10d::Store& own = watched ? *watched : *store;  // the main thread may hold the other one
    own.set(key("done", place_.rank), std::string("1"));
    if (place_.rank != 0) return;
    const Clock::time_point end = Clock::now() + patience;
    for (int64_t rank = 1; rank < place_.size; ++rank)
      while (!own.check({key("done", rank)}) && Clock::now() < end)
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }

 private:
  RankPlace place_;
};

Ranks::Ranks(const RankPlace& place) : place_(place), group_(std::make_unique<Group>(place)) {}

// On GPUs an exchange goes on after the call that started it, and it needs the connections of both
// sides. A rank that ended earlier would leave the kernels of the others waiting for ever.
void Ranks::Group::wait_until_all_are_idle() {
#ifdef ASSAY_CUDA
  if (on_gpu) c10::cuda::device_synchronize();
#endif
  store->set(key("idle", place_.rank), std::string("1"));
  for (int64_t rank = 0; rank < place_.size; ++rank) wait_for(key("idle", rank), kLongestExchange);
}

Ranks::~Ranks() {
  try {
    if (group_->backend && !group_->over) group_->wait_until_all_are_idle();
    group_->stop_watching();
    if (!group_->over) group_->say_goodbye(seconds(kSilence));
  } catch (const std::exception&) {  // the store has gone; nobody is left to tell
  }
}

std::string Ranks::device(const std::string& name) const {
  if (name != "cuda" && (name != "auto" || gpu_names().empty())) return name;
  const int64_t gpus = int64_t(gpu_names().size());
  if (gpus == 1) return "cuda:0";  // Slurm gives each task its own GPU
  if (place_.local_rank >= gpus)
    fail("rank {} is number {} on {}, which has {} GPUs. Start fewer ranks per host.", place_.rank,
         place_.local_rank, host_name(), gpus);
  return fmt::format("cuda:{}", place_.local_rank);
}

void Ranks::agree(const std::map<std::string, std::string>& facts) {
  Group& g = *group_;
  const auto limit = std::chrono::duration_cast<seconds>(kLongestExchange);
  if (!first()) {
    g.store->set(key("facts", rank()), nlohmann::json(facts).dump());
    g.wait_for("agreed", limit);
    return;
  }
  std::vector<std::string> differences;
  for (int64_t other = 1; other < size(); ++other) {
    g.wait_for(key("facts", other), limit);
    const auto theirs = nlohmann::json::parse(g.store->get_to_str(key("facts", other)))
                            .get<std::map<std::string, std::string>>();
    for (const auto& [name, value] : facts)
      if (const std::string found = first_difference(theirs.at(name), value); !found.empty()) {
        differences.push_back(fmt::format("rank {} has another {}: {}", other, name, found));
        break;
      }
  }
  if (!differences.empty())
    fail("the ranks differ: {}. Nothing was changed.", join(differences, "; "));
  g.store->set("agreed", "1");
}

void Ranks::failed(const std::string& message, int exit_code) noexcept {
  try {
    group_->stop_watching();
    group_->announce(exit_code, fmt::format("rank {} failed: {}", rank(), message));
    group_->say_goodbye();
  } catch (const std::exception&) {  // rank 0 has gone; the others notice it themselves
  }
}

void Ranks::open(c10::Device device) {
  const int rank = int(place_.rank);
  const int size = int(place_.size);
  const auto store = c10::make_intrusive<c10d::PrefixStore>("exchange", group_->store->clone());
  guarded([&] {
    if (device.is_cuda()) {
#ifdef ASSAY_CUDA
      group_->on_gpu = true;
      c10::cuda::set_device(device.index());
      const auto options = c10d::ProcessGroupNCCL::Options::create();
      options->timeout = kLongestExchange;
      group_->backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
      if (place_.local_size == place_.size && variable("NCCL_P2P_DISABLE").value_or("0") == "0")
        group_->peers = std::make_unique<PeerMemory>(
            rank, size, device, [this](const std::string& text) { return gather_texts(text); });
      return;
#else
      fail("this program was built without CUDA, so ranks cannot use GPUs; give --device cpu");
#endif
    }
    using c10d::ProcessGroupGloo;
    const auto options = ProcessGroupGloo::Options::create(kLongestExchange);
    const auto interface = variable("GLOO_SOCKET_IFNAME");
    const bool local = place_.address == "127.0.0.1" || place_.address == "localhost";
    options->devices.push_back(interface ? ProcessGroupGloo::createDeviceForInterface(*interface)
                               : local   ? ProcessGroupGloo::createDeviceForHostname("127.0.0.1")
                                         : ProcessGroupGloo::createDefaultDevice());
    group_->backend = c10::make_intrusive<ProcessGroupGloo>(store, rank, size, options);
  });
}

// An exchange fails when another rank is lost. The thread then finds out which, and ends the
// process.
void Ranks::guarded(const std::function<void()>& work) const {
  try {
    work();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    std::this_thread::sleep_for(seconds(kSilence + 10));
    fail<Error>("rank {}: the exchange with the other ranks failed: {}", rank(), first_line(error));
  }
}

at::Tensor Ranks::exchange_memory(int64_t elements, const at::TensorOptions& options) {
  if (group_->peers) {
    const at::Tensor memory = group_->peers->allocate(elements, options);
    if (memory.defined()) return memory;
    group_->peers.reset();
  }
  return at::zeros({elements}, options);
}

bool Ranks::reads_peer_memory() const { return group_->peers != nullptr; }

Ranks::Wait Ranks::exchange(const at::Tensor& out, const at::Tensor& in, int64_t first,
                            int64_t count) {
  if (count == size() && group_->peers && group_->peers->holds(in))
    return group_->peers->exchange(out, in);
  c10::intrusive_ptr<c10d::Work> work;
  guarded([&] {
    at::Tensor to = out;
    at::Tensor from = in.view_as(out);
    std::vector<int64_t> sent;  // rows, by rank; empty: equal parts
    if (count < size()) {
      sent.assign(size_t(size()), 0);
      std::fill_n(sent.begin() + first, count, out.size(0) / count);
    }
    std::vector<int64_t> received = sent;
    work = group_->backend->alltoall_base(to, from, received, sent);
  });
  return [this, work] { guarded([&] { work->wait(); }); };
}

Ranks::Wait Ranks::send(const at::Tensor& tensor, int64_t rank) {
  c10::intrusive_ptr<c10d::Work> work;
  guarded([&] {
    std::vector<at::Tensor> list = {tensor};
    work = group_->backend->send(list, int(rank), /*tag=*/0);
  });
  return [this, work] { guarded([&] { work->wait(); }); };
}

void Ranks::receive(at::Tensor tensor, int64_t rank) {
  guarded([&] {
    std::vector<at::Tensor> list = {tensor};
    group_->backend->recv(list, int(rank), /*tag=*/0)->wait();
  });
}

at::Tensor Ranks::gather(const at::Tensor& part) {
  std::vector<int64_t> shape = part.sizes().vec();
  shape.insert(shape.begin(), size());
  at::Tensor out = at::empty(shape, part.options());
  out[rank()].copy_(part);
  all_gather(out)();
  return out;
}

Ranks::Wait Ranks::all_gather(const at::Tensor& rows) {
  if (group_->peers && group_->peers->holds(rows)) return group_->peers->all_gather(rows);
  c10::intrusive_ptr<c10d::Work> work;
  guarded([&] {
    at::Tensor all = rows.view(-1);
    at::Tensor own = rows[rank()].view(-1);
    if (!group_->on_gpu) own = own.clone();  // Gloo copies it to its row
    work = group_->backend->_allgather_base(all, own);
  });
  return [this, work] { guarded([&] { work->wait(); }); };
}

void Ranks::add_disjoint(at::Tensor values) {
  guarded([&] {
    std::vector<at::Tensor> list = {values};
    group_->backend->allreduce(list)->wait();
  });
}

std::vector<std::string> Ranks::gather_texts(const std::string& text) {
  const auto text_key = [&](int64_t gather, int64_t rank) {
    return key(fmt::format("text/{}", gather).c_str(), rank);
  };
  c10d::Store& store = *group_->store;
  std::vector<std::string> keys;
  std::vector<std::string> texts;
  for (int64_t other = 0; other < size(); ++other) keys.push_back(text_key(gathers_, other));
  guarded([&] {
    store.set(keys[size_t(rank())], text);
    for (const std::vector<uint8_t>& bytes : store.multiGet(keys))
      texts.emplace_back(bytes.begin(), bytes.end());
    // All ranks have begun this gathering, so they have read the texts of the one before
    if (gathers_ > 0) store.deleteKey(text_key(gathers_ - 1, rank()));
  });
  ++gathers_;
  return texts;
}

void Ranks::fail_together(const std::string& message) {
  if (!first()) group_->wait_for(kFailure, std::chrono::duration_cast<seconds>(kLongestExchange));
  fail<Error>("{}", message);
}

}  // namespace assay::train
