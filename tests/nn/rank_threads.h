#pragma once
// Ranks that are threads of the test: a real store, and Gloo between them. Include <torch/torch.h>
// first.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "train/ranks.h"

namespace assay::nn {

class RankThreads {
 public:
  explicit RankThreads(int64_t size) : ranks_(size_t(size)) {
    // torch's record of exchanges belongs to the process, and its groups do not lock it
    ::setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);
    const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    ::bind(socket, generic, length);
    ::listen(socket, SOMAXCONN);
    ::getsockname(socket, generic, &length);
    in_threads([&](int64_t rank) {
      ranks_[size_t(rank)] = std::make_unique<train::Ranks>(
          train::RankPlace{.launched = true,
                           .rank = rank,
                           .size = size,
                           .port = ::ntohs(address.sin_port),
                           .listening = rank == 0 ? socket : -1});  // which closes it
      ranks_[size_t(rank)]->open(at::kCPU);
    });
  }
  ~RankThreads() {
    end_each([](auto& ranks) { ranks.reset(); });
  }
  RankThreads(const RankThreads&) = delete;

  // end(ranks) resets its argument. Each rank has a thread of its own: ranks wait for one another.
  void end_each(const std::function<void(std::unique_ptr<train::Ranks>&)>& end) {
    in_threads([&](int64_t rank) { end(ranks_[size_t(rank)]); });
  }

  // body(ranks) as each rank, in a thread of its own. When one fails, all end: the others would
  // wait for it.
  void run(const std::function<void(train::Ranks&)>& body) {
    in_threads([&](int64_t rank) {
      at::set_num_threads(1);
      try {
        body(*ranks_[size_t(rank)]);
      } catch (const std::exception& error) {
        ranks_[size_t(rank)]->failed(error.what(), 1);
        throw;
      }
    });
  }

 private:
  void in_threads(const std::function<void(int64_t rank)>& body) {
    std::vector<std::exception_ptr> errors(ranks_.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      threads.emplace_back([&, rank] {
        try {
          body(int64_t(rank));
        } catch (...) {
          errors[rank] = std::current_exception();
        }
      });
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors)
      if (error) std::rethrow_exception(error);
  }
  std::vector<std::unique_ptr<train::Ranks>> ranks_;
};

}  // namespace assay::nn
