#pragma once
// Ordered parallel work in bounded memory: produce() on one thread, work() on several, consume()
// on the caller's, in the order of production. An exception in any of them stops all and is thrown
// to the caller.
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <queue>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"

namespace assay::data {

template <class In, class Out>
class Pipeline {
 public:
  struct Stages {
    std::function<bool(In&)> produce;         // false at the end
    std::function<int64_t(const In&)> bytes;  // an item's size, for the bound
    // Called once on each worker's thread
    std::function<std::function<void(In&, Out&)>()> make_work;
    std::function<void(Out&)> consume;
    // On the caller's thread, ten times a second and after each item; may throw
    std::function<void()> idle;
  };
  // Items of at most `most_bytes` are under way at a time (one item may be larger). Error when the
  // system does not start that many threads.
  Pipeline(Stages stages, int workers, int64_t most_bytes)
      : stages_(std::move(stages)), most_bytes_(most_bytes) {
    try {
      threads_.emplace_back([this] { guarded([this] { produce(); }); });
      for (int i = 0; i < workers; ++i)
        threads_.emplace_back([this] { guarded([this] { work(); }); });
    } catch (const std::system_error& error) {
      end_threads();
      fail<Error>("{} threads cannot be started: {}; give fewer with --threads", workers + 1,
                  error.code().message());
    }
  }
  ~Pipeline() { end_threads(); }
  void run() {
    for (;;) {
      std::optional<Done> done = next_done();
      stages_.idle();
      if (finished_) return;
      if (!done) continue;
      stages_.consume(done->out);
      release(done->bytes);
    }
  }

 private:
  struct Item {
    int64_t number;
    int64_t bytes;
    In in;
  };
  struct Done {
    int64_t bytes;
    Out out;
  };
  void guarded(auto&& body) try { body(); } catch (...) {
    stop(std::current_exception());
  }
  void end_threads() {
    stop(nullptr);
    for (std::thread& thread : threads_) thread.join();
  }
  void stop(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = error;
    stopped_ = true;
    changed_.notify_all();
  }
  void produce() {
    for (In in; stages_.produce(in); in = In()) {
      std::unique_lock lock(mutex_);
      const int64_t bytes = stages_.bytes(in);
      changed_.wait(
          lock, [&] { return stopped_ || under_way_ == 0 || under_way_ + bytes <= most_bytes_; });
      if (stopped_) return;
      under_way_ += bytes;
      waiting_.push({produced_++, bytes, std::move(in)});
      changed_.notify_all();
    }
    const std::lock_guard lock(mutex_);
    all_produced_ = true;
    changed_.notify_all();
  }
  void work() {
    auto work = stages_.make_work();
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopped_ || all_produced_ || !waiting_.empty(); });
      if (stopped_ || waiting_.empty()) return;
      Item item = std::move(waiting_.front());
      waiting_.pop();
      lock.unlock();
      Done done{item.bytes, {}};
      work(item.in, done.out);
      lock.lock();
      done_.emplace(item.number, std::move(done));
      changed_.notify_all();
    }
  }
  std::optional<Done> next_done() {
    std::unique_lock lock(mutex_);
    auto ready = [&] {
      return stopped_ || done_.contains(consumed_) || (all_produced_ && consumed_ == produced_);
    };
    changed_.wait_for(lock, std::chrono::milliseconds(100), ready);
    if (stopped_) std::rethrow_exception(error_);
    finished_ = all_produced_ && consumed_ == produced_;
    const auto found = done_.find(consumed_);
    if (found == done_.end()) return std::nullopt;
    std::optional<Done> out(std::move(found->second));
    done_.erase(found);
    ++consumed_;
    return out;
  }
  void release(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    under_way_ -= bytes;
    changed_.notify_all();
  }

  Stages stages_;
  const int64_t most_bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::queue<Item> waiting_;
  std::map<int64_t, Done> done_;
  std::exception_ptr error_;
  int64_t under_way_ = 0;
  int64_t produced_ = 0;
  int64_t consumed_ = 0;
  bool all_produced_ = false;
  bool stopped_ = false;
  bool finished_ = false;
  std::vector<std::thread> threads_;  // last: they use all of the above
};

}  // namespace assay::data
