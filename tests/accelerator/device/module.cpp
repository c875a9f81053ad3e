// What Python sees: sim.py gives these their final form and says what they mean.
#include <ATen/Context.h>
#include <torch/csrc/utils/pybind.h>

#include "backend.h"
#include "memory.h"

namespace py = pybind11;

namespace sim {

namespace {

py::dict described(const Access& access) {
  py::dict as_dict;
  as_dict["op"] = *access.op;
  as_dict["device"] = device_of(access.stream);
  as_dict["stream"] = access.stream;
  as_dict["number"] = access.number;
  return as_dict;
}

py::list hazards() {
  std::lock_guard<std::recursive_mutex> lock(order_mutex());
  py::list all;
  for (const Hazard& hazard : shadow().hazards) {
    py::dict as_dict;
    as_dict["kind"] = hazard.kind;
    as_dict["first"] = described(hazard.first);
    as_dict["second"] = described(hazard.second);
    as_dict["address"] = hazard.begin;
    as_dict["nbytes"] = hazard.end - hazard.begin;
    as_dict["only_between_threads"] = hazard.only_between_threads;
    all.append(as_dict);
  }
  return all;
}

py::list kernels() {
  std::lock_guard<std::recursive_mutex> lock(order_mutex());
  py::list all;
  for (const KernelRecord& kernel : kernel_log())
    all.append(py::make_tuple(
        *kernel.name, device_of(kernel.stream), kernel.stream, kernel.number, kernel.delay_ns,
        kernel.launched_ns, kernel.start_ns, kernel.end_ns));
  return all;
}

py::dict counted() {
  std::lock_guard<std::recursive_mutex> lock(order_mutex());
  const Counters& all = counters();
  py::dict as_dict;
  as_dict["launches"] = all.launches;
  as_dict["host_waits"] = all.host_waits;
  as_dict["bytes_to_device"] = all.bytes_to_device;
  as_dict["bytes_to_host"] = all.bytes_to_host;
  as_dict["bytes_on_device"] = all.bytes_on_device;
  return as_dict;
}

void reset() {
  std::lock_guard<std::recursive_mutex> lock(order_mutex());
  counters() = {};
  kernel_log().clear();
  shadow().hazards.clear();
  host_wait_stacks().clear();
  forget_errors();
}

void describe_callers(const py::object& describe) {
  if (describe.is_none()) {
    describe_caller = nullptr;
    return;
  }
  describe_caller = [kept = new py::object(describe)] {
    py::gil_scoped_acquire gil;
    return (*kept)().cast<std::string>();
  };
}

// Lets a stream get no further than this before it is opened, so that tests need not hope that the
// host is faster than a delay. It orders nothing.
class Gate {
 public:
  explicit Gate(StreamNumber stream) {
    run_in_order(stream, [open = open_] { open->wait(); });
  }
  void open() { open_->reach(); }

 private:
  const MomentPtr open_ = std::make_shared<Moment>(Clock());
};

}  // namespace

void add_collectives(py::module_& module);

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("stream_number", [](int device, std::int64_t id) {
    return number_of(c10::Stream(c10::Stream::UNSAFE, torch_device(device), id));
  });
  m.def("set_delays", [](std::int64_t mean_ns, double jitter, std::uint64_t seed) {
    set_delays({mean_ns, jitter, seed});
  });
  m.def("hazards", &hazards);
  m.def("errors", [] {
    std::lock_guard<std::recursive_mutex> lock(order_mutex());
    return errors();
  });
  m.def("counters", &counted);
  m.def("kernels", &kernels);
  m.def("keep_kernels", &keep_kernel_log);
  m.def("host_wait_stacks", [] {
    std::lock_guard<std::recursive_mutex> lock(order_mutex());
    return host_wait_stacks();
  });
  m.def("describe_callers", &describe_callers);
  m.def("reset", &reset);
  m.def("shut_down", &shut_down);
  m.def("is_forked", &is_forked);
  m.def("memory_use", [](int device) {
    const MemoryUse use = memory_use(device);
    return py::make_tuple(use.allocated, use.most_allocated, use.reserved);
  });
  m.def("reset_most_allocated", &reset_most_allocated);
  m.def("default_generator", [](int device) {
    return at::globalContext().defaultGenerator(torch_device(device));
  });
  py::class_<Gate>(m, "Gate").def(py::init<StreamNumber>()).def("open", &Gate::open);
  add_collectives(m);
}
