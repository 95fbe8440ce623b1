#include "ops/core/register.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <set>

#include "ops/core/paths.h"

namespace assay::ops {
namespace {

std::map<std::string, OperatorInfo>& operators() {
  static std::map<std::string, OperatorInfo> by_name;
  return by_name;
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

std::string backward_name(const std::string& name) { return "_" + name + "_backward"; }

bool is_tensor(const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); }
bool has_gradient(const c10::IValue& value) {
  return is_tensor(value) && at::isFloatingType(value.toTensor().scalar_type());
}

// Tensors without data, and tensors that Python traces.
bool is_traced(c10::DispatchKeySet keys) {
  return keys.has(c10::DispatchKey::Python) || keys.has(c10::DispatchKey::Functionalize) ||
         keys.has_backend(c10::BackendComponent::MetaBit);
}

// A contiguous tensor on the device "meta" with the sizes and the dtype of x.
at::Tensor stand_in(const at::Tensor& x) {
  std::vector<int64_t> sizes;
  for (const c10::SymInt& size : x.sym_sizes()) sizes.push_back(size.guard_int(__FILE__, __LINE__));
  return at::empty(sizes, at::TensorOptions().dtype(x.scalar_type()).device(at::kMeta));
}

// The last `count` values of the stack, which are removed from it.
Stack take(Stack* stack, size_t count) {
  Stack values(stack->end() - count, stack->end());
  stack->erase(stack->end() - count, stack->end());
  return values;
}

// One call of an operator whose gradient is the operator _<name>_backward.
struct Call : torch::CustomClassHolder {
  Call(const c10::OperatorHandle& op, Stack values, const std::vector<std::string>& constants)
      : op(op), arguments(std::move(values)), constant_results(constants) {}
  c10::OperatorHandle op;
  Stack arguments;  // those that hold tensors are empty
  std::vector<std::string> constant_results;
  std::vector<size_t> positions;  // indices of the tensors among the arguments

  Stack with(at::TensorList tensors) const {
    Stack values = arguments;
    for (size_t i = 0; i < positions.size(); ++i) values[positions[i]] = tensors[i];
    return values;
  }
};

struct TracedOperator : torch::autograd::Function<TracedOperator> {
  static variable_list forward(AutogradContext* ctx, const c10::intrusive_ptr<Call>& call,
                               at::TensorList tensors) {
    Stack stack = call->with(tensors);
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      call->op.callBoxed(stack);
    }
    variable_list results;
    variable_list constants;
    for (size_t i = 0; i < stack.size(); ++i) {
      results.push_back(stack[i].toTensor());
      const std::string& name = call->op.schema().returns()[i].name();
      const bool is_constant =
          std::ranges::find(call->constant_results, name) != call->constant_results.end();
      if (is_constant || !has_gradient(stack[i])) constants.push_back(results.back());
    }
    ctx->mark_non_differentiable(constants);
    ctx->save_for_backward(tensors.vec());
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    ctx->set_materialize_grads(false);
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto call = c10::static_intrusive_pointer_cast<Call>(ctx->saved_data["call"].toCapsule());
    const variable_list tensors = ctx->get_saved_variables();
    c10::List<std::optional<at::Tensor>> present;
    for (const at::Tensor& gradient : gradients)
      present.push_back(gradient.defined() ? std::optional(gradient) : std::nullopt);
    Stack stack{present};
    for (const c10::IValue& value : call->with(tensors)) stack.push_back(value);
    const std::string name = call->op.schema().name();  // "assay::gla"
    const size_t colons = name.find("::") + 2;
    c10::Dispatcher::singleton()
        .findSchemaOrThrow((name.substr(0, colons) + backward_name(name.substr(colons))).c_str(),
                           "")
        .callBoxed(stack);
    const std::vector<at::Tensor> found = stack[0].toTensorVector();
    variable_list result{at::Tensor()};
    for (size_t next = 0; const at::Tensor& tensor : tensors)
      result.push_back(has_gradient(tensor) ? found[next++] : at::Tensor());
    return result;
  }
};

// With create_graph, torch records a backward pass, but the gradients of an operator are computed
// without a record. This hook gives them a record that raises when it is differentiated, because a
// second derivative would be without the part of the operator otherwise. The record leads to what
// the gradients depend on, so torch meets it on the way to any of these tensors.
class RefuseSecondDerivative : public torch::autograd::FunctionPostHook {
 public:
  RefuseSecondDerivative(std::string name, torch::autograd::edge_list arguments)
      : name_(std::move(name)), arguments_(std::move(arguments)) {}

  variable_list operator()(const variable_list& gradients,
                           const variable_list& of_results) override {
    if (!at::GradMode::is_enabled()) return gradients;
    torch::autograd::edge_list edges = arguments_;
    for (const at::Tensor& gradient : of_results)
      if (gradient.defined() && gradient.requires_grad())
        edges.push_back(torch::autograd::impl::gradient_edge(gradient));
    const auto error = std::make_shared<torch::autograd::Error>(name_ + " has no second derivative",
                                                                std::move(edges));
    variable_list recorded;
    for (const at::Tensor& gradient : gradients) {
      recorded.push_back(gradient.defined() ? gradient.detach() : gradient);
      if (gradient.defined()) torch::autograd::set_history(recorded.back(), error);
    }
    return recorded;
  }

 private:
  std::string name_;
  torch::autograd::edge_list arguments_;
};

// torch.autograd.grad(is_grads_batched=True) and what is made of it pass a batch of gradients at
// once, which has no memory that a kernel could read.
class RefuseBatchedGradients : public torch::autograd::FunctionPreHook {
 public:
  explicit RefuseBatchedGradients(std::string name) : name_(std::move(name)) {}
  variable_list operator()(const variable_list& gradients) override {
    for (const at::Tensor& gradient : gradients)
      TORCH_CHECK_NOT_IMPLEMENTED(
          !gradient.defined() ||
              !gradient.key_set().has_any(c10::DispatchKeySet(
                  {c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched})),
          name_,
          " cannot compute the gradients of several vectors at once (is_grads_batched, vectorize); "
          "ask for one vector at a time");
    return gradients;
  }

 private:
  std::string name_;
};

torch::autograd::edge_list gradient_edges(const Stack& arguments) {
  torch::autograd::edge_list edges;
  for (const c10::IValue& value : arguments)
    if (is_tensor(value) && value.toTensor().requires_grad())
      edges.push_back(torch::autograd::impl::gradient_edge(value.toTensor()));
  return edges;
}

void refuse_in_backward(const c10::OperatorHandle& op, const torch::autograd::edge_list& arguments,
                        const Stack& results) {
  std::set<torch::autograd::Node*> nodes;
  for (const c10::IValue& result : results)
    if (is_tensor(result) && result.toTensor().grad_fn())
      nodes.insert(result.toTensor().grad_fn().get());
  for (torch::autograd::Node* node : nodes) {
    node->add_post_hook(std::make_unique<RefuseSecondDerivative>(op.schema().name(), arguments));
    node->add_pre_hook(std::make_unique<RefuseBatchedGradients>(op.schema().name()));
  }
}

// Kernels read memory. So a tensor whose sign is a bit of torch, or which has no memory because it
// is zero, is written out first. Nothing would carry a forward-mode derivative to the results, so
// it is refused: torch takes results without one for constants.
void prepare_arguments(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& value = (*stack)[stack->size() - count + i];
    if (!is_tensor(value)) continue;
    const at::Tensor& tensor = value.toTensor();
    TORCH_CHECK_NOT_IMPLEMENTED(!tensor._fw_grad(/*level=*/0).defined(), op.schema().name(),
                                " has no forward-mode derivative (",
                                op.schema().arguments()[i].name(),
                                " has a tangent); use reverse mode (backward, autograd.grad)");
    if (tensor.is_neg()) value = tensor.resolve_neg();
    else if (tensor._is_zerotensor()) value = at::zeros(tensor.sizes(), tensor.options()) + tensor;
  }
}

class AutogradKernel : public c10::OperatorKernel {
 public:
  AutogradKernel(c10::KernelFunction function, std::vector<std::string> constant_results)
      : function_(std::move(function)), constant_results_(std::move(constant_results)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    if (!is_traced(keys)) {
      prepare_arguments(op, stack);
      const auto last = [&](const auto& values) {
        return Stack(stack->end() - std::ptrdiff_t(values.size()), stack->end());
      };
      const torch::autograd::edge_list edges = gradient_edges(last(op.schema().arguments()));
      function_.callBoxed(op, keys, stack);
      return refuse_in_backward(op, edges, last(op.schema().returns()));
    }
    const auto call = c10::make_intrusive<Call>(op, take(stack, op.schema().arguments().size()),
                                                constant_results_);
    variable_list tensors;
    for (size_t i = 0; i < call->arguments.size(); ++i) {
      if (!is_tensor(call->arguments[i])) continue;
      tensors.push_back(call->arguments[i].toTensor());
      call->positions.push_back(i);
      call->arguments[i] = c10::IValue();
    }
    for (const at::Tensor& result : TracedOperator::apply(call, at::TensorList(tensors)))
      stack->push_back(result);
  }

 private:
  c10::KernelFunction function_;
  std::vector<std::string> constant_results_;
};

class MetaKernel : public c10::OperatorKernel {
 public:
  explicit MetaKernel(c10::KernelFunction function) : function_(std::move(function)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    const at::NoGradGuard no_grad;
    const size_t first = stack->size() - op.schema().arguments().size();
    for (size_t i = first; i < stack->size(); ++i) {
      if (!is_tensor((*stack)[i])) continue;
      const at::Tensor tensor = (*stack)[i].toTensor();
      TORCH_CHECK_VALUE(tensor.is_meta(), op.schema().name(), ": ",
                        op.schema().arguments()[i - first].name(), " is on ", tensor.device(),
                        ", but another argument is on meta");
      (*stack)[i] = stand_in(tensor);
    }
    function_.callBoxed(op, keys, stack);
  }

 private:
  c10::KernelFunction function_;
};

// A new contiguous tensor with the numbers of x; zeros like `like` where x is undefined.
at::Tensor fresh(const at::Tensor& x, const at::Tensor& like) {
  if (!x.defined()) return at::zeros(like.sizes(), like.options());
  return x.clone(at::MemoryFormat::Contiguous);
}

// (gradients of the results, arguments) -> the gradient of each floating-point argument.
class BackwardKernel : public c10::OperatorKernel {
 public:
  explicit BackwardKernel(c10::KernelFunction function) : function_(std::move(function)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    Stack arguments = take(stack, op.schema().arguments().size());
    const auto gradients = arguments[0].toOptionalTensorList();
    arguments.erase(arguments.begin());
    // The caller may have switched autograd off for this thread.
    auto thread_keys = c10::impl::tls_local_dispatch_key_set();
    thread_keys.excluded_ =
        thread_keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
    const c10::impl::ForceDispatchKeyGuard with_autograd(thread_keys);
    const at::AutoGradMode with_gradient(true);
    variable_list leaves;
    for (c10::IValue& value : arguments) {
      if (!is_tensor(value)) continue;
      const at::Tensor tensor = value.toTensor().detach();
      if (has_gradient(value)) leaves.push_back(tensor.requires_grad_());
      value = tensor;
    }
    function_.callBoxed(op, keys, &arguments);
    variable_list results;
    variable_list seeds;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const std::optional<at::Tensor> gradient = gradients.get(i);
      const at::Tensor result = arguments[i].toTensor();
      if (!gradient || !gradient->defined() || !result.requires_grad()) continue;
      results.push_back(result);
      seeds.push_back(*gradient);
    }
    variable_list found(leaves.size());
    if (!results.empty())
      found = torch::autograd::grad(results, leaves, seeds, /*retain_graph=*/false,
                                    /*create_graph=*/false,
                                    /*allow_unused=*/true);
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < leaves.size(); ++i) found[i] = fresh(found[i], leaves[i]);
    stack->push_back(found);
  }

 private:
  c10::KernelFunction function_;
};

class BackwardMetaKernel : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) const {
    std::vector<at::Tensor> found;
    for (const c10::IValue& value : take(stack, op.schema().arguments().size()))
      if (has_gradient(value)) found.push_back(stand_in(value.toTensor()));
    stack->push_back(found);
  }
};

template <class Kernel, class... Arguments>
torch::CppFunction boxed(c10::DispatchKey key, Arguments&&... arguments) {
  return torch::dispatch(key, torch::CppFunction::makeFromBoxedFunctor(
                                  std::make_unique<Kernel>(std::forward<Arguments>(arguments)...)));
}

}  // namespace

void define_operator(torch::Library& library, const std::string& schema, const std::string& about,
                     const c10::KernelFunction& kernel,
                     const std::vector<std::string>& constant_results) {
  const size_t begin = schema.find('(');
  const size_t end = schema.find(") ->");
  const std::string name = schema.substr(0, begin);
  const std::string backward = backward_name(name);
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  operators()[name] = {name, schema, about};
  library.def(schema.c_str(), tags);
  library.impl(name.c_str(),
               boxed<AutogradKernel>(c10::DispatchKey::Autograd, kernel, constant_results));
  library.impl(name.c_str(), boxed<MetaKernel>(c10::DispatchKey::Meta, kernel));

  const std::string arguments = schema.substr(begin + 1, end - begin - 1);
  library.def((backward + "(Tensor?[] gradients, " + arguments + ") -> Tensor[]").c_str(), tags);
  for (const c10::DispatchKey key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA})
    library.impl(backward.c_str(), boxed<BackwardKernel>(key, kernel));
  library.impl(backward.c_str(), boxed<BackwardMetaKernel>(c10::DispatchKey::Meta));
}

std::vector<OperatorInfo> public_operators() {
  std::vector<OperatorInfo> found;
  for (const auto& [name, info] : operators()) found.push_back(info);
  return found;
}

}  // namespace assay::ops
