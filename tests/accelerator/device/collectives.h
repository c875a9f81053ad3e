// Collectives in the manner of NCCL.
//
// A group has a stream of its own on each device. Every collective is queued there, behind what the
// current stream has been given so far; the host goes on at once. When the stream gets to it, gloo
// carries it out over the same memory. Waiting for one makes the current stream wait, not the host.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>
#include <vector>

#include "streams.h"

namespace sim {

// What was found wrong with the order of collectives, in words. Under order_mutex().
std::vector<std::string>& launch_hazards();

// A collective as the host launched it. Under order_mutex().
struct Launch {
  int device;
  std::string communicator;
  std::string what;
  std::uint64_t thread;  // of the host
};
std::vector<Launch>& launch_log();

// Whether ranks tell each other, with each collective, what they have launched before it.
void check_launches(bool check);

// Lets the host take up to this long before it launches a collective, so that threads which launch
// without an order among them come now one way, now the other.
void set_launch_delay(std::int64_t most_ns);

class Communicator final : public c10d::Backend {
 public:
  Communicator(
      c10::intrusive_ptr<c10d::Backend> gloo, std::string name, int rank, int size,
      std::chrono::milliseconds timeout);
  ~Communicator() override;

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return launched_; }
  void shutdown() override;
  void abort() override { shutdown(); }

  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
      std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  struct Part;  // one operation, of which a kernel carries out one or, coalesced, several

 private:
  WorkPtr queue(Part part);
  WorkPtr queue_all(std::vector<Part> parts);
  StreamNumber stream_for(int device, int peer);

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::string name_;
  std::chrono::milliseconds timeout_;
  std::uint64_t launched_ = 0;
  std::map<std::pair<int, int>, StreamNumber> streams_;  // by device and peer
  std::vector<Part> coalesced_;
  bool is_coalescing_ = false;
};

}  // namespace sim
