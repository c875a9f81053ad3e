// Automatic casts, for the operators that small models are made of.
//
// torch has a table of these for each device it knows; it comes with a header that takes longer to
// compile than the rest of this device. Boxed, one function per rule does.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "backend.h"

namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}

namespace sim {

namespace {

using Stack = torch::jit::Stack;

at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype) {
  const bool is_ours = tensor.defined() && tensor.device().type() == kType;
  const bool is_cast = is_ours && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble;
  return is_cast ? tensor.to(dtype) : tensor;
}

void call_cast(const c10::OperatorHandle& op, Stack* stack, at::ScalarType dtype) {
  const c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  const std::size_t count = op.schema().arguments().size();
  for (std::size_t i = stack->size() - count; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) value = cast(value.toTensor(), dtype);
    if (value.isTensorList()) {
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector())
        tensors.push_back(cast(tensor, dtype));
      value = tensors;
    }
  }
  op.callBoxed(stack);
}

void lower_precision(const c10::OperatorHandle& op, Stack* stack) {
  call_cast(op, stack, at::autocast::get_autocast_dtype(kType));
}

void full_precision(const c10::OperatorHandle& op, Stack* stack) {
  call_cast(op, stack, at::kFloat);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name :
       {"conv1d", "conv2d", "conv3d", "conv_transpose2d.input", "linear", "matmul", "mm", "bmm",
        "addmm", "baddbmm", "einsum", "scaled_dot_product_attention"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&lower_precision>());
  for (const char* name :
       {"softmax.int", "log_softmax.int", "layer_norm", "group_norm", "nll_loss", "nll_loss_nd",
        "cross_entropy_loss", "mse_loss", "binary_cross_entropy_with_logits", "exp", "log",
        "pow.Tensor_Scalar", "cumsum", "sum", "sum.dim_IntList", "norm.Scalar"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&full_precision>());
}

}  // namespace sim
