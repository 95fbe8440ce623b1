#pragma once
// Memory of the GPUs of one host that the processes of all ranks read. Copies between GPUs are made
// by copy engines, and the waits for other ranks by the front end of a GPU, so the SMs stay with
// the kernels of the model.
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace assay::train {

class PeerMemory {
 public:
  using Wait = std::function<void()>;
  // Gives the text of every rank, in their order. All ranks call it together.
  using GatherTexts = std::function<std::vector<std::string>(const std::string&)>;
  PeerMemory(int64_t rank, int64_t size, c10::Device device, GatherTexts gather_texts);
  ~PeerMemory();

  // Zeros [elements], which all ranks read; undefined if a GPU cannot read the memory of another
  // one. All ranks call it with the same arguments. The memory lives as long as this object.
  at::Tensor allocate(int64_t elements, const at::TensorOptions& options);
  // Whether it lies in memory of allocate().
  bool holds(const at::Tensor& tensor) const;

  // As those of Ranks; `out` has no row of this rank. All ranks call these in the same order. The
  // memory that a rank gave must not change before all ranks have waited for the copy.
  Wait exchange(const at::Tensor& out, const at::Tensor& in);
  Wait all_gather(const at::Tensor& rows);

 private:
  struct Window {
    at::Tensor memory;
    std::vector<std::shared_ptr<void>> mappings;
    std::vector<char*> of_ranks;  // addresses in this process
  };
  using Address = std::function<char*(int64_t other)>;
  const Window* window_of(const void* address) const;
  char* in_memory_of(int64_t other, char* own) const;
  // Copies `bytes` from from(r) to to(r) for every other rank r, when r has come to the same call.
  // `written`: the tensor that is filled.
  Wait pull(const at::Tensor& written, int64_t bytes, const Address& from, const Address& to);

  int64_t rank_;
  int64_t size_;
  c10::Device device_;
  GatherTexts gather_texts_;
  std::vector<Window> windows_;
  Window flags_;       // u32 [ranks]: the last turn for which the memory of each rank is ready
  uint32_t turn_ = 0;  // the number of calls of pull()
  bool works_ = true;
  c10::Stream telling_;  // writes flags of other ranks
  c10::Stream copying_;  // waits for flags, and copies
};

}  // namespace assay::train
