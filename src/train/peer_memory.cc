#include "train/peer_memory.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include "base/build.h"
#include "base/error.h"

#ifdef ASSAY_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <cuda_runtime.h>
#endif

namespace assay::train {
namespace {

#ifdef ASSAY_CUDA

// A function of the driver, which this program is not linked with.
template <class Function>
Function* driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || !found) fail<Error>("the driver of CUDA has no {}", name);
  return reinterpret_cast<Function*>(found);
}

using StreamValue = CUresult(CUstream, CUdeviceptr, cuuint32_t, unsigned);

cudaStream_t cuda_stream(const c10::Stream& stream) {
  return c10::cuda::CUDAStream(stream).stream();
}

void check(int code, const char* what) {
  if (code != 0) fail<Error>("CUDA refused {}: error {}", what, code);
}

void copy(const c10::Stream& stream, char* to, const char* from, int64_t bytes) {
  check(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDeviceToDevice, cuda_stream(stream)),
        "a copy between GPUs");
}

void write_value(const c10::Stream& stream, void* address, uint32_t value) {
  static StreamValue* const call = driver_function<StreamValue>("cuStreamWriteValue32");
  check(call(cuda_stream(stream), CUdeviceptr(address), value, CU_STREAM_WRITE_VALUE_DEFAULT),
        "to write a flag");
}

// Waits until the value is reached; turns may wrap around.
void wait_for_value(const c10::Stream& stream, void* address, uint32_t value) {
  static StreamValue* const call = driver_function<StreamValue>("cuStreamWaitValue32");
  check(call(cuda_stream(stream), CUdeviceptr(address), value, CU_STREAM_WAIT_VALUE_GEQ),
        "to wait for a flag");
}

// "<offset> <handle in hexadecimal digits>"
std::string describe(void* memory) {
  const auto shared = c10::cuda::CUDACachingAllocator::shareIpcHandle(memory);
  std::string text = fmt::format("{} ", shared.offset);
  for (const unsigned char byte : shared.handle) text += fmt::format("{:02x}", byte);
  return text;
}

// The memory that another process described, and its address here.
std::pair<std::shared_ptr<void>, char*> open(const std::string& text) {
  const size_t blank = text.find(' ');
  std::string handle;
  for (size_t i = blank + 1; i + 1 < text.size(); i += 2)
    handle += char(std::stoi(text.substr(i, 2), nullptr, 16));
  const std::shared_ptr<void> mapping = c10::cuda::CUDACachingAllocator::getIpcDevPtr(handle);
  return {mapping, static_cast<char*>(mapping.get()) + std::stoll(text.substr(0, blank))};
}

c10::Stream stream_of_its_own(c10::Device device) {
  return c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index());
}

#else

[[noreturn]] void refuse() { fail<Error>("this program was built without CUDA"); }
void write_value(const c10::Stream&, void*, uint32_t) { refuse(); }
void wait_for_value(const c10::Stream&, void*, uint32_t) { refuse(); }
void copy(const c10::Stream&, char*, const char*, int64_t) { refuse(); }
std::string describe(void*) { refuse(); }
std::pair<std::shared_ptr<void>, char*> open(const std::string&) { refuse(); }
c10::Stream stream_of_its_own(c10::Device) { refuse(); }

#endif

}  // namespace

PeerMemory::PeerMemory(int64_t rank, int64_t size, c10::Device device, GatherTexts gather_texts)
    : rank_(rank),
      size_(size),
      device_(device),
      gather_texts_(std::move(gather_texts)),
      telling_(stream_of_its_own(device)),
      copying_(stream_of_its_own(device)) {
  const at::Tensor flags = allocate(size, at::TensorOptions(at::kInt).device(device));
  if (!works_) return;
  flags_ = std::move(windows_.back());
  windows_.pop_back();
}

at::Tensor PeerMemory::allocate(int64_t elements, const at::TensorOptions& options) {
  if (!works_) return {};
  Window window{.memory = at::zeros({elements}, options)};
  std::string own;  // "": this rank cannot take part
  try {
    write_value(telling_, window.memory.data_ptr(), 0);  // not every device has these operations
    wait_for_value(copying_, window.memory.data_ptr(), 0);
    own = describe(window.memory.data_ptr());
  } catch (const std::exception&) {
  }
  // The zeros are there before another rank writes a flag
  c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
  const std::vector<std::string> texts = gather_texts_(own);
  std::string opened = "yes";
  try {
    for (int64_t other = 0; other < size_; ++other) {
      auto [mapping, address] =
          other == rank_ ? std::pair<std::shared_ptr<void>, char*>{} : open(texts[size_t(other)]);
      window.mappings.push_back(mapping);
      window.of_ranks.push_back(other == rank_ ? static_cast<char*>(window.memory.data_ptr())
                                               : address);
    }
  } catch (const std::exception&) {
    opened = "no";
  }
  for (const std::string& text : gather_texts_(opened)) works_ = works_ && text == "yes";
  if (!works_) return {};
  windows_.push_back(window);
  return window.memory;
}

PeerMemory::Wait PeerMemory::pull(const at::Tensor& written, int64_t bytes, const Address& from,
                                  const Address& to) {
  ++turn_;
  const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
  c10::Event ready(at::kCUDA);
  ready.record(cuda.getStream(device_));
  ready.block(telling_);
  ready.block(copying_);
  const auto flag = [&](int64_t of, int64_t about) {
    return flags_.of_ranks[size_t(of)] + about * int64_t{sizeof turn_};
  };
  for (int64_t i = 1; i < size_; ++i) {
    const int64_t other = (rank_ + i) % size_;
    write_value(telling_, flag(other, rank_), turn_);
  }
  for (int64_t i = 1; i < size_; ++i) {  // each rank reads from another one first
    const int64_t other = (rank_ + i) % size_;
    wait_for_value(copying_, flag(rank_, other), turn_);
    copy(copying_, to(other), from(other), bytes);
  }
  const auto copied = std::make_shared<c10::Event>(at::kCUDA);
  copied->record(copying_);
  return [copied, written, device = device_] {
    copied->block(c10::impl::VirtualGuardImpl(at::kCUDA).getStream(device));
  };
}

PeerMemory::~PeerMemory() = default;

const PeerMemory::Window* PeerMemory::window_of(const void* address) const {
  for (const Window& window : windows_) {
    const char* begin = static_cast<const char*>(window.memory.data_ptr());
    const char* place = static_cast<const char*>(address);
    if (begin <= place && place < begin + window.memory.nbytes()) return &window;
  }
  return nullptr;
}

bool PeerMemory::holds(const at::Tensor& tensor) const {
  return window_of(tensor.data_ptr()) != nullptr;
}

char* PeerMemory::in_memory_of(int64_t other, char* own) const {
  const Window& window = *window_of(own);
  return window.of_ranks[size_t(other)] + (own - window.of_ranks[size_t(rank_)]);
}

PeerMemory::Wait PeerMemory::exchange(const at::Tensor& out, const at::Tensor& in) {
  const int64_t bytes = int64_t(in.nbytes()) / size_;
  char* const read = static_cast<char*>(in.data_ptr()) + rank_ * bytes;
  char* const written = static_cast<char*>(out.data_ptr());
  return pull(
      out, bytes, [&](int64_t other) { return in_memory_of(other, read); },
      [&](int64_t other) { return written + (other - (other > rank_ ? 1 : 0)) * bytes; });
}

PeerMemory::Wait PeerMemory::all_gather(const at::Tensor& rows) {
  const int64_t bytes = int64_t(rows.nbytes()) / size_;
  const auto row = [&](int64_t other) {
    return static_cast<char*>(rows.data_ptr()) + other * bytes;
  };
  return pull(rows, bytes, [&](int64_t other) { return in_memory_of(other, row(other)); }, row);
}

}  // namespace assay::train
