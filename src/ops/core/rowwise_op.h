#pragma once
// The operator around the kernels of rowwise.h: autograd and dispatch. For op.cc files.
#include <torch/torch.h>

#include <algorithm>
#include <vector>

#include "ops/core/dispatch.h"
#include "ops/core/rowwise.h"
#include "ops/core/split.h"

namespace assay::ops {

// Elements that a thread of a CUDA kernel reads with one load from rows of `width` numbers.
inline int64_t rowwise_vector(const at::Tensor& x, int64_t width) {
  const int64_t size = 16 / x.element_size();
  return width % size ? 1 : size;
}

// x [..., D] as [rows, D], as a kernel reads it: rows of contiguous numbers. On CUDA each row
// begins at a multiple of 16 bytes if the width of a part allows that.
inline at::Tensor rows_of(const at::Tensor& x, int64_t groups) {
  const at::Tensor rows = x.reshape({-1, x.size(-1)});
  const bool aligned_stride =
      !x.is_cuda() || rows.stride(0) % rowwise_vector(x, x.size(-1) / groups) == 0;
  return aligned(rows.stride(1) == 1 && aligned_stride ? rows : rows.contiguous());
}

template <class F>
struct RowwiseFunction : torch::autograd::Function<RowwiseFunction<F>> {
  using Tensors = torch::autograd::variable_list;

  static constexpr bool kHasParameters = F::kParameters > 0;
  static constexpr size_t kFirstStatistic = F::kInputs + kHasParameters;

  static Rowwise<F> describe(const Tensors& saved, double eps, int64_t groups) {
    const at::Tensor& x = saved[0];
    Rowwise<F> p{kernel_dtype(x.scalar_type()),
                 x.size(0),
                 groups,
                 x.size(1) / groups,
                 eps,
                 {},
                 {},
                 {},
                 {},
                 {}};
    for (int n = 0; n < F::kInputs; ++n) {
      p.in[n] = data(saved[n]);
      p.row_stride[n] = saved[n].stride(0);
    }
    if (kHasParameters) p.parameters = data(saved[F::kInputs]);
    for (int n = 0; n < F::kStatistics; ++n)
      p.statistics[n] = data(saved[kFirstStatistic + size_t(n)]);
    return p;
  }

  // in: inputs [rows, D] and, if there are any, the parameters [kParameters, D] and after them the
  // statistics [rows, groups].
  static Tensors forward(torch::autograd::AutogradContext* ctx, at::TensorList in, double eps,
                         int64_t groups) {
    const Tensors saved = in.vec();
    Tensors out;
    Rowwise<F> p = describe(saved, eps, groups);
    for (int n = 0; n < F::kOutputs; ++n) {
      const auto dtype = saved[0].scalar_type();
      out.push_back(
          at::empty(saved[0].sizes(),
                    saved[0].options().dtype(n < F::kRealOutputs ? real_dtype(dtype) : dtype)));
      p.out[n] = data(out[n]);
    }
    dispatch(
        saved[0].device(), [&](const auto& pool) { cpu::rowwise(p, pool); },
        [&](auto stream) { cuda::rowwise(p, stream); });
    ctx->save_for_backward(saved);
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["groups"] = groups;
    return out;
  }

  static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& gradients) {
    const Tensors saved = ctx->get_saved_variables();
    const at::Device device = saved[0].device();
    RowwiseBackward<F> bwd{
        describe(saved, ctx->saved_data["eps"].toDouble(), ctx->saved_data["groups"].toInt()),
        {},
        {},
        {},
        nullptr};
    Tensors dout;
    Tensors din;
    for (int n = 0; n < F::kOutputs; ++n) {
      dout.push_back(aligned(gradients[n].contiguous()));
      bwd.dout[n] = data(dout[n]);
    }
    for (int n = 0; n < F::kInputs; ++n) {
      din.push_back(gradient_memory(saved[n]));
      bwd.din[n] = data(din[n]);
      bwd.din_stride[n] = din[n].stride(0);
    }
    if (kHasParameters) din.push_back(at::empty_like(saved[F::kInputs]));
    bwd.dparameters = kHasParameters ? data(din.back()) : nullptr;
    for (int n = 0; n < F::kStatistics; ++n) {
      din.push_back(at::empty_like(saved[kFirstStatistic + size_t(n)]));
      bwd.dstatistics[n] = data(din.back());
    }
    dispatch(
        device,
        [&](const auto& pool) {
          const at::Tensor scratch = workspace(cpu::workspace_bytes(bwd), device);
          cpu::rowwise(bwd, scratch.data_ptr(), pool);
        },
        [&](auto stream) {
          const at::Tensor scratch = workspace(cuda::workspace_bytes(bwd), device);
          cuda::rowwise(bwd, scratch.data_ptr(), stream);
        });
    din.insert(din.end(), {at::Tensor(), at::Tensor()});  // eps and groups have no gradient
    return din;
  }
};

// Whether there are kernels for inputs like x: on CUDA a part is limited to the threads of a block.
inline bool has_rowwise_kernel(const at::Tensor& x, int64_t groups) {
  if (x.numel() == 0) return false;
  const int64_t width = x.size(-1) / groups;
  return x.is_cpu() ||
         (on_gpu(x.device()) && width / rowwise_vector(x, width) <= cuda::kMaxRowwiseThreads);
}

struct NamedTensor {
  const char* name;
  const at::Tensor& tensor;
};

// ValueError naming the argument unless all have the shape [..., D], dtype and device of the first,
// with D a multiple of `heads`.
inline void check_sequences(const char* op, int64_t heads,
                            const std::vector<NamedTensor>& sequences) {
  const auto& [name, x] = sequences[0];
  TORCH_CHECK_VALUE(x.dim() > 0 && x.numel() > 0, op, ": ", name, " has shape ", x.sizes(),
                    ", expected [..., D]");
  TORCH_CHECK_VALUE(heads >= 1 && x.size(-1) % heads == 0, op, ": heads = ", heads,
                    " does not divide D = ", x.size(-1));
  for (const NamedTensor& other : sequences) {
    check_shape(op, other.name, other.tensor, x.sizes(), name);
    check_like(op, other.name, other.tensor, name, x);
  }
}

// The outputs for inputs of one shape [..., D], parameters [D] and statistics [..., groups]. Inputs
// are promoted to one dtype, which is that of the outputs that are not real.
template <class F>
torch::autograd::variable_list rowwise(const std::vector<at::Tensor>& inputs,
                                       const std::vector<at::Tensor>& parameters, double eps,
                                       int64_t groups,
                                       const std::vector<at::Tensor>& statistics = {}) {
  auto dtype = inputs[0].scalar_type();
  for (const at::Tensor& x : inputs) dtype = at::promote_types(dtype, x.scalar_type());
  const auto wide = dtype == at::kHalf ? at::kFloat : dtype;
  std::vector<at::Tensor> in;
  for (const at::Tensor& x : inputs) in.push_back(rows_of(x.to(wide), groups));
  if (F::kParameters == 1) in.push_back(aligned(parameter(parameters[0], real_dtype(wide))));
  if (F::kParameters > 1) in.push_back(at::stack(parameters).to(real_dtype(wide)));
  for (const at::Tensor& x : statistics) in.push_back(parameter(x, real_dtype(wide)));
  auto out = RowwiseFunction<F>::apply(at::TensorList(in), eps, groups);
  for (size_t n = 0; n < out.size(); ++n) {
    out[n] = out[n].view(inputs[0].sizes());
    if (n >= F::kRealOutputs) out[n] = out[n].to(dtype);
  }
  return out;
}

}  // namespace assay::ops
