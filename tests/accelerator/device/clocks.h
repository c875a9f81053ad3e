// What is known to have happened before what.
//
// Every kernel has a number on its stream. A clock says, for each stream, up to which number the
// kernels of that stream are known to have ended. Streams, events and the host carry clocks:
// whoever waits for another joins the other's clock to its own. Two kernels are ordered if the
// later one's clock covers the earlier one's number, however the delays happened to fall in this
// run. That is why a missing wait is found every time and not only when it hurts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sim {

// Streams of all devices are numbered from 0 as they are created.
using StreamNumber = std::uint32_t;

class VectorClock {
 public:
  std::uint64_t of(StreamNumber stream) const {
    return stream < counts_.size() ? counts_[stream] : 0;
  }

  void advance(StreamNumber stream, std::uint64_t count) {
    if (stream >= counts_.size()) counts_.resize(stream + 1, 0);
    counts_[stream] = count;
  }

  void join(const VectorClock& other) {
    if (other.counts_.size() > counts_.size()) counts_.resize(other.counts_.size(), 0);
    for (std::size_t i = 0; i < other.counts_.size(); ++i)
      counts_[i] = std::max(counts_[i], other.counts_[i]);
  }

 private:
  std::vector<std::uint64_t> counts_;
};

// How threads of the host tell each other what they have waited for cannot be seen from here. Hence
// two views: `process` believes that what one thread has waited for all threads know, so that it
// never reports what is right; `thread` believes that threads know only what they waited for
// themselves, so that a thread which happens to poll an event hides no missing wait of another.
struct Clock {
  VectorClock process;
  VectorClock thread;

  void advance(StreamNumber stream, std::uint64_t count) {
    process.advance(stream, count);
    thread.advance(stream, count);
  }

  void join(const Clock& other) {
    process.join(other.process);
    thread.join(other.thread);
  }
};

}  // namespace sim
