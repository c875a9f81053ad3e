// What torch asks of a device: guards, streams and events, hooks, generators, and DDP's timer.
#include "backend.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <cstring>

#include "memory.h"

namespace sim {

namespace {

struct Event {
  MomentPtr moment;
  bool is_timed = false;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const int before = current_device();
    if (device.has_index()) set_current_device(device.index());
    return torch_device(before);
  }
  c10::Device getDevice() const override { return torch_device(current_device()); }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchangeDevice(device); }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }

  c10::Stream getStream(c10::Device device) const override {
    return torch_stream(current_stream(indexed(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return torch_stream(default_stream(indexed(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return torch_stream(pool_stream(indexed(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return torch_stream(new_stream(indexed(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const StreamNumber before = current_stream(stream.device_index());
    set_current_stream(number_of(stream));
    return torch_stream(before);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<std::uintptr_t>(number_of(stream)));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return host_sees_end_of(number_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_wait(sim::record(number_of(stream)), "stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    host_wait_for_device(device < 0 ? current_device() : device, "device.synchronize");
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex,
      const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new Event{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT};
    static_cast<Event*>(*event)->moment = sim::record(number_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait_for(number_of(stream), static_cast<Event*>(event)->moment);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || host_sees(static_cast<Event*>(event)->moment);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) host_wait(static_cast<Event*>(event)->moment, "event.synchronize");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "both events must be recorded before time between them is asked");
    const auto* start = static_cast<Event*>(first);
    const auto* end = static_cast<Event*>(second);
    TORCH_CHECK(
        start->is_timed && end->is_timed, "events that time are made with enable_timing=True");
    TORCH_CHECK(
        host_sees(start->moment) && host_sees(end->moment),
        "both events must have been reached before time between them is asked");
    return static_cast<double>(end->moment->reached_ns() - start->moment->reached_ns()) * 1e-6;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, number_of(stream));
  }

 private:
  static int indexed(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
};

// A seed, and how often it was asked for a number.
class GeneratorImpl final : public c10::GeneratorImpl {
 public:
  explicit GeneratorImpl(int device)
      : c10::GeneratorImpl(
            torch_device(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(std::uint64_t seed) override { state_ = {seed, 0}; }
  std::uint64_t current_seed() const override { return state_.seed; }
  void set_offset(std::uint64_t offset) override { state_.offset = offset; }
  std::uint64_t get_offset() const override { return state_.offset; }
  std::uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state_.seed;
  }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == sizeof(state_), "this is no state of a simulated device");
    std::memcpy(&state_, state.data(), sizeof(state_));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({static_cast<std::int64_t>(sizeof(state_))}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), &state_, sizeof(state_));
    return state.getIntrusivePtr();
  }

  // splitmix64 again: any two calls give seeds that have nothing to do with each other.
  std::uint64_t next() {
    std::uint64_t x = state_.seed + 0x9e3779b97f4a7c15ULL * ++state_.offset;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
  }

 private:
  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device().index());
    copy->state_ = state_;
    return copy;
  }

  struct State {
    std::uint64_t seed = c10::detail::getNonDeterministicRandom();
    std::uint64_t offset = 0;
  } state_;
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const int before = current_device();
    if (device >= 0) set_current_device(device);
    return static_cast<c10::DeviceIndex>(before);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }

  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static auto& generators = *new std::vector<at::Generator>([] {
      std::vector<at::Generator> all;
      for (int each = 0; each < device_count(); ++each)
        all.push_back(at::make_generator<GeneratorImpl>(each));
      return all;
    }());
    return generators.at(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(device < 0 ? current_device() : device);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t nbytes) const override {
    c10::DataPtr data;
    {
      const c10::DeviceGuard guard(storage.device());
      data = device_allocator()->allocate(nbytes);
      const std::size_t kept = std::min(nbytes, storage.nbytes());
      if (kept > 0) device_allocator()->copy_data(data.get(), storage.data(), kept);
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(nbytes);
  }
};

// DDP's reducer times its passes with this, on the current stream as it does on CUDA. What it
// measures it asks for some steps later, and waits for the events then.
class Timer final : public c10d::Timer {
 public:
  explicit Timer(c10::Device device) : device_(device) {}

  void record(Event event) override {
    c10d::Timer::record(event);
    moments_[event] = sim::record(current_stream(device_.index()));
  }

  std::optional<std::int64_t> measureDifference(Event start, Event end) override {
    const auto first = moments_.find(start);
    const auto second = moments_.find(end);
    if (first == moments_.end() || second == moments_.end()) return std::nullopt;
    host_wait(first->second, "DDP's timer");
    host_wait(second->second, "DDP's timer");
    const std::int64_t difference_ns = second->second->reached_ns() - first->second->reached_ns();
    if (difference_ns < 0) return std::nullopt;
    return difference_ns;
  }

 private:
  const c10::Device device_;
  std::map<Event, MomentPtr> moments_;
};

const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kType, device_allocator());
  return true;
}();

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

std::uint64_t next_seed(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl())->next();
}

}  // namespace sim

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, sim::kType, sim::Timer)
}
