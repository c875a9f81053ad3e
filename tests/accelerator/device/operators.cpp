// Operators: one rule for nearly all of them.
//
// An operator that torch has no kernel for on this device arrives in `queued`, boxed. What it
// returns is found at once, without data, by calling it on tensors of the `meta` device; memory for
// that is allocated, and the CPU's kernel is queued to run later over the same memory. Which
// arguments are written is what the operator's schema says.
#include "operators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "backend.h"
#include "memory.h"

namespace sim {

namespace {

using Stack = torch::jit::Stack;

// A view with more gaps than this counts as touching what lies between.
constexpr std::int64_t kMostPieces = 4096;

// What these return depends on the data: the host has to wait, as it does on CUDA.
const std::unordered_set<std::string>& shaped_by_data() {
  static const auto& names = *new std::unordered_set<std::string>{
      "aten::nonzero",      "aten::masked_select", "aten::bincount",
      "aten::_unique",      "aten::_unique2",      "aten::unique_dim",
      "aten::equal",        "aten::unique_consecutive",
      "aten::unique_dim_consecutive", "aten::repeat_interleave",
  };
  return names;
}

// Arguments that are written though the schema does not say so.
const std::unordered_map<std::string, std::vector<std::size_t>>& silently_written() {
  static const auto& arguments = *new std::unordered_map<std::string, std::vector<std::size_t>>{
      {"aten::native_batch_norm", {3, 4}},  // running_mean, running_var
  };
  return arguments;
}

at::Tensor on_meta(const at::Tensor& tensor) {
  // Numbers of Python stay what they are: they count for less where types are promoted.
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

// One call of an operator: its arguments as the kernel will see them, and as the meta kernel does.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const c10::OperatorHandle& device_op, const Stack* stack)
      : op_(op),
        schema_(op.schema()),
        name_(schema_.name()),
        device_name_(device_op.schema().name()) {
    const std::size_t count = schema_.arguments().size();
    arguments_.assign(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
    find_device();
    replace_masks();
  }

  int device() const { return device_; }

  void queue(Stack* stack);

 private:
  void find_device();
  void replace_masks();
  void keep_format(std::vector<c10::IValue>& results) const;
  bool is_written(std::size_t argument) const;
  c10::IValue kernel_argument(const c10::IValue& value, bool writes);
  at::Tensor kernel_tensor(const at::Tensor& tensor, bool writes);
  c10::IValue meta_argument(const c10::IValue& value) const;
  bool returns_only_arguments() const;
  std::vector<c10::IValue> meta_results();
  void resize_outs(const std::vector<c10::IValue>& meta_arguments);
  void queue_kernel(
      std::vector<at::Tensor> outputs, Stack* stack, const std::vector<c10::IValue>& results);
  void wait_and_return(Stack* stack, const std::string& why);

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  const std::string device_name_;
  std::vector<c10::IValue> arguments_;
  std::vector<c10::IValue> kernel_arguments_;
  std::vector<Touch> touches_;
  int device_ = -1;
};

void Call::find_device() {
  const auto consider = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kType) return;
    if (device_ < 0) device_ = tensor.device().index();
    TORCH_CHECK(
        device_ == tensor.device().index(), name_, ": expected all tensors on one device, found ",
        torch_device(device_), " and ", tensor.device());
  };
  for (const c10::IValue& value : arguments_) {
    if (value.isTensor()) consider(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) consider(tensor);
    if (value.isOptionalTensorList())
      for (const auto& tensor : value.toOptionalTensorVector())
        if (tensor) consider(*tensor);
  }
  if (device_ < 0) device_ = current_device();
}

// Masks among indices are turned into numbers first, for which the host has to wait, as on CUDA.
void Call::replace_masks() {
  for (c10::IValue& value : arguments_) {
    if (!value.isOptionalTensorList()) continue;
    c10::List<std::optional<at::Tensor>> indices;
    for (const auto& index : value.toOptionalTensorVector()) {
      if (index && index->defined() && index->scalar_type() == at::kBool)
        for (const at::Tensor& numbers : index->nonzero().unbind(1)) indices.push_back(numbers);
      else
        indices.push_back(index);
    }
    value = indices;
  }
}

// The meta kernel of convolutions does not see which format the kernels of this device prefer.
void Call::keep_format(std::vector<c10::IValue>& results) const {
  if (name_ != "aten::convolution" && name_ != "aten::convolution_backward") return;
  const std::size_t input = name_ == "aten::convolution" ? 0 : 1;
  const auto is_last = [&](std::size_t argument) {
    const at::Tensor& tensor = arguments_[argument].toTensor();
    return tensor.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  };
  if (!is_last(input) && !is_last(input + 1)) return;
  for (c10::IValue& result : results)
    if (result.isTensor() && result.toTensor().defined() && result.toTensor().dim() == 4)
      result = result.toTensor().contiguous(at::MemoryFormat::ChannelsLast);
}

bool Call::is_written(std::size_t argument) const {
  const auto* alias = schema_.arguments()[argument].alias_info();
  if (alias != nullptr && alias->isWrite()) return true;
  const auto silent = silently_written().find(name_);
  if (silent == silently_written().end()) return false;
  return std::find(silent->second.begin(), silent->second.end(), argument) != silent->second.end();
}

at::Tensor Call::kernel_tensor(const at::Tensor& tensor, bool writes) {
  if (!tensor.defined()) return tensor;
  if (tensor.device().type() == kType) {
    add_touches(tensor, writes, touches_);
    return on_cpu(tensor);
  }
  TORCH_CHECK(
      tensor.is_cpu() && tensor.dim() == 0 && !writes, name_,
      ": expected all tensors on one device, found sim:", device_, " and ", tensor.device());
  // A number of the host goes with the launch.
  at::Tensor number = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
}

c10::IValue Call::kernel_argument(const c10::IValue& value, bool writes) {
  if (value.isTensor()) return kernel_tensor(value.toTensor(), writes);
  if (value.isTensorList()) {
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector())
      tensors.push_back(kernel_tensor(tensor, writes));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto& tensor : value.toOptionalTensorVector())
      tensors.push_back(tensor ? std::optional(kernel_tensor(*tensor, writes)) : std::nullopt);
    return tensors;
  }
  if (value.isDevice()) return c10::Device(c10::DeviceType::CPU);
  if (value.isGenerator()) return at::detail::createCPUGenerator(next_seed(value.toGenerator()));
  return value;
}

c10::IValue Call::meta_argument(const c10::IValue& value) const {
  if (value.isTensor()) return on_meta(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(on_meta(tensor));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto& tensor : value.toOptionalTensorVector())
      tensors.push_back(tensor ? std::optional(on_meta(*tensor)) : std::nullopt);
    return tensors;
  }
  if (value.isDevice()) return c10::Device(c10::DeviceType::Meta);
  if (value.isGenerator()) return c10::IValue();
  return value;
}

bool Call::returns_only_arguments() const {
  for (const c10::Argument& result : schema_.returns())
    if (result.alias_info() == nullptr || !result.alias_info()->isWrite()) return false;
  return true;
}

std::vector<c10::IValue> Call::meta_results() {
  Stack stack;
  for (const c10::IValue& argument : arguments_) stack.push_back(meta_argument(argument));
  const std::vector<c10::IValue> given(stack.begin(), stack.end());
  op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  resize_outs(given);
  return {stack.begin(), stack.end()};
}

// `out=` tensors may be of another size until the operator has said which it wants.
void Call::resize_outs(const std::vector<c10::IValue>& meta_arguments) {
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    if (!schema_.arguments()[i].is_out() || !arguments_[i].isTensor()) continue;
    const at::Tensor& wanted = meta_arguments[i].toTensor();
    const at::Tensor& given = arguments_[i].toTensor();
    if (given.sizes() == wanted.sizes()) continue;
    given.resize_(wanted.sizes());
    if (given.strides() != wanted.strides()) given.as_strided_(wanted.sizes(), wanted.strides());
  }
}

void Call::queue(Stack* stack) {
  if (shaped_by_data().count(name_)) return wait_and_return(stack, "data of " + name_);
  const bool has_meta = op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
  const bool has_outs = std::any_of(
      schema_.arguments().begin(), schema_.arguments().end(),
      [](const c10::Argument& argument) { return argument.is_out(); });
  std::vector<c10::IValue> results;
  if (returns_only_arguments()) {
    if (has_outs && has_meta) meta_results();
  } else {
    if (!has_meta) return wait_and_return(stack, "no shape rule for " + name_);
    try {
      results = meta_results();
    } catch (const c10::NotImplementedError&) {
      return wait_and_return(stack, "no shape rule for " + name_);
    }
    keep_format(results);
  }
  std::vector<at::Tensor> outputs;
  const auto made = [&](const at::Tensor& meta) {
    if (!meta.defined()) return meta;
    outputs.push_back(at::empty_strided(
        meta.sizes(), meta.strides(), meta.options().device(torch_device(device_))));
    return outputs.back();
  };
  for (c10::IValue& result : results) {
    if (result.isTensor()) {
      result = made(result.toTensor());
    } else if (result.isTensorList()) {
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& meta : result.toTensorVector()) tensors.push_back(made(meta));
      result = tensors;
    } else if (!result.isNone()) {
      return wait_and_return(stack, "value of " + name_);
    }
  }
  queue_kernel(std::move(outputs), stack, results);
}

std::vector<at::Tensor> defined_tensors(const Stack& results) {
  std::vector<at::Tensor> all;
  for (const c10::IValue& result : results) {
    if (result.isTensor() && result.toTensor().defined()) all.push_back(result.toTensor());
    if (result.isTensorList())
      for (const at::Tensor& tensor : result.toTensorVector())
        if (tensor.defined()) all.push_back(tensor);
  }
  return all;
}

void Call::queue_kernel(
    std::vector<at::Tensor> outputs, Stack* stack, const std::vector<c10::IValue>& results) {
  for (std::size_t i = 0; i < arguments_.size(); ++i)
    kernel_arguments_.push_back(kernel_argument(arguments_[i], is_written(i)));
  // A random operator that was given no generator uses the device's own.
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    if (schema_.arguments()[i].name() != "generator" || !arguments_[i].isNone()) continue;
    const auto& generator = at::globalContext().defaultGenerator(torch_device(device_));
    kernel_arguments_[i] = at::detail::createCPUGenerator(next_seed(generator));
  }
  std::vector<at::Tensor> targets;
  for (const at::Tensor& output : outputs) {
    add_touches(output, true, touches_);
    targets.push_back(on_cpu(output));
  }
  // Kernels resize `out=` tensors on their way, which memory of the device does not allow: they get
  // tensors of their own, and what they return is copied as other results are.
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    if (!schema_.arguments()[i].is_out() || !arguments_[i].isTensor()) continue;
    const at::Tensor target = kernel_arguments_[i].toTensor();
    targets.push_back(target);
    kernel_arguments_[i] = at::empty_strided(target.sizes(), target.strides(), target.options());
  }
  launch(
      current_stream(device_), interned(device_name_), touches_,
      [op = op_, arguments = kernel_arguments_, targets] {
        run_below_autograd([&] {
          Stack kernel_stack(arguments.begin(), arguments.end());
          op.callBoxed(&kernel_stack);
          if (targets.empty()) return;
          const std::vector<at::Tensor> computed = defined_tensors(kernel_stack);
          TORCH_CHECK(computed.size() == targets.size(), "returned not what its meta kernel did");
          for (std::size_t i = 0; i < targets.size(); ++i) targets[i].copy_(computed[i]);
        });
      });

  Stack returned;
  if (results.empty() && !schema_.returns().empty()) {
    // In-place and `out=` operators return their arguments, matched by the names of the schema.
    for (const c10::Argument& result : schema_.returns())
      for (std::size_t i = 0; i < arguments_.size(); ++i) {
        const auto* alias = schema_.arguments()[i].alias_info();
        if (alias != nullptr && *alias == *result.alias_info()) {
          returned.push_back(arguments_[i]);
          break;
        }
      }
  } else {
    returned.assign(results.begin(), results.end());
  }
  torch::jit::drop(*stack, arguments_.size());
  for (c10::IValue& value : returned) stack->push_back(std::move(value));
}

// The kernel runs in its place on the stream; the host waits for it, sees what it has made, and
// queues the copy of that into memory it can allocate only now.
void Call::wait_and_return(Stack* stack, const std::string& why) {
  for (std::size_t i = 0; i < arguments_.size(); ++i)
    kernel_arguments_.push_back(kernel_argument(arguments_[i], is_written(i)));
  auto computed = std::make_shared<Stack>();
  const StreamNumber stream = current_stream(device_);
  launch(
      stream, interned(device_name_), touches_,
      [op = op_, arguments = kernel_arguments_, computed] {
        run_below_autograd([&] {
          Stack kernel_stack(arguments.begin(), arguments.end());
          op.callBoxed(&kernel_stack);
          *computed = std::move(kernel_stack);
        });
      });
  host_wait(record(stream), why);
  const auto on_device = [&](const at::Tensor& result) {
    at::Tensor output = at::empty_strided(
        result.sizes(), result.strides(), result.options().device(torch_device(device_)));
    std::vector<Touch> touches;
    add_touches(output, true, touches);
    launch(stream, interned(device_name_), touches, [target = on_cpu(output), result] {
      run_below_autograd([&] { target.copy_(result); });
    });
    return output;
  };
  torch::jit::drop(*stack, arguments_.size());
  for (std::size_t i = 0; i < computed->size(); ++i) {
    const c10::IValue& result = (*computed)[i];
    stack->push_back(
        result.isTensor() && result.toTensor().defined() ? on_device(result.toTensor()) : result);
  }
}

void queued_as(const c10::OperatorHandle& op, const c10::OperatorHandle& device_op, Stack* stack) {
  at::AutoDispatchBelowAutograd no_autograd;
  Call call(op, device_op, stack);
  const c10::DeviceGuard guard(torch_device(call.device()));
  call.queue(stack);
}

void queued(const c10::OperatorHandle& op, Stack* stack) { queued_as(op, op, stack); }

c10::OperatorHandle operator_named(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

// torch asks devices it does not know for convolutions under names of their own.
void convolution(const c10::OperatorHandle& op, Stack* stack) {
  static const auto& general = *new c10::OperatorHandle(operator_named("aten::convolution"));
  queued_as(general, op, stack);
}

void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  static const auto& general =
      *new c10::OperatorHandle(operator_named("aten::convolution_backward"));
  // The general one wants the bias's sizes after the weight.
  const std::size_t first = stack->size() - op.schema().arguments().size();
  const at::Tensor grad = (*stack)[first].toTensor();
  stack->insert(
      stack->begin() + static_cast<std::ptrdiff_t>(first) + 3,
      c10::IValue(std::vector<std::int64_t>{grad.size(1)}));
  queued_as(general, op, stack);
}

// The CPU's kernel takes no generator and would draw from the host's.
std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input, double p, std::optional<bool> train) {
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true)) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1.0 - p);
  const double scale = p == 1.0 ? 0.0 : 1.0 / (1.0 - p);
  return {input.mul(mask).mul_(scale), mask};
}

at::Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool> pin_memory,
    std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "only memory of the host can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "only memory of the host can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* tensor = self.unsafeGetTensorImpl();
  const std::size_t needed = at::detail::computeStorageNbytesContiguous(
      size, self.element_size(), self.storage_offset());
  if (self.storage().nbytes() < needed)
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  tensor->set_sizes_contiguous(size);
  if (format && *format != c10::MemoryFormat::Preserve) tensor->empty_tensor_restride(*format);
  return self;
}

at::Tensor as_strided(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
    std::optional<std::int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  return at::native::view(self, size);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

at::Tensor unfold(
    const at::Tensor& self, std::int64_t dim, std::int64_t size, std::int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage source, std::int64_t offset, c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

void record_tensor_on_stream(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), number_of(stream));
}

}  // namespace

at::Tensor on_cpu(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.dtype());
  void* data = tensor.unsafeGetTensorImpl()->mutable_data();
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(data, tensor.sizes(), tensor.strides(), options);
}

void add_touches(const at::Tensor& tensor, bool writes, std::vector<Touch>& touches) {
  if (tensor.numel() == 0) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.unsafeGetTensorImpl()->data());
  const auto element = static_cast<std::uintptr_t>(tensor.element_size());
  if (tensor.is_non_overlapping_and_dense()) {
    touches.push_back({begin, begin + tensor.numel() * element, writes});
    return;
  }
  // The innermost dimensions that lie close together make one piece.
  std::int64_t dense = 1;
  std::int64_t dim = tensor.dim();
  while (dim > 0 && (tensor.stride(dim - 1) == dense || tensor.size(dim - 1) == 1))
    dense *= tensor.size(--dim);
  std::int64_t pieces = 1;
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    if (i < dim) pieces *= tensor.size(i);
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  if (pieces > kMostPieces) {
    touches.push_back({begin, begin + (last + 1) * element, writes});
    return;
  }
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    std::int64_t rest = piece;
    std::int64_t offset = 0;
    for (std::int64_t i = dim - 1; i >= 0; --i) {
      offset += rest % tensor.size(i) * tensor.stride(i);
      rest /= tensor.size(i);
    }
    const std::uintptr_t from = begin + offset * element;
    touches.push_back({from, from + dense * element, writes});
  }
}

void run_below_autograd(const std::function<void()>& body) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  try {
    body();
  } catch (const c10::Error& error) {
    throw std::runtime_error(error.what_without_backtrace());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&queued>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("record_stream", record_tensor_on_stream);
  m.impl("native_dropout", native_dropout);
  // torch would take these apart, or look at masks twice, before the rule above gets them.
  for (const char* name : {"index.Tensor", "native_layer_norm", "native_group_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&queued>());
  // Operators over lists of tensors are one kernel, as on CUDA. Copies may be between devices.
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames())
    if (op.name.rfind("aten::_foreach_", 0) == 0 && op.name != "aten::_foreach_copy_" &&
        op.overload_name.find("out") == std::string::npos)
      m.impl(
          toString(op).c_str(), torch::CppFunction::makeFromBoxedFunction<&queued>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace sim
