// Streams: threads that run kernels one after another, later than the host asked for them.
//
// The host only ever queues. Whatever the order of two kernels depends on (queues, events, waits of
// the host) passes through here, where clocks are kept and every access is checked at the moment a
// kernel is queued.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "clocks.h"
#include "shadow.h"

namespace sim {

std::int64_t now_ns();  // of the steady clock, which is time.monotonic_ns() on Linux

// A place in a stream's queue that others can wait for: what an event is once it is recorded.
class Moment {
 public:
  explicit Moment(Clock clock) : clock(std::move(clock)) {}
  void reach();
  bool is_reached() const;
  void wait() const;
  std::int64_t reached_ns() const;

  const Clock clock;  // what has ended when this is reached

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable reached_;
  std::int64_t at_ns_ = 0;
};
using MomentPtr = std::shared_ptr<Moment>;

// Devices and streams. The current device, and the current stream of each, belong to a thread of
// the host, as CUDA's do.
int device_count();
int current_device();
void set_current_device(int device);
StreamNumber default_stream(int device);
StreamNumber new_stream(int device);
StreamNumber pool_stream(int device);  // one of a few, in turn, as torch wants for callbacks
StreamNumber current_stream(int device);
void set_current_stream(StreamNumber stream);
int device_of(StreamNumber stream);

// Queues a kernel: `body` runs on the stream's thread after a random delay.
void launch(
    StreamNumber stream, Name name, const std::vector<Touch>& touches, std::function<void()> body);

// Queues something that is no kernel: it has no delay, no number, and nobody counts it.
void run_in_order(StreamNumber stream, std::function<void()> body);

MomentPtr record(StreamNumber stream);
void wait_for(StreamNumber stream, const MomentPtr& moment);

// The host waits, which is counted under `why`, or asks without waiting. Either way it knows
// afterwards what has ended. An error of a kernel is thrown by the wait that comes after it.
void host_wait(const MomentPtr& moment, const std::string& why);
void host_wait_for_device(int device, const std::string& why);
void quietly_wait(const MomentPtr& moment);  // not counted: the program is being taken down
bool host_sees(const MomentPtr& moment);
bool host_sees_end_of(StreamNumber stream);

// The clock a kernel would have that is queued on this stream now.
Clock clock_of(StreamNumber stream);
Clock host_clock();
std::uint64_t last_number(StreamNumber stream);

// Held while clocks and shadow are read or changed; launch() and its like take it themselves.
std::recursive_mutex& order_mutex();
Shadow& shadow();

// Kernels last `mean_ns`, more or less by a share of up to `jitter`, drawn from `seed`, the
// stream's number and the kernel's since the delays were set: the same each time, whatever the
// threads do.
struct Delays {
  std::int64_t mean_ns = 0;
  double jitter = 0.0;
  std::uint64_t seed = 0;
};
void set_delays(const Delays& delays);
// Draws a share of 0 to 1 for something of which `key` is the name.
double drawn(std::uint64_t key);

struct KernelRecord {
  Name name;
  StreamNumber stream;
  std::uint64_t number;
  std::int64_t delay_ns;  // as it was drawn
  std::int64_t launched_ns;
  std::int64_t start_ns;  // its delay begins here: on a device it would be running
  std::int64_t end_ns;
};

struct Counters {
  std::map<std::string, std::int64_t> launches;
  std::map<std::string, std::int64_t> host_waits;
  std::int64_t bytes_to_device = 0;
  std::int64_t bytes_to_host = 0;
  std::int64_t bytes_on_device = 0;
};

// All of these under order_mutex().
Counters& counters();
std::vector<KernelRecord>& kernel_log();
std::vector<std::string>& errors();  // of kernels, whether thrown already or not
void keep_kernel_log(bool keep);
void forget_errors();

// Set by the Python module: gives the caller's stack for each wait of the host.
extern std::function<std::string()> describe_caller;
std::vector<std::pair<std::string, std::string>>& host_wait_stacks();

// Waits for all streams and lets no more work in: the interpreter is about to end.
void shut_down();
bool is_closed();

// Whether this process was forked from one that had used the device: its streams have no threads.
bool is_forked();

}  // namespace sim
