// Device memory, which is given back early as CUDA's is, and pinned memory of the host.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

#include "streams.h"

namespace sim {

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

// The memory is not given out again before what is queued on `stream` when it is freed has ended.
void record_stream(const c10::DataPtr& data, StreamNumber stream);

bool is_pinned(const void* data);
// Likewise for pinned memory: a copy that is queued now uses it until `moment`.
void record_pinned(const void* data, const MomentPtr& moment);

constexpr unsigned char kPoison = 0xFF;  // a NaN in every floating-point type, and -1

struct MemoryUse {
  std::size_t allocated = 0;
  std::size_t most_allocated = 0;
  std::size_t reserved = 0;
};
MemoryUse memory_use(int device);
void reset_most_allocated(int device);

}  // namespace sim
