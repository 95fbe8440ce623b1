#include "ops/core/split.h"

#include <torch/torch.h>

#include <map>
#include <mutex>

#include "ops/core/tensors.h"

namespace assay::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The gradient of a tensor that was split. Backward functions find it by the memory of the tensor,
// whose address stays reserved by a weak reference.
class PackedGradient : public torch::CustomClassHolder {
 public:
  PackedGradient(const at::Tensor& x, at::IntArrayRef sizes)
      : width_(x.size(-1)),
        offset_(x.storage_offset()),
        sizes_(sizes.vec()),
        shape_(x.sizes().vec()),
        strides_(x.strides().vec()),
        options_(x.options()),
        storage_(x.storage().getWeakStorageImpl()),
        key_(x.storage().unsafeGetStorageImpl()),
        written_(sizes.size()) {
    const std::lock_guard lock(mutex);
    known[key_] = this;
  }
  ~PackedGradient() override {
    const std::lock_guard lock(mutex);
    if (const auto found = known.find(key_); found != known.end() && found->second == this)
      known.erase(found);
  }

  // Undefined if `input` is not a whole part, or if another caller has its part.
  static at::Tensor part_for(const at::Tensor& input) {
    const std::lock_guard lock(mutex);
    const auto found = known.find(input.storage().unsafeGetStorageImpl());
    return found == known.end() ? at::Tensor() : found->second->take(input);
  }

  // The gradient of all parts. Where one of them was written elsewhere by a second caller, or by an
  // earlier backward pass, all are copied.
  at::Tensor join(const variable_list& gradients) {
    const std::lock_guard lock(mutex);
    const at::Tensor packed = packed_.defined() ? packed_ : memory();
    const std::vector<at::Tensor> parts = packed.split_with_sizes(sizes_, -1);
    bool in_place = true;
    for (size_t i = 0; i < parts.size(); ++i)
      in_place = in_place && written_[i].defined() == is_same(gradients[i], parts[i]);
    const at::Tensor out = in_place ? packed : memory();
    const std::vector<at::Tensor> to = out.split_with_sizes(sizes_, -1);
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!gradients[i].defined()) to[i].zero_();
      else if (!in_place || !written_[i].defined()) to[i].copy_(gradients[i]);
    }
    packed_.reset();
    written_.assign(parts.size(), at::Tensor());
    return out;
  }

 private:
  static bool is_same(const at::Tensor& a, const at::Tensor& b) {
    return a.defined() && a.data_ptr() == b.data_ptr() && a.sizes() == b.sizes() &&
           a.strides() == b.strides();
  }
  at::Tensor memory() const { return at::empty_strided(shape_, strides_, options_); }
  at::Tensor take(const at::Tensor& input) {
    const int64_t column = input.storage_offset() - offset_;
    int64_t first = 0;
    size_t part = 0;
    while (part < sizes_.size() && first < column) first += sizes_[part++];
    const bool whole = part < sizes_.size() && first == column &&
                       input.numel() == c10::multiply_integers(shape_) / width_ * sizes_[part];
    if (!whole || written_[part].defined() || input.scalar_type() != options_.dtype()) return {};
    if (!packed_.defined()) packed_ = memory();
    return written_[part] = packed_.as_strided(input.sizes(), input.strides(), column);
  }

  static inline std::mutex mutex;
  static inline std::map<const c10::StorageImpl*, PackedGradient*> known;

  // width and offset of the tensor, in elements
  int64_t width_;
  int64_t offset_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> shape_;
  std::vector<int64_t> strides_;
  at::TensorOptions options_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  const c10::StorageImpl* key_;
  at::Tensor packed_;
  std::vector<at::Tensor> written_;  // by part; undefined until a caller takes it
};

struct Split : torch::autograd::Function<Split> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, at::IntArrayRef sizes) {
    ctx->saved_data["gradient"] =
        c10::IValue::make_capsule(c10::make_intrusive<PackedGradient>(x, sizes));
    ctx->set_materialize_grads(false);
    const at::AutoDispatchBelowADInplaceOrView no_views;
    return x.split_with_sizes(sizes, -1);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto packed = ctx->saved_data["gradient"].toCapsule();
    return {static_cast<PackedGradient&>(*packed).join(gradients), at::Tensor()};
  }
};

// Whether rows of x lie one after the other, at equal distances.
bool has_equal_rows(const at::Tensor& x) {
  if (x.dim() < 2 || x.is_contiguous()) return x.is_contiguous();
  int64_t distance = x.stride(-2);
  bool equal = x.stride(-1) == 1 && distance >= x.size(-1);
  for (int64_t d = x.dim() - 2; d > 0; --d) {
    distance *= x.size(d);
    equal = equal && x.stride(d - 1) == distance;
  }
  return equal;
}

}  // namespace

std::vector<at::Tensor> split(const at::Tensor& x, at::IntArrayRef sizes) {
  if (!wants_gradient({x}) || !has_equal_rows(x)) return x.split_with_sizes(sizes, -1);
  // A kernel that checks the alignment of a part relies on its gradient to have the same.
  if (reinterpret_cast<uintptr_t>(x.data_ptr()) % 16) return x.split_with_sizes(sizes, -1);
  return Split::apply(x, sizes);
}

at::Tensor gradient_memory(const at::Tensor& input) {
  const at::Tensor part = PackedGradient::part_for(input);
  return part.defined() ? part : at::empty(input.sizes(), input.options());
}

}  // namespace assay::ops
