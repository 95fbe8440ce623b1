#pragma once
// The slices of a sequence on ranks: rank r has the slices after those of rank r − 1.
#include <c10/core/Device.h>

#include <map>
#include <string>
#include <vector>

#include "nn/context.h"
#include "train/ranks.h"

namespace assay::train {

class RankNeighbours final : public nn::Neighbours {
 public:
  RankNeighbours(Ranks& ranks, c10::Device device) : ranks_(ranks), device_(device) {}

  void send(int64_t layer, const nn::Handed& state) override;
  nn::Handed receive(int64_t layer) override;
  void send_gradients(const std::vector<at::Tensor>& gradients) override;
  void receive_gradients(const std::vector<at::Tensor>& gradients) override;
  std::function<at::Tensor()> transpose(const at::Tensor& blocks) override;
  void finish() override;

 private:
  void send_tensor(const at::Tensor& tensor, int64_t rank);
  void send_text(const std::string& text, int64_t rank);
  std::string receive_text(int64_t rank);

  Ranks& ranks_;
  c10::Device device_;
  // By layer: what the state consists of, as JSON. It is sent once.
  std::map<int64_t, std::string> sent_;
  std::map<int64_t, std::string> received_;
  std::vector<Ranks::Wait> under_way_;
};

}  // namespace assay::train
