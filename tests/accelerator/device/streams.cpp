#include "streams.h"

#include <Python.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <stdexcept>
#include <thread>

namespace sim {

namespace {

// A thread that finds nothing to do for so long ends; the next kernel starts another. Tests make
// streams by the thousand.
constexpr auto kIdle = std::chrono::seconds(2);

struct Task {
  std::function<void()> body;
  MomentPtr awaits;
  MomentPtr reaches;
  Name kernel = nullptr;  // null: no kernel
  std::uint64_t number = 0;
  std::int64_t launched_ns = 0;
  std::int64_t delay_ns = 0;
};

struct Stream {
  explicit Stream(int device) : device(device) {}

  const int device;
  Clock clock;                // under order_mutex()
  std::uint64_t number = 0;       // of the last kernel, likewise
  std::uint64_t drawn_from = 0;  // and of the last one before the delays were set

  std::mutex mutex;
  std::condition_variable arrived;
  std::deque<Task> queue;
  bool has_thread = false;
  bool is_busy = false;
};

// One for the process, never destroyed: threads of streams outlive static objects.
struct State {
  std::recursive_mutex order;
  Shadow shadow;
  std::deque<Stream> streams;  // by number; a deque moves none of them
  std::map<int, std::pair<std::vector<StreamNumber>, std::size_t>> pools;  // and whose turn it is
  VectorClock host;
  Counters counters;
  std::vector<KernelRecord> log;
  bool keeps_log = false;
  std::vector<std::string> errors;
  std::size_t errors_thrown = 0;
  std::vector<std::pair<std::string, std::string>> stacks;
  Delays delays;
  std::atomic<bool> closed{false};
  std::atomic<pid_t> began_in{0};  // the process that has threads of streams

  State() {
    for (int device = 0; device < device_count(); ++device) streams.emplace_back(device);
  }
};

State& state() {
  static State& state = *new State;
  return state;
}

thread_local int this_device = 0;
thread_local std::map<int, StreamNumber> this_stream;
thread_local VectorClock this_host;

std::uint64_t mixed(std::uint64_t x) {  // splitmix64's finaliser
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// Other threads of Python run while this one waits: they may have to launch what it waits for.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

void run(Task& task, StreamNumber number) {
  if (task.awaits) task.awaits->wait();
  const std::int64_t start_ns = now_ns();
  if (task.delay_ns > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(task.delay_ns));
  if (task.body) {
    try {
      task.body();
    } catch (const std::exception& error) {
      std::lock_guard<std::recursive_mutex> lock(state().order);
      const std::string name = task.kernel == nullptr ? "poison" : *task.kernel;
      state().errors.push_back(name + ": " + error.what());
    }
  }
  if (task.kernel != nullptr) {
    const std::int64_t end_ns = now_ns();
    std::lock_guard<std::recursive_mutex> lock(state().order);
    if (state().keeps_log)
      state().log.push_back(
          {task.kernel, number, task.number, task.delay_ns, task.launched_ns, start_ns, end_ns});
  }
}

void run_stream(StreamNumber number) {
  pthread_setname_np(pthread_self(), ("sim stream " + std::to_string(number)).c_str());
  Stream& stream = state().streams[number];
  std::unique_lock<std::mutex> lock(stream.mutex);
  while (stream.arrived.wait_for(lock, kIdle, [&] { return !stream.queue.empty(); })) {
    MomentPtr reaches;
    {
      Task task = std::move(stream.queue.front());
      stream.queue.pop_front();
      stream.is_busy = true;
      lock.unlock();
      run(task, number);
      reaches = std::move(task.reaches);
    }
    lock.lock();
    stream.is_busy = false;
    // Under the lock: whoever has waited for this finds a stream that has nothing left to do.
    if (reaches) reaches->reach();
  }
  stream.has_thread = false;
}

void push(StreamNumber number, Task task) {
  Stream& stream = state().streams[number];
  std::lock_guard<std::mutex> lock(stream.mutex);
  stream.queue.push_back(std::move(task));
  if (!stream.has_thread) {
    state().began_in = getpid();
    stream.has_thread = true;
    std::thread(run_stream, number).detach();
  }
  stream.arrived.notify_one();
}

void host_learns(const Clock& clock) {
  std::lock_guard<std::recursive_mutex> lock(state().order);
  state().host.join(clock.process);
  this_host.join(clock.thread);
}

void throw_errors() {
  std::lock_guard<std::recursive_mutex> lock(state().order);
  if (state().errors_thrown == state().errors.size()) return;
  std::string text = "a kernel of the simulated device failed earlier: ";
  text += state().errors[state().errors_thrown];
  state().errors_thrown = state().errors.size();
  throw std::runtime_error(text);
}

void count_host_wait(const std::string& why) {
  std::string stack;
  if (describe_caller) stack = describe_caller();
  std::lock_guard<std::recursive_mutex> lock(state().order);
  ++state().counters.host_waits[why];
  if (describe_caller) state().stacks.emplace_back(why, stack);
}

}  // namespace

std::function<std::string()> describe_caller;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Moment::reach() {
  // Notified under the lock: whoever waits may destroy this as soon as it sees the time.
  std::lock_guard<std::mutex> lock(mutex_);
  at_ns_ = now_ns();
  reached_.notify_all();
}

bool Moment::is_reached() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return at_ns_ != 0;
}

void Moment::wait() const {
  std::unique_lock<std::mutex> lock(mutex_);
  reached_.wait(lock, [&] { return at_ns_ != 0; });
}

std::int64_t Moment::reached_ns() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return at_ns_;
}

int device_count() {
  static const int count = [] {
    const char* given = std::getenv("SIM_DEVICES");
    return given == nullptr ? 4 : std::atoi(given);
  }();
  return count;
}

int current_device() { return this_device; }

void set_current_device(int device) {
  if (device < 0 || device >= device_count())
    throw std::out_of_range("there is no device sim:" + std::to_string(device));
  this_device = device;
}

StreamNumber default_stream(int device) { return static_cast<StreamNumber>(device); }

StreamNumber new_stream(int device) {
  std::lock_guard<std::recursive_mutex> lock(state().order);
  state().streams.emplace_back(device);
  return static_cast<StreamNumber>(state().streams.size() - 1);
}

StreamNumber pool_stream(int device) {
  constexpr std::size_t kStreams = 32;
  std::lock_guard<std::recursive_mutex> lock(state().order);
  auto& [pool, next] = state().pools[device];
  if (pool.size() < kStreams) pool.push_back(new_stream(device));
  return pool[next++ % kStreams];
}

StreamNumber current_stream(int device) {
  auto found = this_stream.find(device);
  return found == this_stream.end() ? default_stream(device) : found->second;
}

int device_of(StreamNumber stream) {
  std::lock_guard<std::recursive_mutex> lock(state().order);
  return state().streams.at(stream).device;
}

void set_current_stream(StreamNumber stream) { this_stream[device_of(stream)] = stream; }

Clock clock_of(StreamNumber number) {
  std::lock_guard<std::recursive_mutex> lock(state().order);
  Stream& stream = state().streams.at(number);
  stream.clock.process.join(state().host);
  stream.clock.thread.join(this_host);
  return stream.clock;
}

Clock host_clock() {
  std::lock_guard<std::recursive_mutex> lock(state().order);
  return {state().host, this_host};
}

std::uint64_t last_number(StreamNumber stream) {
  std::lock_guard<std::recursive_mutex> lock(state().order);
  return state().streams.at(stream).number;
}

void launch(
    StreamNumber number, Name name, const std::vector<Touch>& touches, std::function<void()> body) {
  if (is_closed()) return;
  std::lock_guard<std::recursive_mutex> lock(state().order);
  Stream& stream = state().streams.at(number);
  ++stream.number;
  stream.clock.advance(number, stream.number);
  const Clock clock = clock_of(number);
  for (const Touch& touch : touches)
    state().shadow.touch(touch, Access{number, stream.number, name}, clock);
  ++state().counters.launches[*name];

  Task task;
  task.body = std::move(body);
  task.kernel = name;
  task.number = stream.number;
  task.launched_ns = now_ns();
  const Delays& delays = state().delays;
  const std::uint64_t since_set = stream.number - stream.drawn_from;
  const double share = 2.0 * drawn((std::uint64_t{number} << 40) ^ since_set) - 1.0;
  task.delay_ns = static_cast<std::int64_t>(
      static_cast<double>(delays.mean_ns) * (1.0 + delays.jitter * share));
  push(number, std::move(task));
}

void run_in_order(StreamNumber number, std::function<void()> body) {
  if (is_closed()) return;
  std::lock_guard<std::recursive_mutex> lock(state().order);
  Task task;
  task.body = std::move(body);
  push(number, std::move(task));
}

MomentPtr record(StreamNumber number) {
  std::lock_guard<std::recursive_mutex> lock(state().order);
  auto moment = std::make_shared<Moment>(clock_of(number));
  if (is_closed()) {
    moment->reach();
    return moment;
  }
  Task task;
  task.reaches = moment;
  push(number, std::move(task));
  return moment;
}

void wait_for(StreamNumber number, const MomentPtr& moment) {
  if (is_closed()) return;
  std::lock_guard<std::recursive_mutex> lock(state().order);
  state().streams.at(number).clock.join(moment->clock);
  Task task;
  task.awaits = moment;
  push(number, std::move(task));
}

void host_wait(const MomentPtr& moment, const std::string& why) {
  count_host_wait(why);
  {
    WithoutGil others_run;
    moment->wait();
  }
  host_learns(moment->clock);
  throw_errors();
}

void quietly_wait(const MomentPtr& moment) {
  {
    WithoutGil others_run;
    moment->wait();
  }
  host_learns(moment->clock);
}

void host_wait_for_device(int device, const std::string& why) {
  count_host_wait(why);
  std::vector<MomentPtr> moments;
  {
    std::lock_guard<std::recursive_mutex> lock(state().order);
    for (StreamNumber stream = 0; stream < state().streams.size(); ++stream)
      if (state().streams[stream].device == device && state().streams[stream].number > 0)
        moments.push_back(record(stream));
  }
  {
    WithoutGil others_run;
    for (const MomentPtr& moment : moments) moment->wait();
  }
  for (const MomentPtr& moment : moments) host_learns(moment->clock);
  throw_errors();
}

bool host_sees(const MomentPtr& moment) {
  if (!moment->is_reached()) return false;
  host_learns(moment->clock);
  return true;
}

bool host_sees_end_of(StreamNumber number) {
  std::lock_guard<std::recursive_mutex> lock(state().order);
  Stream& stream = state().streams.at(number);
  {
    std::lock_guard<std::mutex> queue(stream.mutex);
    if (stream.is_busy || !stream.queue.empty()) return false;
  }
  host_learns(stream.clock);
  return true;
}

std::recursive_mutex& order_mutex() { return state().order; }
Shadow& shadow() { return state().shadow; }
Counters& counters() { return state().counters; }
std::vector<KernelRecord>& kernel_log() { return state().log; }
std::vector<std::string>& errors() { return state().errors; }
void keep_kernel_log(bool keep) { state().keeps_log = keep; }
std::vector<std::pair<std::string, std::string>>& host_wait_stacks() { return state().stacks; }

void forget_errors() {
  state().errors.clear();
  state().errors_thrown = 0;
}

void set_delays(const Delays& delays) {
  std::lock_guard<std::recursive_mutex> lock(state().order);
  state().delays = delays;
  for (Stream& stream : state().streams) stream.drawn_from = stream.number;
}

double drawn(std::uint64_t key) {
  return static_cast<double>(mixed(key ^ mixed(state().delays.seed)) >> 11) * 0x1.0p-53;
}

void shut_down() {
  std::vector<MomentPtr> moments;
  {
    std::lock_guard<std::recursive_mutex> lock(state().order);
    for (StreamNumber stream = 0; stream < state().streams.size(); ++stream)
      moments.push_back(record(stream));
    state().closed = true;
  }
  WithoutGil others_run;
  for (const MomentPtr& moment : moments) moment->wait();
}

bool is_forked() { return state().began_in != 0 && state().began_in != getpid(); }

bool is_closed() { return state().closed; }

}  // namespace sim
