// Where torch's names for things and ours meet.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "streams.h"

namespace sim {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

inline c10::Device torch_device(int device) {
  return {kType, static_cast<c10::DeviceIndex>(device)};
}

// torch numbers the default stream of each device 0; ours have numbers of their own.
inline StreamNumber number_of(const c10::Stream& stream) {
  return stream.id() == 0 ? default_stream(stream.device_index())
                          : static_cast<StreamNumber>(stream.id());
}

inline c10::Stream torch_stream(StreamNumber number) {
  const int device = device_of(number);
  const c10::StreamId id = number == default_stream(device) ? 0 : number;
  return c10::Stream(c10::Stream::UNSAFE, torch_device(device), id);
}

// A seed for one call of a random operator.
std::uint64_t next_seed(at::Generator generator);

}  // namespace sim
