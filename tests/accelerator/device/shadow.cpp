#include "shadow.h"

#include <algorithm>
#include <mutex>

namespace sim {

namespace {

// A program that is wrong in a loop must not fill the memory with reports.
constexpr std::size_t kMostHazards = 10'000;

enum class Order { kKnown, kKnownToAnotherThread, kUnknown };

Order order(const Access& first, const Clock& clock) {
  if (first.op == nullptr || clock.thread.of(first.stream) >= first.number) return Order::kKnown;
  return clock.process.of(first.stream) >= first.number ? Order::kKnownToAnotherThread
                                                        : Order::kUnknown;
}

}  // namespace

Name interned(const std::string& name) {
  static std::mutex& mutex = *new std::mutex;
  static auto& names = *new std::unordered_set<std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  return &*names.insert(name).first;
}

void Shadow::split_at(std::uintptr_t address) {
  auto next = cells_.upper_bound(address);
  if (next == cells_.begin()) return;
  auto cell = std::prev(next);
  if (cell->first == address || cell->second.end <= address) return;
  Cell rest = cell->second;
  cell->second.end = address;
  cells_.emplace_hint(next, address, std::move(rest));
}

void Shadow::check(
    const char* kind, const Access& first, const Access& second, const Clock& clock,
    std::uintptr_t begin, std::uintptr_t end) {
  const Order known = order(first, clock);
  if (known == Order::kKnown || hazards.size() >= kMostHazards) return;
  hazards.push_back({kind, first, second, begin, end, known == Order::kKnownToAnotherThread});
}

void Shadow::touch(const Touch& touch, const Access& access, const Clock& clock) {
  if (touch.begin >= touch.end) return;
  split_at(touch.begin);
  split_at(touch.end);
  auto cell = cells_.lower_bound(touch.begin);
  for (; cell != cells_.end() && cell->first < touch.end; ++cell) {
    auto& [end, written, read] = cell->second;
    const char* kind = touch.writes ? "written before an earlier write has ended"
                                    : "read before an earlier write has ended";
    check(kind, written, access, clock, cell->first, end);
    if (touch.writes) {
      for (const Access& reader : read)
        check("written before an earlier read has ended", reader, access, clock, cell->first, end);
    } else {
      auto same = std::find_if(read.begin(), read.end(), [&](const Access& reader) {
        return reader.stream == access.stream;
      });
      if (same != read.end())
        *same = access;
      else
        read.push_back(access);
    }
  }
  if (touch.writes) begin_life(touch.begin, touch.end, access);
}

void Shadow::begin_life(std::uintptr_t begin, std::uintptr_t end, const Access& access) {
  forget(begin, end);
  cells_[begin] = Cell{end, access, {}};
}

void Shadow::forget(std::uintptr_t begin, std::uintptr_t end) {
  split_at(begin);
  split_at(end);
  cells_.erase(cells_.lower_bound(begin), cells_.lower_bound(end));
}

void Shadow::end_life(
    std::uintptr_t begin, std::uintptr_t end, const Access& owner, const Clock& clock,
    const std::vector<StreamNumber>& exempt) {
  const auto is_exempt = [&](const Access& access) {
    return std::find(exempt.begin(), exempt.end(), access.stream) != exempt.end();
  };
  for (auto cell = cells_.lower_bound(begin); cell != cells_.end() && cell->first < end; ++cell) {
    const auto& [cell_end, written, read] = cell->second;
    const char* kind = "freed before a use on another stream has ended";
    if (!is_exempt(written)) check(kind, written, owner, clock, cell->first, cell_end);
    for (const Access& reader : read)
      if (!is_exempt(reader)) check(kind, reader, owner, clock, cell->first, cell_end);
  }
}

bool Shadow::is_quiet(std::uintptr_t begin, std::uintptr_t end, const Clock& clock) const {
  auto cell = cells_.upper_bound(begin);
  if (cell != cells_.begin()) --cell;
  const auto over = [&](const Access& access) {
    return access.op == nullptr || clock.process.of(access.stream) >= access.number;
  };
  for (; cell != cells_.end() && cell->first < end; ++cell) {
    if (cell->second.end <= begin) continue;
    if (!over(cell->second.written)) return false;
    if (!std::all_of(cell->second.read.begin(), cell->second.read.end(), over)) return false;
  }
  return true;
}

}  // namespace sim
