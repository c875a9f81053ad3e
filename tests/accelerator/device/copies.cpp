// Copies between host and device, and what they make the host wait for.
//
// As on CUDA: only a copy of pinned memory with non_blocking=True leaves the host free. Its source
// is read, or its destination written, when the stream gets there, so who changes or reads the
// memory on the host too early does damage; a destination is poisoned at once, so that it is seen.
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <algorithm>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "backend.h"
#include "memory.h"
#include "operators.h"

namespace sim {

namespace {

bool is_of_device(const at::Tensor& tensor) { return tensor.device().type() == kType; }

void queue_copy(
    StreamNumber stream, const char* name, const at::Tensor& from, const at::Tensor& to) {
  // Memory of the host is only kept track of where it is pinned: the host waits for other copies.
  const auto is_tracked = [](const at::Tensor& tensor) {
    return is_of_device(tensor) || is_pinned(tensor.data_ptr());
  };
  std::vector<Touch> touches;
  if (is_tracked(from)) add_touches(from, false, touches);
  if (is_tracked(to)) add_touches(to, true, touches);
  launch(stream, interned(name), touches, [source = on_cpu(from), target = on_cpu(to)] {
    run_below_autograd([&] { target.copy_(source); });
  });
}

void copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  const StreamNumber stream = current_stream(from.device().index());
  const StreamNumber other = current_stream(to.device().index());
  // Between two devices the source's stream copies, and both streams wait for each other.
  if (stream != other) wait_for(stream, record(other));
  queue_copy(stream, "copy device to device", from, to);
  if (stream != other) wait_for(other, record(stream));
}

void poison(const at::Tensor& tensor) {
  std::vector<Touch> pieces;
  add_touches(tensor, true, pieces);
  for (const Touch& piece : pieces)
    std::memset(reinterpret_cast<void*>(piece.begin), kPoison, piece.end - piece.begin);
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const StreamNumber stream = current_stream(from.device().index());
  const bool is_free = non_blocking && is_pinned(to.data_ptr());
  if (is_free) {
    std::lock_guard<std::recursive_mutex> lock(order_mutex());
    std::vector<Touch> pieces;
    add_touches(to, true, pieces);
    const Clock host = host_clock();
    const bool quiet = std::all_of(pieces.begin(), pieces.end(), [&](const Touch& piece) {
      return shadow().is_quiet(piece.begin, piece.end, host);
    });
    // Copies that are queued already still need what is there.
    if (quiet)
      poison(to);
    else
      run_in_order(stream, [target = on_cpu(to)] { poison(target); });
  }
  queue_copy(stream, "copy device to host", from, to);
  const MomentPtr end = record(stream);
  if (is_free)
    record_pinned(to.data_ptr(), end);
  else
    host_wait(end, non_blocking ? "copy to memory that is not pinned" : "copy to the host");
}

void copy_from_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const StreamNumber stream = current_stream(to.device().index());
  queue_copy(stream, "copy host to device", from, to);
  const MomentPtr end = record(stream);
  if (non_blocking && is_pinned(from.data_ptr()))
    record_pinned(from.data_ptr(), end);
  else
    host_wait(end, non_blocking ? "copy from memory that is not pinned" : "copy from the host");
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const at::Tensor from = self.expand_as(dst);
  if (from.numel() == 0) return dst;
  const auto nbytes = static_cast<std::int64_t>(dst.nbytes());
  const auto count = [&](std::int64_t& counter) {
    std::lock_guard<std::recursive_mutex> lock(order_mutex());
    counter += nbytes;
  };
  if (is_of_device(from) && is_of_device(dst)) {
    count(counters().bytes_on_device);
    copy_on_device(from, dst);
  } else if (is_of_device(from)) {
    count(counters().bytes_to_host);
    copy_to_host(from, dst, non_blocking);
  } else {
    count(counters().bytes_to_device);
    copy_from_host(from, dst, non_blocking);
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  at::Tensor value = at::empty({}, at::TensorOptions().dtype(self.dtype()));
  {
    std::lock_guard<std::recursive_mutex> lock(order_mutex());
    counters().bytes_to_host += static_cast<std::int64_t>(value.nbytes());
  }
  const StreamNumber stream = current_stream(self.device().index());
  queue_copy(stream, "copy device to host", self, value);
  host_wait(record(stream), "item");
  return value.item();
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
}

}  // namespace sim
