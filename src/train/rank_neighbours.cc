#include "train/rank_neighbours.h"

#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "base/error.h"

namespace assay::train {
namespace {

using nlohmann::json;

// Names, dtypes and sizes, and the values of integers: positions, which no step changes.
std::string description(const nn::Handed& state) {
  json parts = json::array();
  for (const auto& [name, tensor] : state) {
    json part = {
        {"name", name}, {"dtype", int(tensor.scalar_type())}, {"sizes", tensor.sizes().vec()}};
    if (!tensor.is_floating_point()) {
      const at::Tensor values = tensor.to(at::kCPU, at::kLong).contiguous();
      const int64_t* first = values.data_ptr<int64_t>();
      part["values"] = std::vector<int64_t>(first, first + values.numel());
      part["device"] = tensor.device().str();
    }
    parts.push_back(part);
  }
  return parts.dump();
}

at::Tensor empty_tensor(const json& part, c10::Device device) {
  const auto dtype = at::ScalarType(part.at("dtype").get<int>());
  const auto sizes = part.at("sizes").get<std::vector<int64_t>>();
  if (!part.contains("values")) return at::empty(sizes, at::TensorOptions(dtype).device(device));
  const at::Tensor values =
      at::tensor(part.at("values").get<std::vector<int64_t>>(), at::kLong).view(sizes).to(dtype);
  return part.at("device").get<std::string>() == "cpu" ? values : values.to(device);
}

}  // namespace

void RankNeighbours::send(int64_t layer, const nn::Handed& state) {
  const int64_t next = ranks_.rank() + 1;
  const std::string text = description(state);
  const auto [known, first] = sent_.emplace(layer, text);
  if (first) send_text(text, next);
  else if (known->second != text)
    fail<Error>("layer {} left another state than in the first step: {} instead of {}", layer, text,
                known->second);
  for (const auto& [name, tensor] : state)
    if (tensor.is_floating_point()) send_tensor(tensor, next);
}

nn::Handed RankNeighbours::receive(int64_t layer) {
  const int64_t before = ranks_.rank() - 1;
  const auto [known, first] = received_.emplace(layer, "");
  if (first) known->second = receive_text(before);
  nn::Handed state;
  for (const json& part : json::parse(known->second)) {
    const at::Tensor tensor = empty_tensor(part, device_);
    if (tensor.is_floating_point() && tensor.numel() > 0) ranks_.receive(tensor, before);
    state[part.at("name").get<std::string>()] = tensor;
  }
  return state;
}

void RankNeighbours::send_gradients(const std::vector<at::Tensor>& gradients) {
  for (const at::Tensor& gradient : gradients) send_tensor(gradient, ranks_.rank() - 1);
}

void RankNeighbours::receive_gradients(const std::vector<at::Tensor>& gradients) {
  for (const at::Tensor& gradient : gradients)
    if (gradient.numel() > 0) ranks_.receive(gradient, ranks_.rank() + 1);
}

std::function<at::Tensor()> RankNeighbours::transpose(const at::Tensor& blocks) {
  const int64_t here = blocks.size(0);
  const int64_t ranks = blocks.size(1) / here;  // that share the sequence
  const int64_t first = ranks_.rank() / ranks * ranks;
  const at::Tensor to_ranks =
      blocks.unflatten(1, {ranks, here}).transpose(0, 1).contiguous();  // [rank, row, column, …]
  const at::Tensor from_ranks = at::empty_like(to_ranks);
  const Ranks::Wait wait = ranks_.exchange(from_ranks, to_ranks, first, ranks);
  return [wait, from_ranks, to_ranks] {  // to_ranks lives until it has been sent
    wait();
    return from_ranks.movedim(2, 0).flatten(1, 2);
  };
}

void RankNeighbours::finish() {
  for (const Ranks::Wait& wait : under_way_) wait();
  under_way_.clear();
}

void RankNeighbours::send_tensor(const at::Tensor& tensor, int64_t rank) {
  if (tensor.numel() > 0) under_way_.push_back(ranks_.send(tensor, rank));
}

void RankNeighbours::send_text(const std::string& text, int64_t rank) {
  const at::Tensor bytes =
      at::tensor(std::vector<uint8_t>(text.begin(), text.end()), at::TensorOptions(at::kByte));
  send_tensor(at::full({1}, bytes.numel(), at::kLong).to(device_), rank);
  send_tensor(bytes.to(device_), rank);
}

std::string RankNeighbours::receive_text(int64_t rank) {
  const at::Tensor size = at::empty({1}, at::TensorOptions(at::kLong).device(device_));
  ranks_.receive(size, rank);
  const at::Tensor bytes =
      at::empty({size.item<int64_t>()}, at::TensorOptions(at::kByte).device(device_));
  ranks_.receive(bytes, rank);
  const at::Tensor text = bytes.cpu();
  return std::string(reinterpret_cast<const char*>(text.data_ptr<uint8_t>()), size_t(text.numel()));
}

}  // namespace assay::train
