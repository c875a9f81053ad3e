#include "memory.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <vector>

namespace sim {

namespace {

constexpr std::size_t kGrain = 512;  // sizes are rounded up to it, so that more blocks fit again

std::size_t rounded(std::size_t nbytes) {
  return std::max(kGrain, (nbytes + kGrain - 1) / kGrain * kGrain);
}

struct Block {
  void* data;
  std::size_t nbytes;
  StreamNumber stream;                   // that it was allocated on, where it is freed to
  std::vector<StreamNumber> recorded{};  // others that have used it
  std::vector<MomentPtr> pending{};      // what these have still to reach

  std::uintptr_t begin() const { return reinterpret_cast<std::uintptr_t>(data); }
  std::uintptr_t end() const { return begin() + nbytes; }
};

struct StreamMemory {
  std::multimap<std::size_t, Block*> free;  // by size
  std::vector<Block*> unverified;           // freed since the last allocation
};

// All of it under order_mutex(). Memory is never unmapped: a kernel that comes too late reads what
// it should not, as on a device, and does not end the process.
struct DeviceMemory {
  std::map<StreamNumber, StreamMemory> streams;
  std::list<Block*> pending;  // freed, but recorded on streams that have not come so far
  std::map<int, MemoryUse> uses;
};

DeviceMemory& memory() {
  static DeviceMemory& memory = *new DeviceMemory;
  return memory;
}

const Name kAllocation = interned("allocation");
const Name kFree = interned("free");

void poison_in_order(const Block& block) {
  run_in_order(block.stream, [data = block.data, nbytes = block.nbytes] {
    std::memset(data, kPoison, nbytes);
  });
}

void reclaim(DeviceMemory& all) {
  all.pending.remove_if([&](Block* block) {
    for (const MomentPtr& moment : block->pending)
      if (!moment->is_reached()) return false;
    block->pending.clear();
    poison_in_order(*block);
    all.streams[block->stream].free.emplace(block->nbytes, block);
    return true;
  });
}

// Any allocation may get memory that was freed before it. So each one is the moment at which all
// uses of what was freed must be over for the stream that would get it, whether or not this very
// block is the one that is taken.
void verify(StreamMemory& stream, StreamNumber number) {
  if (stream.unverified.empty()) return;
  const Clock clock = clock_of(number);
  for (Block* block : stream.unverified)
    shadow().end_life(
        block->begin(), block->end(), Access{number, last_number(number), kFree}, clock,
        block->recorded);
  stream.unverified.clear();
}

Block* allocated(std::size_t nbytes, StreamNumber number) {
  DeviceMemory& all = memory();
  StreamMemory& stream = all.streams[number];
  verify(stream, number);
  reclaim(all);
  MemoryUse& use = all.uses[device_of(number)];
  Block* block = nullptr;
  auto found = stream.free.find(nbytes);
  if (found != stream.free.end()) {
    block = found->second;
    block->recorded.clear();
    stream.free.erase(found);
  } else {
    block = new Block{std::aligned_alloc(kGrain, nbytes), nbytes, number};
    TORCH_CHECK(block->data != nullptr, "the simulated device has no ", nbytes, " bytes left");
    std::memset(block->data, kPoison, nbytes);
    use.reserved += nbytes;
  }
  use.allocated += nbytes;
  use.most_allocated = std::max(use.most_allocated, use.allocated);
  // Who uses this on another stream must wait for the stream that got it: the block may come from
  // what that stream has yet to finish. New memory is treated the same, or it would depend on luck.
  shadow().begin_life(
      block->begin(), block->end(), Access{number, last_number(number), kAllocation});
  return block;
}

void release(void* context) {
  if (context == nullptr || is_closed()) return;
  std::lock_guard<std::recursive_mutex> lock(order_mutex());
  auto* block = static_cast<Block*>(context);
  DeviceMemory& all = memory();
  all.uses[device_of(block->stream)].allocated -= block->nbytes;
  all.streams[block->stream].unverified.push_back(block);
  if (block->recorded.empty()) {
    poison_in_order(*block);
    all.streams[block->stream].free.emplace(block->nbytes, block);
    return;
  }
  for (StreamNumber stream : block->recorded) block->pending.push_back(record(stream));
  all.pending.push_back(block);
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    const int device = current_device();
    const c10::Device where(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
    if (nbytes == 0) return {nullptr, nullptr, &release, where};
    std::lock_guard<std::recursive_mutex> lock(order_mutex());
    Block* block = allocated(rounded(nbytes), current_stream(device));
    return {block->data, block, &release, where};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    const auto begin = reinterpret_cast<std::uintptr_t>(from);
    const auto target = reinterpret_cast<std::uintptr_t>(to);
    launch(
        current_stream(current_device()), interned("copy_data"),
        {{begin, begin + nbytes, false}, {target, target + nbytes, true}},
        [=] { std::memcpy(to, from, nbytes); });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    const auto number = stream.id() == 0 ? default_stream(stream.device_index())
                                         : static_cast<StreamNumber>(stream.id());
    record_stream(data, number);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const MemoryUse use = memory_use(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& allocated = stats.allocated_bytes[0];
    allocated.current = static_cast<std::int64_t>(use.allocated);
    allocated.peak = static_cast<std::int64_t>(use.most_allocated);
    stats.reserved_bytes[0].current = static_cast<std::int64_t>(use.reserved);
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_most_allocated(device); }
};

struct PinnedBlock {
  void* data;
  std::size_t nbytes;
  bool is_free = false;
  std::vector<MomentPtr> uses{};
};

// Under order_mutex() too. By address, so that a view finds its block.
std::map<std::uintptr_t, PinnedBlock>& pinned() {
  static auto& blocks = *new std::map<std::uintptr_t, PinnedBlock>;
  return blocks;
}

PinnedBlock* pinned_block(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  auto next = pinned().upper_bound(address);
  if (next == pinned().begin()) return nullptr;
  auto& [begin, block] = *std::prev(next);
  return address < begin + block.nbytes ? &block : nullptr;
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    std::lock_guard<std::recursive_mutex> lock(order_mutex());
    PinnedBlock* block = taken(rounded(nbytes));
    const auto begin = reinterpret_cast<std::uintptr_t>(block->data);
    shadow().begin_life(begin, begin + block->nbytes, Access{});
    return {block->data, block->data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }

 private:
  static PinnedBlock* taken(std::size_t nbytes) {
    for (auto& [begin, block] : pinned()) {
      if (!block.is_free || block.nbytes != nbytes) continue;
      const auto reached = [](const MomentPtr& moment) { return moment->is_reached(); };
      if (!std::all_of(block.uses.begin(), block.uses.end(), reached)) continue;
      block.uses.clear();
      block.is_free = false;
      std::memset(block.data, kPoison, nbytes);
      return &block;
    }
    void* data = std::aligned_alloc(kGrain, nbytes);
    TORCH_CHECK(data != nullptr, "no ", nbytes, " bytes of memory to pin");
    std::memset(data, kPoison, nbytes);
    return &(pinned()[reinterpret_cast<std::uintptr_t>(data)] = {data, nbytes});
  }

  static void give_back(void* data) {
    if (is_closed()) return;
    std::lock_guard<std::recursive_mutex> lock(order_mutex());
    if (PinnedBlock* block = pinned_block(data)) block->is_free = true;
  }
};

}  // namespace

c10::Allocator* device_allocator() {
  static DeviceAllocator& allocator = *new DeviceAllocator;
  return &allocator;
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator& allocator = *new PinnedAllocator;
  return &allocator;
}

void record_stream(const c10::DataPtr& data, StreamNumber stream) {
  if (data.get_context() == nullptr) return;
  std::lock_guard<std::recursive_mutex> lock(order_mutex());
  auto* block = static_cast<Block*>(data.get_context());
  if (block->stream == stream) return;
  auto& recorded = block->recorded;
  if (std::find(recorded.begin(), recorded.end(), stream) == recorded.end())
    recorded.push_back(stream);
}

bool is_pinned(const void* data) {
  std::lock_guard<std::recursive_mutex> lock(order_mutex());
  return pinned_block(data) != nullptr;
}

void record_pinned(const void* data, const MomentPtr& moment) {
  std::lock_guard<std::recursive_mutex> lock(order_mutex());
  PinnedBlock* block = pinned_block(data);
  if (block == nullptr) return;
  auto& uses = block->uses;
  const auto reached = [](const MomentPtr& each) { return each->is_reached(); };
  uses.erase(std::remove_if(uses.begin(), uses.end(), reached), uses.end());
  uses.push_back(moment);
}

MemoryUse memory_use(int device) {
  std::lock_guard<std::recursive_mutex> lock(order_mutex());
  return memory().uses[device];
}

void reset_most_allocated(int device) {
  std::lock_guard<std::recursive_mutex> lock(order_mutex());
  MemoryUse& use = memory().uses[device];
  use.most_allocated = use.allocated;
}

}  // namespace sim
