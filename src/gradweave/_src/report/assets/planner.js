// Gradweave's planners and simulator. They follow src/gradweave/_src/planning and simulation step by step,
// so that the same numbers in give the same plan out. A trace is {bytes, ready_s, forward_s}, lists in
// backward order; a plan is how many tensors each message takes. The cost of messages is a line,
// {startup_s, s_per_byte}, or what curve() makes of measured points.
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
  mgwfbp: (trace, cost) => mgwfbp(trace, asLine(cost)),
  optimal: (trace, cost) => optimal(trace, cost, DEFAULT_TOLERANCE),
};

/** Measured points, joined by straight lines; `share` of a message's bytes travels. */
function curve(bytes, seconds, share = 1) {
  const last = bytes.length - 1;
  let before = 0;
  for (let place = 1; place < last; place += 1) {
    if (2 * bytes[place] <= bytes[last]) {
      before = place;
    }
  }
  const lastSlope = (seconds[last] - seconds[before]) / (bytes[last] - bytes[before]);
  return { bytes, seconds, share, lastSlope };
}

function isLine(cost) {
  return cost.seconds === undefined;
}

function messageSeconds(cost, bytes) {
  if (isLine(cost)) {
    return cost.startup_s + cost.s_per_byte * bytes;
  }
  return atPlace(cost, cost.share * bytes, placeOf(cost, cost.share * bytes, 0));
}

/** The last point that is no larger, from `place` on. */
function placeOf(cost, bytes, place) {
  while (place + 1 < cost.bytes.length && cost.bytes[place + 1] <= bytes) {
    place += 1;
  }
  return place;
}

/** Below the first point as much as there; beyond the last one on with the slope of its octave. */
function atPlace(cost, bytes, place) {
  if (bytes <= cost.bytes[0]) {
    return cost.seconds[0];
  }
  const rest = bytes - cost.bytes[place];
  if (place === cost.bytes.length - 1) {
    return cost.seconds[place] + cost.lastSlope * rest;
  }
  const rise = cost.seconds[place + 1] - cost.seconds[place];
  return (rise / (cost.bytes[place + 1] - cost.bytes[place])) * rest + cost.seconds[place];
}

/** The line by least squares, as the papers fit theirs: all that their rule knows of a network. */
function asLine(cost) {
  if (isLine(cost)) {
    return cost;
  }
  const { bytes, seconds } = cost;
  const sum = (value) => bytes.reduce((all, _, place) => all + value(place), 0);
  const meanBytes = sum((place) => bytes[place]) / bytes.length;
  const mean_s = sum((place) => seconds[place]) / bytes.length;
  const away = (place) => bytes[place] - meanBytes;
  let slope = sum((place) => away(place) * (seconds[place] - mean_s)) / sum((place) => away(place) ** 2);
  let startup_s = mean_s - slope * meanBytes;
  if (startup_s < 0) {
    slope = sum((place) => bytes[place] * seconds[place]) / sum((place) => bytes[place] ** 2);
    startup_s = 0;
  }
  if (slope < 0) {
    slope = 0;
    startup_s = mean_s;
  }
  return { startup_s, s_per_byte: cost.share * slope };
}

/**
 * What messages of a run would cost among other workers, and where start-ups and bytes cost so many
 * times as much besides: see report/pricing.py. `price` is {workers, startup_s, latency_s, cost}.
 */
function priceAmong(price, workers, startups, perByte) {
  startups *= (workers - 1) / (price.workers - 1);
  perByte *= (workers - 1) / workers / ((price.workers - 1) / price.workers);
  const { startup_s, cost } = price;
  return {
    latency_s: price.latency_s * startups,
    cost: isLine(cost)
      ? { startup_s: startup_s * startups, s_per_byte: cost.s_per_byte * perByte }
      : curve(
          cost.bytes,
          cost.seconds.map((seconds) => startup_s * startups + (seconds - startup_s) * perByte),
        ),
  };
}

/** The price of a message of whose bytes this share is sent. */
function onWire(cost, share) {
  return isLine(cost)
    ? { startup_s: cost.startup_s, s_per_byte: share * cost.s_per_byte }
    : { ...cost, share };
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
function optimal(trace, cost, tolerance) {
  return isLine(cost)
    ? optimalForLine(trace, cost, tolerance)
    : optimalForAnyCost(trace, cost, tolerance);
}

function bytesBefore(trace) {
  const beforeBytes = [0];
  for (const bytes of trace.bytes) {
    beforeBytes.push(beforeBytes[beforeBytes.length - 1] + bytes);
  }
  return beforeBytes;
}

/** See optimal_for_any_cost in planning/optimal.py. */
function optimalForAnyCost(trace, cost, tolerance) {
  const beforeBytes = bytesBefore(trace);
  const costRow = (j) => {
    const row = new Float64Array(j);
    let place = 0;
    for (let i = j - 1; i >= 0; i -= 1) {
      const bytes = cost.share * (beforeBytes[j] - beforeBytes[i]);
      place = placeOf(cost, bytes, place);
      row[i] = atPlace(cost, bytes, place);
    }
    return row;
  };
  const end_s = earliestEnds(trace.ready_s, costRow);
  const deadline_s = end_s[end_s.length - 1] * (1 + tolerance + ROUNDING);
  const layers = latestEndsByCount(trace.ready_s, costRow, end_s, deadline_s);
  return earliestWithin(trace.ready_s, costRow, layers);
}

function earliestEnds(ready_s, costRow) {
  const end_s = new Float64Array(ready_s.length + 1);
  for (let j = 1; j < end_s.length; j += 1) {
    const row = costRow(j);
    let best = Infinity;
    for (let i = 0; i < j; i += 1) {
      best = Math.min(best, Math.max(end_s[i], ready_s[j - 1]) + row[i]);
    }
    end_s[j] = best;
  }
  return end_s;
}

/** One layer for each message from the back: how late the tensors before it may have left. */
function latestEndsByCount(ready_s, costRow, end_s, deadline_s) {
  const layers = [new Map([[ready_s.length, deadline_s]])];
  const slack_s = ROUNDING * deadline_s;
  while (!layers[layers.length - 1].has(0)) {
    const latest = new Float64Array(end_s.length).fill(-Infinity);
    for (const [j, by_s] of layers[layers.length - 1]) {
      const row = costRow(j);
      for (let i = 0; i < j; i += 1) {
        const start_s = by_s - row[i];
        if (start_s >= ready_s[j - 1] - slack_s && start_s > latest[i]) {
          latest[i] = start_s;
        }
      }
    }
    const layer = new Map();
    latest.forEach((by_s, i) => {
      if (by_s >= end_s[i] - slack_s) {
        layer.set(i, by_s);
      }
    });
    if (layer.size === 0) {
      throw new Error("the optimum does not meet its own deadline");
    }
    layers.push(layer);
  }
  return layers;
}

/** Of the plans that take one step per layer, from the front, one that ends earliest. */
function earliestWithin(ready_s, costRow, layers) {
  let ends = new Map([[0, 0]]);
  const steps = [];
  for (const layer of layers.slice(0, -1).reverse()) {
    const reached = new Map();
    const cameFrom = new Map();
    for (const j of layer.keys()) {
      const row = costRow(j);
      let best = Infinity;
      for (const [i, i_s] of ends) {
        const end_s = i < j ? Math.max(i_s, ready_s[j - 1]) + row[i] : Infinity;
        if (end_s < best) {
          best = end_s;
          cameFrom.set(j, i);
        }
      }
      if (cameFrom.has(j)) {
        reached.set(j, best);
      }
    }
    ends = reached;
    steps.push(cameFrom);
  }
  const lengths = [];
  let j = ready_s.length;
  for (const cameFrom of steps.reverse()) {
    lengths.push(j - cameFrom.get(j));
    j = cameFrom.get(j);
  }
  return lengths.reverse();
}

/** For a line, in O(L). */
function optimalForLine(trace, line, tolerance) {
  const beforeBytes = bytesBefore(trace);
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

/** Each message leaves once its last tensor is ready and the one before it has left, and arrives
 * the latency later. */
function simulate(trace, lengths, cost, workers, latency_s = 0) {
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
    free_s = start_s + messageSeconds(cost, bytes);
    messages.push({ start_s, end_s: free_s + latency_s, ready_s, bytes, tensors: [first, length] });
    first = last;
  }
  const arrived_s = messages.reduce((latest, message) => Math.max(latest, message.end_s), 0);
  return { forward_s, compute_s, messages, iteration_s: Math.max(compute_s, arrived_s) };
}
