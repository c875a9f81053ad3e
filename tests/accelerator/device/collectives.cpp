#include "collectives.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <numeric>
#include <sstream>
#include <thread>

#include "backend.h"
#include "memory.h"
#include "operators.h"

namespace sim {

namespace {

using Gloo = c10d::Backend;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

constexpr int kEverybody = -1;  // as the peer of what is no send and no receive

// What was begun on gloo, and what is left to do when it has ended.
struct Begun {
  std::vector<WorkPtr> works;
  std::function<void()> finish = [] {};
};

// How a collective ended, known when the stream has got there.
struct Outcome {
  std::mutex mutex;
  std::exception_ptr error;
};

struct Launches {
  bool are_checked = true;
  std::int64_t most_delay_ns = 0;
  // On each device, of each communicator by name: how many collectives were launched.
  std::map<int, std::map<std::string, std::uint64_t>> counts;
  std::vector<std::string> hazards;
  std::vector<Launch> log;
};

Launches& launches() {
  static Launches& launches = *new Launches;
  return launches;
}

class Work final : public c10d::Work {
 public:
  Work(
      int rank, c10d::OpType type, StreamNumber stream, std::uint64_t number, MomentPtr start,
      MomentPtr end, Tensors outputs, std::shared_ptr<Outcome> outcome)
      : c10d::Work(rank, type),
        device_(device_of(stream)),
        number_(number),
        start_(std::move(start)),
        end_(std::move(end)),
        outputs_(std::move(outputs)),
        outcome_(std::move(outcome)) {
    const std::vector<c10::Device> devices{torch_device(device_)};
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), devices);
    // It is complete at once: who uses its value is made to wait for the stream, not for the host.
    const c10::StreamGuard guard(torch_stream(stream));
    future_->markCompleted(c10::IValue(outputs_));
  }

  bool isCompleted() override { return host_sees(end_); }
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override {
    std::lock_guard<std::mutex> lock(outcome_->mutex);
    return outcome_->error;
  }
  Tensors result() override { return outputs_; }
  std::uint64_t getSequencenumber() const override { return number_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  float getDuration() const override {
    TORCH_CHECK(host_sees(end_), "only what has ended has a duration");
    return static_cast<float>(end_->reached_ns() - start_->reached_ns()) * 1e-6F;
  }

  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds) override {
    wait_for(current_stream(device_), end_);
    if (opType_ == c10d::OpType::BARRIER) host_wait(end_, "barrier");
    if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
    return true;
  }

 private:
  const int device_;
  const std::uint64_t number_;
  const MomentPtr start_;
  const MomentPtr end_;
  const Tensors outputs_;
  const std::shared_ptr<Outcome> outcome_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// What one rank says of a collective before it begins: what it is, and how many collectives of each
// communicator this rank had launched on the device before it. Ranks that launch in the same order
// say the same; where they differ, NCCL could wait for ever, whether or not it would this time.
class Fingerprint {
 public:
  Fingerprint(std::string what, std::map<std::string, std::uint64_t> before)
      : what_(std::move(what)), before_(std::move(before)) {}

  // Throws where the ranks do different things, and notes where they came in different orders.
  void compare(Gloo& gloo, const std::string& name) const {
    std::vector<std::string> all = exchanged(gloo, text());
    for (int rank = 1; rank < static_cast<int>(all.size()); ++rank) {
      const auto [what, before] = read(all[rank]);
      const auto [first_what, first_before] = read(all[0]);
      TORCH_CHECK(
          what == first_what, "collectives of ", name, " do not match: rank 0 launched ",
          first_what, ", rank ", rank, " launched ", what);
      for (const auto& [other, count] : before) {
        const auto found = first_before.find(other);
        if (found == first_before.end() || found->second == count) continue;
        std::lock_guard<std::recursive_mutex> lock(order_mutex());
        launches().hazards.push_back(c10::str(
            "launch order: before ", what, " of ", name, " rank 0 had launched ", found->second,
            " collectives of ", other, ", rank ", rank, " ", count));
      }
    }
  }

 private:
  using Read = std::pair<std::string, std::map<std::string, std::uint64_t>>;

  std::string text() const {
    std::ostringstream out;
    out << what_ << '\n';
    for (const auto& [name, count] : before_) out << name << '\t' << count << '\n';
    return out.str();
  }

  static Read read(const std::string& text) {
    std::istringstream in(text);
    Read result;
    std::getline(in, result.first);
    std::string name;
    while (std::getline(in, name, '\t')) {
      in >> result.second[name];
      in.ignore();
    }
    return result;
  }

  static std::vector<std::string> exchanged(Gloo& gloo, const std::string& text) {
    constexpr std::int64_t kMost = 4096;
    TORCH_CHECK(text.size() < kMost, "too many communicators to compare what they launched");
    at::Tensor mine = at::zeros({kMost}, at::kByte);
    std::memcpy(mine.mutable_data_ptr(), text.data(), text.size());
    Tensors inputs{mine};
    std::vector<Tensors> outputs(1);
    for (int rank = 0; rank < gloo.getSize(); ++rank)
      outputs[0].push_back(at::zeros({kMost}, at::kByte));
    gloo.allgather(outputs, inputs, c10d::AllgatherOptions())->wait();
    std::vector<std::string> all;
    for (const at::Tensor& each : outputs[0])
      all.emplace_back(static_cast<const char*>(each.const_data_ptr()));
    return all;
  }

  const std::string what_;
  const std::map<std::string, std::uint64_t> before_;
};

Tensors all_on_cpu(const Tensors& tensors) {
  Tensors all;
  for (const at::Tensor& tensor : tensors) all.push_back(on_cpu(tensor));
  return all;
}

std::vector<at::Tensor> chunks_of(const at::Tensor& tensor, int count) {
  return tensor.view({count, -1}).unbind(0);
}

void check_sizes(const at::Tensor& whole, const at::Tensor& part, int size) {
  TORCH_CHECK(
      whole.numel() == part.numel() * size, "expected ", size, " times ", part.numel(),
      " elements, found ", whole.numel());
}

}  // namespace

struct Communicator::Part {
  c10d::OpType type;
  std::string name;
  std::string details;  // that all ranks must agree on
  Tensors inputs;
  Tensors outputs;
  std::function<Begun(Gloo&)> begin;  // on the stream's thread
  int peer = kEverybody;
};

std::vector<std::string>& launch_hazards() { return launches().hazards; }
std::vector<Launch>& launch_log() { return launches().log; }

void check_launches(bool check) {
  std::lock_guard<std::recursive_mutex> lock(order_mutex());
  launches().are_checked = check;
}

void set_launch_delay(std::int64_t most_ns) {
  std::lock_guard<std::recursive_mutex> lock(order_mutex());
  launches().most_delay_ns = most_ns;
}

Communicator::Communicator(
    c10::intrusive_ptr<c10d::Backend> gloo, std::string name, int rank, int size,
    std::chrono::milliseconds timeout)
    : c10d::Backend(rank, size), gloo_(std::move(gloo)), name_(std::move(name)), timeout_(timeout) {
  // Ranks compare what both know of, so that one which has launched nothing yet must be known.
  std::lock_guard<std::recursive_mutex> lock(order_mutex());
  launches().counts[current_device()].try_emplace(name_, 0);
}

Communicator::~Communicator() {
  std::lock_guard<std::recursive_mutex> lock(order_mutex());
  for (auto& [device, counts] : launches().counts) counts.erase(name_);
}

c10::intrusive_ptr<c10d::Backend::Options> Communicator::getBackendOptions() {
  auto options = c10::make_intrusive<Options>("simccl", timeout_);
  options->group_name = name_;
  return options;
}

void Communicator::shutdown() {
  std::vector<MomentPtr> ends;
  for (const auto& [key, stream] : streams_) ends.push_back(record(stream));
  for (const MomentPtr& end : ends) quietly_wait(end);
}

StreamNumber Communicator::stream_for(int device, int peer) {
  auto [found, is_new] = streams_.try_emplace({device, peer}, 0);
  if (is_new) found->second = new_stream(device);
  return found->second;
}

void Communicator::startCoalescing() { is_coalescing_ = true; }

Communicator::WorkPtr Communicator::endCoalescing() {
  is_coalescing_ = false;
  std::vector<Part> parts;
  parts.swap(coalesced_);
  return parts.empty() ? nullptr : queue_all(std::move(parts));
}

Communicator::WorkPtr Communicator::queue(Part part) {
  std::vector<Part> parts;
  parts.push_back(std::move(part));
  if (!is_coalescing_) return queue_all(std::move(parts));
  coalesced_.push_back(std::move(parts[0]));
  return nullptr;
}

Communicator::WorkPtr Communicator::queue_all(std::vector<Part> parts) {
  int device = -1;
  const auto consider = [&](const at::Tensor& tensor) {
    TORCH_CHECK(
        tensor.device().type() == kType, "simccl works on tensors of sim devices, found one on ",
        tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), "tensors for collectives must be contiguous");
    if (device < 0) device = tensor.device().index();
    TORCH_CHECK(
        device == tensor.device().index(), "tensors of a collective are on several devices");
  };
  bool everybody = true;
  std::string what;
  Tensors outputs;
  for (const Part& part : parts) {
    for (const at::Tensor& tensor : part.inputs) consider(tensor);
    for (const at::Tensor& tensor : part.outputs) consider(tensor);
    outputs.insert(outputs.end(), part.outputs.begin(), part.outputs.end());
    everybody = everybody && part.peer == kEverybody;
    what += (what.empty() ? "" : ", ") + part.name + " " + part.details;
  }
  if (device < 0) device = bound_device_id_ ? bound_device_id_->index() : current_device();

  if (const std::int64_t most_ns = launches().most_delay_ns) {
    const double share = drawn(std::hash<std::string>{}(name_) ^ launched_);
    std::this_thread::sleep_for(
        std::chrono::nanoseconds(static_cast<std::int64_t>(static_cast<double>(most_ns) * share)));
  }
  std::unique_lock<std::recursive_mutex> lock(order_mutex());
  // Sends and receives of one pair have a stream of their own, coalesced ones use the group's.
  const StreamNumber stream = stream_for(device, parts.size() == 1 ? parts[0].peer : kEverybody);
  wait_for(stream, record(current_stream(device)));
  std::vector<Touch> touches;
  std::vector<std::function<Begun(Gloo&)>> begins;
  for (const Part& part : parts) {
    for (const at::Tensor& tensor : part.inputs) {
      add_touches(tensor, false, touches);
      record_stream(tensor.storage().data_ptr(), stream);
    }
    for (const at::Tensor& tensor : part.outputs) {
      add_touches(tensor, true, touches);
      record_stream(tensor.storage().data_ptr(), stream);
    }
    begins.push_back(part.begin);
  }
  std::shared_ptr<Fingerprint> fingerprint;
  if (everybody) {
    auto& counts = launches().counts[device];
    if (launches().are_checked) fingerprint = std::make_shared<Fingerprint>(what, counts);
    ++counts[name_];
  }
  launches().log.push_back(
      {device, name_, what, std::hash<std::thread::id>{}(std::this_thread::get_id())});
  ++launched_;
  auto outcome = std::make_shared<Outcome>();
  const MomentPtr start = record(stream);
  launch(
      stream, interned("simccl::" + parts[0].name), touches,
      [gloo = gloo_, name = name_, timeout = timeout_, begins, fingerprint, outcome] {
        try {
          run_below_autograd([&] {
            if (fingerprint) fingerprint->compare(*gloo, name);
            std::vector<Begun> all;
            for (const auto& begin : begins) all.push_back(begin(*gloo));
            for (const Begun& begun : all)
              for (const WorkPtr& work : begun.works) work->wait(timeout);
            for (const Begun& begun : all) begun.finish();
          });
        } catch (...) {
          {
            std::lock_guard<std::mutex> outcome_lock(outcome->mutex);
            outcome->error = std::current_exception();
          }
          throw;
        }
      });
  const MomentPtr end = record(stream);
  lock.unlock();  // the future of the work may ask for Python's lock
  return c10::make_intrusive<Work>(
      rank_, parts.size() == 1 ? parts[0].type : c10d::OpType::COALESCED, stream, launched_, start,
      end, std::move(outputs), std::move(outcome));
}

namespace {

std::string details_of(const Tensors& tensors, std::int64_t extra = 0) {
  std::ostringstream out;
  for (const at::Tensor& tensor : tensors)
    out << tensor.numel() << ' ' << tensor.scalar_type() << ' ';
  out << extra;
  return out.str();
}

Begun summed(Gloo& gloo, Tensors tensors, c10d::ReduceOp reduce_op) {
  const bool averages = reduce_op.op_ == c10d::ReduceOp::AVG;
  c10d::AllreduceOptions options;
  options.reduceOp = averages ? c10d::ReduceOp(c10d::ReduceOp::SUM) : reduce_op;
  Begun begun;
  for (const at::Tensor& tensor : tensors) {
    Tensors one{tensor.view({-1})};
    begun.works.push_back(gloo.allreduce(one, options));
  }
  if (averages)
    begun.finish = [tensors, size = gloo.getSize()] {
      for (const at::Tensor& tensor : tensors) tensor.div_(size);
    };
  return begun;
}

Communicator::Part all_reduce_part(const Tensors& tensors, const c10d::ReduceOp& reduce_op) {
  return {
      c10d::OpType::ALLREDUCE, "all_reduce", details_of(tensors, reduce_op.op_), {}, tensors,
      [cpu = all_on_cpu(tensors), reduce_op](Gloo& gloo) { return summed(gloo, cpu, reduce_op); }};
}

Communicator::Part all_gather_part(
    const at::Tensor& output, const at::Tensor& input, int size) {
  check_sizes(output, input, size);
  return {
      c10d::OpType::_ALLGATHER_BASE, "all_gather_into_tensor", details_of({input}), {input},
      {output},
      [from = on_cpu(input), to = on_cpu(output), size](Gloo& gloo) {
        Tensors inputs{from.view({-1})};
        std::vector<Tensors> outputs{chunks_of(to, size)};
        return Begun{{gloo.allgather(outputs, inputs, c10d::AllgatherOptions())}};
      }};
}

// gloo has no reduce-scatter that is better than this one.
Communicator::Part reduce_scatter_part(
    const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& reduce_op, int rank,
    int size) {
  check_sizes(input, output, size);
  return {
      c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor",
      details_of({output}, reduce_op.op_), {input}, {output},
      [from = on_cpu(input), to = on_cpu(output), reduce_op, rank, size](Gloo& gloo) {
        const at::Tensor sum = from.clone();
        Begun begun = summed(gloo, {sum}, reduce_op);
        begun.finish = [finish = begun.finish, sum, to, rank, size] {
          finish();
          to.view({-1}).copy_(chunks_of(sum, size)[rank]);
        };
        return begun;
      }};
}

}  // namespace

Communicator::WorkPtr Communicator::allreduce(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  return queue(all_reduce_part(tensors, options.reduceOp));
}

Communicator::WorkPtr Communicator::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return queue(all_reduce_part(tensors, options.reduceOp));
}

Communicator::WorkPtr Communicator::broadcast(
    Tensors& tensors, const c10d::BroadcastOptions& options) {
  const bool is_root = rank_ == options.rootRank;
  return queue(
      {c10d::OpType::BROADCAST, "broadcast", details_of(tensors, options.rootRank),
       is_root ? tensors : Tensors{}, is_root ? Tensors{} : tensors,
       [cpu = all_on_cpu(tensors), options](Gloo& gloo) mutable {
         return Begun{{gloo.broadcast(cpu, options)}};
       }});
}

Communicator::WorkPtr Communicator::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const bool is_root = rank_ == options.rootRank;
  return queue(
      {c10d::OpType::REDUCE, "reduce", details_of(tensors, options.rootRank),
       is_root ? Tensors{} : tensors, is_root ? tensors : Tensors{},
       [cpu = all_on_cpu(tensors), options, is_root](Gloo& gloo) {
         const bool averages = options.reduceOp.op_ == c10d::ReduceOp::AVG;
         c10d::ReduceOptions summing = options;
         if (averages) summing.reduceOp = c10d::ReduceOp::SUM;
         // gloo uses the memory of all ranks; only the root's is to be changed.
         Tensors used{is_root ? cpu[0] : cpu[0].clone()};
         Begun begun{{gloo.reduce(used, summing)}};
         if (averages && is_root)
           begun.finish = [target = cpu[0], size = gloo.getSize()] { target.div_(size); };
         return begun;
       }});
}

Communicator::WorkPtr Communicator::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) {
  return queue(
      {c10d::OpType::ALLGATHER, "all_gather", details_of(inputs), inputs, outputs[0],
       [from = all_on_cpu(inputs), to = all_on_cpu(outputs[0])](Gloo& gloo) mutable {
         std::vector<Tensors> lists{to};
         return Begun{{gloo.allgather(lists, from, c10d::AllgatherOptions())}};
       }});
}

Communicator::WorkPtr Communicator::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) {
  return queue(all_gather_part(output, input, size_));
}

Communicator::WorkPtr Communicator::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) {
  std::vector<Part> parts;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    parts.push_back(all_gather_part(outputs[i], inputs[i], size_));
  return queue_all(std::move(parts));
}

Communicator::WorkPtr Communicator::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  const Tensors& all = inputs[0];
  return queue(
      {c10d::OpType::REDUCE_SCATTER, "reduce_scatter", details_of(outputs, options.reduceOp.op_),
       all, outputs,
       [from = all_on_cpu(all), to = on_cpu(outputs[0]), op = options.reduceOp, rank = rank_](
           Gloo& gloo) {
         Tensors sums;
         for (const at::Tensor& tensor : from) sums.push_back(tensor.clone());
         Begun begun = summed(gloo, sums, op);
         begun.finish = [finish = begun.finish, sums, to, rank] {
           finish();
           to.copy_(sums[rank].view_as(to));
         };
         return begun;
       }});
}

Communicator::WorkPtr Communicator::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return queue(reduce_scatter_part(output, input, options.reduceOp, rank_, size_));
}

Communicator::WorkPtr Communicator::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  std::vector<Part> parts;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    parts.push_back(reduce_scatter_part(outputs[i], inputs[i], options.reduceOp, rank_, size_));
  return queue_all(std::move(parts));
}

Communicator::WorkPtr Communicator::gather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const bool is_root = rank_ == options.rootRank;
  const Tensors targets = is_root ? outputs[0] : Tensors{};
  return queue(
      {c10d::OpType::GATHER, "gather", details_of(inputs, options.rootRank), inputs, targets,
       [from = all_on_cpu(inputs), to = all_on_cpu(targets), is_root, options](Gloo& gloo) mutable {
         std::vector<Tensors> lists;
         if (is_root) lists.push_back(to);
         return Begun{{gloo.gather(lists, from, options)}};
       }});
}

Communicator::WorkPtr Communicator::scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const bool is_root = rank_ == options.rootRank;
  const Tensors sources = is_root ? inputs[0] : Tensors{};
  return queue(
      {c10d::OpType::SCATTER, "scatter", details_of(outputs, options.rootRank), sources, outputs,
       [from = all_on_cpu(sources), to = all_on_cpu(outputs), is_root,
        options](Gloo& gloo) mutable {
         std::vector<Tensors> lists;
         if (is_root) lists.push_back(from);
         return Begun{{gloo.scatter(to, lists, options)}};
       }});
}

Communicator::WorkPtr Communicator::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
    std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions&) {
  return queue(
      {c10d::OpType::ALLTOALL_BASE, "all_to_all_single", "", {input}, {output},
       [from = on_cpu(input), to = on_cpu(output), output_sizes, input_sizes](Gloo& gloo) mutable {
         return Begun{
             {gloo.alltoall_base(to, from, output_sizes, input_sizes, c10d::AllToAllOptions())}};
       }});
}

// Tags are ignored, as NCCL ignores them: what a pair of ranks sends arrives in order.
Communicator::WorkPtr Communicator::send(Tensors& tensors, int to, int) {
  return queue(
      {c10d::OpType::SEND, "send", "", tensors, {},
       [cpu = all_on_cpu(tensors), to](Gloo& gloo) mutable {
         return Begun{{gloo.send(cpu, to, 0)}};
       },
       to});
}

Communicator::WorkPtr Communicator::recv(Tensors& tensors, int from, int) {
  return queue(
      {c10d::OpType::RECV, "recv", "", {}, tensors,
       [cpu = all_on_cpu(tensors), from](Gloo& gloo) mutable {
         return Begun{{gloo.recv(cpu, from, 0)}};
       },
       from});
}

Communicator::WorkPtr Communicator::barrier(const c10d::BarrierOptions& options) {
  const c10::OptionalDeviceGuard guard(options.device);
  return queue(
      {c10d::OpType::BARRIER, "barrier", "", {}, {},
       [](Gloo& gloo) { return Begun{{gloo.barrier(c10d::BarrierOptions())}}; }});
}

void add_collectives(pybind11::module_& module) {
  namespace py = pybind11;
  py::class_<Communicator, c10d::Backend, c10::intrusive_ptr<Communicator>>(module, "Communicator")
      .def(
          py::init([](const c10::intrusive_ptr<c10d::Backend>& gloo, const std::string& name,
                      double timeout_s) {
            const std::chrono::milliseconds timeout(static_cast<std::int64_t>(timeout_s * 1e3));
            return c10::make_intrusive<Communicator>(
                gloo, name, gloo->getRank(), gloo->getSize(), timeout);
          }),
          py::arg("gloo"), py::arg("name"), py::arg("timeout_s"));
  module.def("launch_hazards", [] {
    std::lock_guard<std::recursive_mutex> lock(order_mutex());
    return launch_hazards();
  });
  module.def("launches", [] {
    std::lock_guard<std::recursive_mutex> lock(order_mutex());
    py::list all;
    for (const Launch& launch : launch_log())
      all.append(py::make_tuple(launch.device, launch.communicator, launch.what, launch.thread));
    return all;
  });
  module.def("forget_launches", [] {
    std::lock_guard<std::recursive_mutex> lock(order_mutex());
    launch_hazards().clear();
    launch_log().clear();
  });
  module.def("check_launches", &check_launches);
  module.def("set_launch_delay", &set_launch_delay);
}

}  // namespace sim
