#pragma once
// The processes that train one model together, called ranks: which of them this process is, how
// they meet, what they exchange, and how all of them end when one is lost.
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace assay::train {

// Which rank this process is.
struct RankPlace {
  bool launched = false;  // false: a process of its own
  int64_t rank = 0;
  int64_t size = 1;
  int64_t local_rank = 0;
  int64_t local_size = 1;
  // Where rank 0 serves the store through which the ranks meet.
  std::string address = "127.0.0.1";
  int64_t port = 29500;
  int64_t listening = -1;       // an open socket on that port, inherited by rank 0
  bool served_outside = false;  // torchrun serves the store
  std::string attempt;          // of torchrun; keys of earlier attempts are not read
};
// From the variables of torchrun (RANK, …), Slurm's srun or Open MPI, whichever is found first. One
// rank that `assay train --ranks 1` did not start is a process of its own. BadInput names a
// variable that is missing or wrong.
RankPlace place_from_environment();
// "node03" of "node[03-05,08],other1".
std::string first_host(const std::string& slurm_node_list);
// 3 for node 2 of "4(x2),3".
int64_t tasks_of_node(const std::string& slurm_list, int64_t node);

class Ranks {
 public:
  static constexpr int64_t kMeeting = 50;  // seconds in which all ranks must meet
  static constexpr int64_t kSilence = 20;  // seconds without a sign of life: the rank is lost

  // Meets the other ranks. Error names the ranks that are missing. From here on, a thread ends this
  // process with a message when another rank fails or is lost.
  explicit Ranks(const RankPlace& place);
  // Ends together with the other ranks, when no exchange is under way anywhere.
  ~Ranks();
  Ranks(const Ranks&) = delete;

  int64_t rank() const { return place_.rank; }
  int64_t size() const { return place_.size; }
  bool first() const { return place_.rank == 0; }
  // "cuda:LOCAL_RANK" for "auto" (when there are GPUs) and "cuda". BadInput when there are fewer
  // GPUs than ranks on this host.
  std::string device(const std::string& name) const;

  // BadInput on rank 0, which ends the others, unless all ranks give the same facts. The message
  // names the ranks and the first difference.
  void agree(const std::map<std::string, std::string>& facts);
  // Tells the others that this rank cannot go on. They end with this message.
  void failed(const std::string& message, int exit_code) noexcept;

  // Opens NCCL for a GPU and Gloo for a CPU. Before any of the calls below, which all ranks make
  // in the same order.
  void open(c10::Device device);
  using Wait = std::function<void()>;
  // Zeros [elements] that live as long as this object. All ranks call it with the same arguments.
  // On GPUs of one host that read each other's memory, exchanges among all ranks of what lies in it
  // need no SM (peer_memory.h).
  at::Tensor exchange_memory(int64_t elements, const at::TensorOptions& options);
  bool reads_peer_memory() const;  // whether they do
  // Starts to send part i of `in`, of `count` equal parts, to rank first + i, and to receive one
  // part from each of these ranks into `out` [count, …]. This rank is one of them, and the others
  // exchange among `count` ranks, too. After Wait, work on `out` comes after the exchange. If `in`
  // lies in exchange_memory() that peers read, `out` [size() − 1, …] has no row of this rank.
  Wait exchange(const at::Tensor& out, const at::Tensor& in, int64_t first, int64_t count);
  Wait exchange(const at::Tensor& out, const at::Tensor& in) {
    return exchange(out, in, 0, size());
  }
  // Sends a contiguous tensor to one rank, which receives it into one of the same size. Two ranks
  // exchange their tensors in the order of these calls. After Wait, its memory can be used again.
  Wait send(const at::Tensor& tensor, int64_t rank);
  void receive(at::Tensor tensor, int64_t rank);
  at::Tensor gather(const at::Tensor& part);  // [size, …]: `part` of every rank, in their order
  // Starts to gather in place: row r of the contiguous `rows` is the part of rank r.
  Wait all_gather(const at::Tensor& rows);
  // Elements that all ranks but one give as zero: the result does not depend on the order.
  void add_disjoint(at::Tensor values);
  // The text of every rank, in their order. For short texts: they go through the store.
  std::vector<std::string> gather_texts(const std::string& text);
  // Ends all ranks: rank 0 throws Error, and the others wait until it ends them.
  [[noreturn]] void fail_together(const std::string& message);

 private:
  struct Group;
  void guarded(const std::function<void()>& work) const;
  RankPlace place_;
  std::unique_ptr<Group> group_;
  int64_t gathers_ = 0;  // calls of gather_texts
};

}  // namespace assay::train
