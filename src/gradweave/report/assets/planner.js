// Gradweave's planners and simulator for messages that cost a line, startup_s + s_per_byte * bytes.
// They follow src/gradweave/planning and simulation step by step, so that the same numbers in give
// the same plan out. A trace is {bytes, ready_s, forward_s}, lists in backward order; a plan is how
// many tensors each message takes.
"use strict";

const DEFAULT_TOLERANCE = 0.01;
const ROUNDING = 1e-10;
const BISECTIONS = 40;
const TORCH_FIRST_BYTES = 2 ** 20;
const TORCH_BYTES = 25 * 2 ** 20;

const PLANNERS = {
  wfbp: (trace) => trace.bytes.map(() => 1),
  single: (trace) => [trace.bytes.length],
  ddp: (trace) => torchDefault(trace),
  mgwfbp: (trace, line) => mgwfbp(trace, line),
  optimal: (trace, line) => optimalForLine(trace, line, DEFAULT_TOLERANCE),
};

/** An all-reduce by ring: 2 (N-1) rounds of 1/N of the message each. */
function ringLine(link, workers) {
  if (workers === 1) {
    return { startup_s: 0, s_per_byte: 0 };
  }
  const rounds = workers - 1;
  const scatter = (rounds / workers) * (link.s_per_byte + link.sum_s_per_byte);
  const gather = (rounds / workers) * link.s_per_byte;
  return {
    startup_s: rounds * link.latency_s + rounds * link.latency_s,
    s_per_byte: scatter + gather,
  };
}

/** What a message costs of whose bytes this share is sent. */
function onWire(line, share) {
  return { startup_s: line.startup_s, s_per_byte: share * line.s_per_byte };
}

/** A bucket closes as soon as it holds 1 MiB, later ones 25 MiB. */
function torchDefault(trace) {
  const lengths = [];
  let length = 0;
  let held = 0;
  for (const bytes of trace.bytes) {
    length += 1;
    held += bytes;
    if (held >= (lengths.length === 0 ? TORCH_FIRST_BYTES : TORCH_BYTES)) {
      lengths.push(length);
      length = held = 0;
    }
  }
  return length > 0 ? [...lengths, length] : lengths;
}

/** Algorithm 1 of the MG-WFBP journal paper. */
function mgwfbp(trace, line) {
  const lengths = [];
  let length = 1;
  let heldBytes = trace.bytes[0];
  let start_s = trace.ready_s[0];
  for (let next = 1; next < trace.bytes.length; next += 1) {
    if (trace.ready_s[next] - start_s < line.startup_s) {
      length += 1;
      heldBytes += trace.bytes[next];
    } else {
      lengths.push(length);
      start_s += line.startup_s + line.s_per_byte * heldBytes;
      length = 1;
      heldBytes = trace.bytes[next];
    }
    start_s = Math.max(start_s, trace.ready_s[next]);
  }
  return [...lengths, length];
}

/** The exact optimum; within the tolerance of it the fewest messages, and of those the earliest. */
function optimalForLine(trace, line, tolerance) {
  const beforeBytes = [0];
  for (const bytes of trace.bytes) {
    beforeBytes.push(beforeBytes[beforeBytes.length - 1] + bytes);
  }
  const optimum_s = earliestEnd(trace.ready_s, beforeBytes, line);
  let late_s = optimum_s * (1 + tolerance + ROUNDING);
  let early_s = optimum_s;
  let fewest = fewestByDeadline(trace.ready_s, beforeBytes, line, late_s);
  for (let step = 0; step < BISECTIONS; step += 1) {
    const middle_s = (early_s + late_s) / 2;
    const lengths = fewestByDeadline(trace.ready_s, beforeBytes, line, middle_s);
    if (lengths !== null && lengths.length === fewest.length) {
      fewest = lengths;
      late_s = middle_s;
    } else {
      early_s = middle_s;
    }
  }
  return fewest;
}

/** F(L) in O(L): see _earliest_end_for_line in planning/optimal.py. */
function earliestEnd(ready_s, beforeBytes, line) {
  const end_s = [0];
  const key = [0];
  const waiting = [];
  let head = 0;
  let lastFree = 0;
  for (let j = 1; j <= ready_s.length; j += 1) {
    const ready = ready_s[j - 1];
    while (lastFree + 1 < j && end_s[lastFree + 1] <= ready) {
      lastFree += 1;
    }
    while (head < waiting.length && waiting[head] <= lastFree) {
      head += 1;
    }
    let best = ready - line.s_per_byte * beforeBytes[lastFree];
    if (head < waiting.length) {
      best = Math.min(best, key[waiting[head]]);
    }
    end_s.push(best + line.startup_s + line.s_per_byte * beforeBytes[j]);
    key.push(end_s[j] - line.s_per_byte * beforeBytes[j]);
    while (waiting.length > head && key[waiting[waiting.length - 1]] >= key[j]) {
      waiting.pop();
    }
    waiting.push(j);
  }
  return end_s[end_s.length - 1];
}

/** From the back, each message takes in as many tensors as its deadline allows; null if none can. */
function fewestByDeadline(ready_s, beforeBytes, line, deadline_s) {
  const lengths = [];
  let last = ready_s.length;
  while (last > 0) {
    const room_s = deadline_s - line.startup_s - ready_s[last - 1];
    if (room_s < 0) {
      return null;
    }
    let first = 0;
    if (line.s_per_byte > 0) {
      first = firstAtLeast(beforeBytes, beforeBytes[last] - room_s / line.s_per_byte, last);
    }
    if (first === last) {
      return null;
    }
    deadline_s -= line.startup_s + line.s_per_byte * (beforeBytes[last] - beforeBytes[first]);
    lengths.push(last - first);
    last = first;
  }
  return lengths.reverse();
}

/** The first place below `end` whose number is no less than `least`, otherwise `end`. */
function firstAtLeast(numbers, least, end) {
  let low = 0;
  let high = end;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < least) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/** The same computation on processors that are `speed` times as fast. */
function atSpeed(trace, speed) {
  return {
    bytes: trace.bytes,
    ready_s: trace.ready_s.map((seconds) => seconds / speed),
    forward_s: trace.forward_s.map((seconds) => seconds / speed),
  };
}

/** Each message leaves once its last tensor is ready and the message before it has left. */
function simulate(trace, lengths, line, workers) {
  const forward_s = trace.forward_s.reduce((sum, seconds) => sum + seconds, 0);
  const compute_s = forward_s + trace.ready_s[trace.ready_s.length - 1];
  const messages = [];
  let free_s = forward_s;
  let first = 0;
  for (const length of workers === 1 ? [] : lengths) {
    const last = first + length;
    const bytes = trace.bytes.slice(first, last).reduce((sum, size) => sum + size, 0);
    const ready_s = forward_s + trace.ready_s[last - 1];
    const start_s = Math.max(free_s, ready_s);
    free_s = start_s + line.startup_s + line.s_per_byte * bytes;
    messages.push({ start_s, end_s: free_s, ready_s, bytes, tensors: [first, length] });
    first = last;
  }
  const iteration_s = Math.max(compute_s, free_s);
  return { forward_s, compute_s, messages, iteration_s };
}
