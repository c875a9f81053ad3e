// Tensors of the device as kernels see them.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "shadow.h"

namespace sim {

// The same memory as a tensor of the CPU. It owns nothing: by the time a kernel runs, the memory
// may have been freed, as on a device. So it may be kept and dropped by the threads of streams.
at::Tensor on_cpu(const at::Tensor& tensor);

// The bytes of a tensor, in pieces where it has gaps, so that neighbours in one buffer do not meet.
void add_touches(const at::Tensor& tensor, bool writes, std::vector<Touch>& touches);

// What kernels run under: no autograd, and errors that say what happened and not where in torch.
void run_below_autograd(const std::function<void()>& body);

}  // namespace sim
