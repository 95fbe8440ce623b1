#pragma once
// The names of Gloo that c10d/ProcessGroupGloo.hpp needs. The wheel of torch contains Gloo and this
// header, but not the headers of Gloo. ProcessGroupGloo holds Gloo's objects through pointers only,
// so declarations are enough. CMake makes gloo/*.h that include this file (cmake/torch.cmake).
#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {
class Device;
class UnboundBuffer;
}  // namespace transport

namespace rendezvous {
class Store {
 public:
  virtual ~Store();
  virtual void set(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys,
                    const std::chrono::milliseconds& timeout) = 0;
};
}  // namespace rendezvous

}  // namespace gloo
