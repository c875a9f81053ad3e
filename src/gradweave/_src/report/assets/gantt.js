// A timeline: computing above, messages below, each coloured by its bucket, waiting marked in red;
// below them a strip for each rank.

const COLOURS = 8;
const LARGEST_ZOOM = 512;
const LEAST_FOR_GAP = 5;
const RANK_LANES = ["forward", "backward", "communication"];
// In pixels: of an axis on paper, from tick to tick, and what the last one needs.
const PAPER_WIDTH = 640;
const TICK_WIDTH = 88;
const LAST_TICK_WIDTH = 56;
const SVG = "http://www.w3.org/2000/svg";

/** Disjoint intervals that cover the same time. */
function union(intervals) {
  const merged = [];
  for (const [start, end] of [...intervals].sort((a, b) => a[0] - b[0])) {
    const last = merged[merged.length - 1];
    if (last && start <= last[1]) {
      last[1] = Math.max(last[1], end);
    } else {
      merged.push([start, end]);
    }
  }
  return merged;
}

/** When there is communication and nothing is computed. */
function exposedIntervals(computing, communicating) {
  const exposed = [];
  const busy = union(computing);
  let place = 0;
  for (const [start, end] of union(communicating)) {
    let from = start;
    while (place < busy.length && busy[place][1] <= from) {
      place += 1;
    }
    for (let next = place; next < busy.length && busy[next][0] < end; next += 1) {
      if (busy[next][0] > from) {
        exposed.push([from, busy[next][0]]);
      }
      from = Math.max(from, busy[next][1]);
    }
    if (from < end) {
      exposed.push([from, end]);
    }
  }
  return exposed;
}

function totalLength(intervals) {
  return intervals.reduce((sum, [start, end]) => sum + end - start, 0);
}

function tensorCount(ranges) {
  return ranges.reduce((sum, value, place) => (place % 2 ? sum + value : sum), 0);
}

function tensorPlaces(ranges) {
  const places = [];
  for (let pair = 0; pair < ranges.length; pair += 2) {
    for (let offset = 0; offset < ranges[pair + 1]; offset += 1) {
      places.push(ranges[pair] + offset);
    }
  }
  return places;
}

function tensorLines(tensors, ranges) {
  return tensorPlaces(ranges).map(
    (place) => `${tensors.names[place]} (${byteSize(tensors.bytes[place])})`,
  );
}

/** `blocks` are {name, start_s, end_s, slots}; `messages` as simulate() returns them. */
function completeTimeline(blocks, messages) {
  const sorted = [...messages].sort((a, b) => a.end_s - b.end_s);
  let free_s = 0;
  for (const message of sorted) {
    message.busy_s = Math.min(message.end_s, Math.max(message.start_s, free_s));
    free_s = message.end_s;
  }
  const exposed = exposedIntervals(
    blocks.map((block) => [block.start_s, block.end_s]),
    messages.map((message) => [message.start_s, message.end_s]),
  );
  const ends = [...blocks, ...messages].map((span) => span.end_s);
  return { blocks, messages: sorted, exposed, end_s: ends.reduce((a, b) => Math.max(a, b), 0) };
}

/** How much of their time axes the timelines of a run show, and from where: zooming one zooms all. */
class View {
  constructor() {
    this.gantts = [];
    this.zoomed = 1;
    this.from = 0; // as a share of the axis
  }

  /** Zoom so that this share of the axis comes to this place of what is seen, from 0 to 1. */
  zoom(factor, share, place) {
    const zoomed = Math.min(LARGEST_ZOOM, Math.max(1, this.zoomed * factor));
    this.show(zoomed, share - place / zoomed);
  }

  show(zoomed, from) {
    this.zoomed = zoomed;
    this.from = Math.min(1 - 1 / zoomed, Math.max(0, from));
    for (const gantt of this.gantts) {
      gantt.follow();
    }
  }
}

class Gantt {
  constructor(parent, tensors, label, view = new View()) {
    this.tensors = tensors;
    this.view = view;
    this.scroll = make("div", "scroll");
    this.canvas = make("div", "canvas");
    this.canvas.setAttribute("role", "group");
    this.canvas.setAttribute("aria-label", label);
    this.axis = make("div", "axis");
    this.axis.setAttribute("aria-hidden", "true");
    this.rows = make("div", "rows");
    this.canvas.append(this.rows, this.axis);
    this.scroll.append(this.canvas);
    parent.append(this.toolbar(), this.scroll);
    explore(this.canvas, ".span", (part, event) => part.about(event));
    this.scroll.addEventListener("scroll", () => this.scrolled());
    this.scroll.addEventListener("keydown", (event) => this.key(event));
    this.scroll.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    new ResizeObserver(() => this.follow()).observe(this.scroll);
    view.gantts.push(this);
  }

  toolbar() {
    const bar = make("div", "zoom");
    const buttons = [
      ["−", "zoom out", () => this.zoom(0.5, this.middle())],
      ["+", "zoom in", () => this.zoom(2, this.middle())],
      ["fit", "show everything", () => this.zoom(0, 0)],
    ];
    for (const [text, title, act] of buttons) {
      const button = make("button", "", text);
      button.type = "button";
      button.title = title;
      button.setAttribute("aria-label", title);
      button.addEventListener("click", act);
      bar.append(button);
    }
    return bar;
  }

  /**
   * `groups` are {title, note, timeline}, one above the other on one time axis; `ranks` what each
   * rank did, as document.py lists it.
   */
  show(groups, span_s, ranks = []) {
    this.span_s = span_s;
    this.end_s = lastEnd(groups, ranks);
    this.bars = [];
    this.rows.replaceChildren(...groups.map((group) => this.group(group)));
    if (ranks.length > 0) {
      this.rows.append(this.strips(ranks));
    }
    reachable(this.canvas, ".span");
    this.follow();
  }

  group({ title, note, timeline }) {
    const group = make("div", "group");
    const caption = make("p", "caption");
    caption.append(make("b", "", title), ` ${note}`);
    const compute = make("div", "row compute");
    const network = make("div", "row network");
    compute.append(...timeline.blocks.map((block) => this.block(block)));
    network.append(this.waits(timeline.messages));
    network.append(...timeline.messages.map((message) => this.message(message, timeline)));
    for (const [start_s, end_s] of timeline.exposed) {
      const exposed = make("div", "exposed");
      this.place(exposed, start_s, end_s);
      compute.append(exposed);
    }
    group.append(caption, compute, network);
    return group;
  }

  /** Who is slow: a rank whose backward ends late keeps the others waiting. */
  strips(ranks) {
    const group = make("div", "group ranks");
    const caption = make("p", "caption");
    caption.append(make("b", "", "each rank"), " in the measured iteration, on one clock");
    const backward_s = ranks.map(([, backward]) => busyLength(backward));
    const usual_s = median(backward_s);
    group.append(caption, ...ranks.map((rank, number) => this.strip(rank, number, usual_s)));
    return group;
  }

  strip(rank, number, usual_s) {
    const row = make("div", "row rank");
    const whole = make("div", "span whole");
    const ends_s = rank.map((busy) => busy[busy.length - 1] ?? 0);
    this.place(whole, 0, Math.max(...ends_s));
    RANK_LANES.forEach((lane, place) => {
      for (let pair = 0; pair < rank[place].length; pair += 2) {
        const bar = make("div", `part ${lane}`);
        this.place(bar, rank[place][pair], rank[place][pair + 1]);
        row.append(bar);
      }
    });
    const about = rankAbout(rank, number, usual_s);
    whole.setAttribute("role", "img");
    whole.setAttribute(
      "aria-label",
      `${about.title}: ${about.rows.map(([name, value]) => `${name} ${value}`).join(", ")}`,
    );
    whole.about = () => about;
    row.append(whole, make("span", "rank-name", `rank ${number}`));
    return row;
  }

  block(block) {
    const bar = make("div", `span block ${block.name}`);
    this.place(bar, block.start_s, block.end_s);
    this.bars.push([bar, block.name, block.end_s - block.start_s, 56]);
    const about = {
      title: block.name === "forward" ? "Forward pass" : "Backward pass",
      rows: [
        ["from", milliseconds(block.start_s)],
        ["to", milliseconds(block.end_s)],
      ],
    };
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `${about.title}, ${about.rows[0][1]} to ${about.rows[1][1]}`);
    bar.about = (event) => (event ? this.slotAbout(block, event) ?? about : about);
    return bar;
  }

  /** Which tensor's share of the pass is under the pointer, where that is known. */
  slotAbout(block, event) {
    const box = this.canvas.getBoundingClientRect();
    const at_s = ((event.clientX - box.left) / box.width) * this.span_s;
    const slot = block.slots.find(([, end_s]) => at_s < end_s);
    if (!slot || slot[2] === null) {
      return null;
    }
    const [start_s, end_s, place] = slot;
    return {
      title: block.name === "forward" ? "Forward pass" : "Backward pass",
      rows: [
        ["from", milliseconds(start_s)],
        ["to", milliseconds(end_s)],
      ],
      tensors: tensorLines(this.tensors, [place, 1]),
    };
  }

  message(message, timeline) {
    const bar = make("div", `span message b${message.bucket % COLOURS}`);
    this.place(bar, message.busy_s, message.end_s);
    const name = String(message.bucket + 1);
    this.bars.push([bar, name, message.end_s - message.busy_s, 10 + 8 * name.length]);
    const first = this.tensors.names[message.tensors[0]];
    const count = counted(tensorCount(message.tensors), "tensor");
    bar.setAttribute("role", "button");
    bar.setAttribute(
      "aria-label",
      `Message ${name}, ${count} from ${first}, ${byteSize(message.bytes)}, sent at ` +
        `${milliseconds(message.start_s)}, done at ${milliseconds(message.end_s)}`,
    );
    bar.about = () => this.messageAbout(message, timeline);
    return bar;
  }

  messageAbout(message, timeline) {
    const within = timeline.exposed.map(([start, end]) => [
      Math.max(start, message.busy_s),
      Math.max(Math.max(start, message.busy_s), Math.min(end, message.end_s)),
    ]);
    const count = counted(tensorCount(message.tensors), "tensor");
    return {
      title: `Message ${message.bucket + 1}: ${message.label}`,
      rows: [
        ["size", `${byteSize(message.bytes)} in ${count}`],
        ["ready", milliseconds(message.ready_s)],
        ["sent", milliseconds(message.start_s)],
        ["done", milliseconds(message.end_s)],
        ["took", milliseconds(message.end_s - message.start_s)],
        ["exposed", milliseconds(totalLength(within))],
      ],
      tensors: tensorLines(this.tensors, message.tensors),
    };
  }

  /** Thin lines from when a message was ready until it had the network: one path for each colour. */
  waits(messages) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("class", "waits");
    svg.setAttribute("viewBox", `0 0 ${this.span_s} 1`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    const steps = Array.from({ length: COLOURS }, () => []);
    for (const message of messages) {
      if (message.busy_s > message.ready_s) {
        steps[message.bucket % COLOURS].push(
          `M${message.ready_s} 0H${message.busy_s}V1H${message.ready_s}Z`,
        );
      }
    }
    steps.forEach((shapes, colour) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", `b${colour}`);
      path.setAttribute("d", shapes.join(""));
      svg.append(path);
    });
    return svg;
  }

  place(bar, start_s, end_s) {
    bar.middle_s = (start_s + end_s) / 2;
    bar.style.left = `${(100 * start_s) / this.span_s}%`;
    bar.style.width = `${(100 * (end_s - start_s)) / this.span_s}%`;
  }

  /**
   * A factor of 0 shows everything. What is at `share` of the axis stays where it is, or comes to the
   * middle if it was out of view; where nothing is drawn, the end of what is drawn does.
   */
  zoom(factor, share) {
    const drawn = Math.min(share, this.end_s / this.span_s);
    const place = (drawn - this.view.from) * this.view.zoomed;
    this.view.zoom(factor, drawn, place >= 0 && place <= 1 ? place : 0.5);
  }

  /** The bar in focus, otherwise the middle of what is drawn in view, as a share of the axis. */
  middle() {
    const focused = document.activeElement;
    if (this.canvas.contains(focused) && focused.middle_s !== undefined) {
      return focused.middle_s / this.span_s;
    }
    const { from, zoomed } = this.view;
    return (from + Math.max(from, Math.min(from + 1 / zoomed, this.end_s / this.span_s))) / 2;
  }

  key(event) {
    const factor = { "+": 2, "=": 2, "-": 0.5, 0: 0 }[event.key];
    if (factor !== undefined && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      this.zoom(factor, this.middle());
    }
  }

  wheel(event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      const box = this.canvas.getBoundingClientRect();
      this.zoom(event.deltaY < 0 ? 1.25 : 0.8, (event.clientX - box.left) / box.width);
    }
  }

  /** Somebody has scrolled; or this is what came of following the others. */
  scrolled() {
    const width = this.canvas.clientWidth;
    if (Math.abs(this.scroll.scrollLeft - this.view.from * width) > 1) {
      this.view.show(this.view.zoomed, this.scroll.scrollLeft / width);
    }
  }

  /** Show what the view says. */
  follow() {
    this.canvas.style.width = `${100 * this.view.zoomed}%`;
    this.scroll.scrollLeft = this.view.from * this.canvas.clientWidth;
    this.label();
  }

  /** Names where they have room, and gaps between bars where these leave any. */
  label() {
    const width = this.canvas.clientWidth;
    if (!width || !this.bars) {
      return;
    }
    for (const [bar, name, length_s, least] of this.bars) {
      const pixels = (length_s / this.span_s) * width;
      const text = pixels >= least ? name : "";
      if (bar.textContent !== text) {
        bar.textContent = text;
      }
      bar.classList.toggle("roomy", pixels >= LEAST_FOR_GAP);
    }
    this.ticks();
  }

  /** The part of the axis that is in view; on paper all of it. */
  ticks() {
    const width = this.canvas.clientWidth;
    const { from, zoomed } = this.view;
    this.axis.replaceChildren(...this.marks(width, from, from + 1 / zoomed));
  }

  print() {
    this.axis.replaceChildren(...this.marks(PAPER_WIDTH, 0, 1));
  }

  /** Of an axis of so many pixels, from one share of it to another. */
  marks(width, from, to) {
    const step_s = roundStep((this.span_s * TICK_WIDTH) / width);
    const last_s = this.span_s * (1 - LAST_TICK_WIDTH / width);
    const ticks = [];
    const end = Math.ceil((to * this.span_s) / step_s);
    for (let tick = Math.floor((from * this.span_s) / step_s); tick <= end; tick += 1) {
      if (tick * step_s <= last_s) {
        const mark = make("span", "tick", axisText(tick * step_s, step_s));
        mark.style.left = `${(100 * tick * step_s) / this.span_s}%`;
        ticks.push(mark);
      }
    }
    return ticks;
  }
}

/** When all that is drawn has ended. */
function lastEnd(groups, ranks) {
  const ends_s = ranks.flat().map((busy) => busy[busy.length - 1] ?? 0);
  return Math.max(...groups.map(({ timeline }) => timeline.end_s), ...ends_s);
}

/** `busy` has begins and ends in turn. */
function busyLength(busy) {
  return busy.reduce((sum, moment_s, place) => sum + (place % 2 ? moment_s : -moment_s), 0);
}

function median(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

/** `usual_s` is what backward takes the median rank. */
function rankAbout(rank, number, usual_s) {
  const rows = RANK_LANES.map((lane, place) => {
    const busy = rank[place];
    if (busy.length === 0) {
      return [lane, "none"];
    }
    return [lane, `${milliseconds(busy[0])} to ${milliseconds(busy[busy.length - 1])}`];
  });
  const backward_s = busyLength(rank[1]);
  if (usual_s > 0) {
    rows.push(["its backward", `${(backward_s / usual_s).toFixed(2)} times the median rank's`]);
  }
  return { title: `Rank ${number}`, rows };
}

/** The next larger of 1, 2, 5 times a power of ten. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}

function axisText(seconds, step_s) {
  return `${number(seconds * 1e3, Math.max(0, -Math.floor(Math.log10(step_s * 1e3))))} ms`;
}
