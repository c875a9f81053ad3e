// Who touched which bytes last, and whether that was known to be over.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_set>
#include <vector>

#include "clocks.h"

namespace sim {

// Names of operators live for ever, so that a record of an access is three words.
using Name = const std::string*;
Name interned(const std::string& name);

struct Access {
  StreamNumber stream = 0;
  std::uint64_t number = 0;
  Name op = nullptr;  // null: nobody
};

// Bytes a kernel reads or writes, from `begin` to before `end`.
struct Touch {
  std::uintptr_t begin;
  std::uintptr_t end;
  bool writes;
};

struct Hazard {
  const char* kind;
  Access first;
  Access second;
  std::uintptr_t begin;
  std::uintptr_t end;
  bool only_between_threads;  // ordered if threads of the host tell each other what they waited for
};

class Shadow {
 public:
  // Checks one access of a kernel against those before it, then remembers it.
  void touch(const Touch& touch, const Access& access, const Clock& clock);

  // From now on these bytes were last written by `access`, and read by nobody.
  void begin_life(std::uintptr_t begin, std::uintptr_t end, const Access& access);

  // Forgets what is known of these bytes.
  void forget(std::uintptr_t begin, std::uintptr_t end);

  // Reports accesses that are not known to be over where memory goes back to `owner`, whose clock
  // this is. Streams that were told of the memory's end (record_stream) are exempt.
  void end_life(
      std::uintptr_t begin, std::uintptr_t end, const Access& owner, const Clock& clock,
      const std::vector<StreamNumber>& exempt);

  // Whether any stream other than through `clock` still has business with these bytes.
  bool is_quiet(std::uintptr_t begin, std::uintptr_t end, const Clock& clock) const;

  std::vector<Hazard> hazards;

 private:
  struct Cell {
    std::uintptr_t end;
    Access written;
    std::vector<Access> read;  // the last of each stream since it was written
  };
  using Cells = std::map<std::uintptr_t, Cell>;

  void split_at(std::uintptr_t address);
  void check(
      const char* kind, const Access& first, const Access& second, const Clock& clock,
      std::uintptr_t begin, std::uintptr_t end);

  Cells cells_;  // by where they begin; they do not overlap
};

}  // namespace sim
