// Sliders that plan and simulate anew, with the planners of planner.js.

const WORKERS = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048];
const SPEED_BITS = [1e7, 4e11];
const STARTUP_MS = [0.001, 1e3];
const SPEEDUP = [0.1, 100];
const STEPS = 1000;

/** What is shown is what is computed with, so that anybody can repeat it. */
function threeDigits(value) {
  return Number(value.toPrecision(3));
}

/** A slider over [least, most] in equal ratios; the range grows to hold where it starts. */
function ratioScale([least, most], start) {
  const low = Math.log(Math.min(least, start));
  const high = Math.log(Math.max(most, start));
  return {
    last: STEPS,
    start: threeDigits(start),
    value: (position) =>
      position === Math.round(STEPS * ((Math.log(start) - low) / (high - low)))
        ? threeDigits(start)
        : threeDigits(Math.exp(low + ((high - low) * position) / STEPS)),
    position: Math.round(STEPS * ((Math.log(start) - low) / (high - low))),
  };
}

function listScale(values, start) {
  const all = [...new Set([...values, start])].sort((a, b) => a - b);
  return {
    last: all.length - 1,
    value: (position) => all[position],
    position: all.indexOf(start),
  };
}

class WhatIf {
  /** `wires` says what is left of a gradient's bytes on the wire, by how it is rounded. */
  constructor(section, { runs, wires }) {
    this.section = section;
    this.runs = runs;
    this.wires = wires;
    this.comparison = section.querySelector(".comparison");
    this.choice = section.querySelector("[name=run]");
    this.planner = section.querySelector("[name=planner]");
    this.wire = section.querySelector("[name=wire]");
    this.inputs = Object.fromEntries(
      ["workers", "bandwidth", "startup", "speed"].map((name) => [
        name,
        section.querySelector(`[name=${name}]`),
      ]),
    );
    this.strip = section.querySelector(".strip");
    explore(this.strip, ".bucket", (part) => part.about());
    for (const input of Object.values(this.inputs)) {
      input.addEventListener("input", () => this.later());
    }
    this.planner.addEventListener("change", () => this.later());
    this.wire.addEventListener("change", () => this.later());
    this.choice.addEventListener("change", () => this.start());
    section.querySelector("[name=reset]").addEventListener("click", () => this.start());
    this.start();
  }

  /** Everything as in the run. */
  start() {
    this.run = this.runs[Number(this.choice.value)];
    const { price } = this.run;
    this.scales = {
      workers: listScale(WORKERS, price.workers),
      bandwidth: ratioScale(SPEED_BITS, 8 / Math.max(price.link_s_per_byte, 1e-13)),
      startup: ratioScale(STARTUP_MS, Math.max(price.startup_s * 1e3, STARTUP_MS[0])),
      speed: ratioScale(SPEEDUP, 1),
    };
    this.inputs.startup.disabled = price.startup_s === 0;
    for (const [name, input] of Object.entries(this.inputs)) {
      input.max = this.scales[name].last;
      input.value = this.scales[name].position;
    }
    this.wire.selectedIndex = 0;
    this.wire.disabled = !this.run.is_compressible;
    const place = this.section.querySelector(".gantt");
    place.replaceChildren();
    this.gantt = new Gantt(place, this.run.tensors, "predicted timeline");
    this.compute();
  }

  later() {
    if (!this.waiting) {
      this.waiting = requestAnimationFrame(() => this.compute());
    }
  }

  setting(name) {
    return this.scales[name].value(Number(this.inputs[name].value));
  }

  compute() {
    this.waiting = null;
    const workers = this.setting("workers");
    const { startup, bandwidth } = this.scales;
    const { cost, latency_s } = priceAmong(
      this.run.price,
      workers,
      this.setting("startup") / startup.start,
      bandwidth.start / this.setting("bandwidth"),
    );
    const trace = atSpeed(this.run.tensors, this.setting("speed"));
    const onTheWire = onWire(cost, this.wires[this.wire.value]);
    const outcomes = Object.entries(PLANNERS).map(([name, plan]) => {
      const lengths = plan(trace, onTheWire);
      return { name, lengths, ...simulate(trace, lengths, onTheWire, workers, latency_s) };
    });
    this.write({
      workers: counted(workers, "worker"),
      bandwidth: bitRate(this.setting("bandwidth")),
      startup: `${this.setting("startup")} ms`,
      speed: `${this.setting("speed")} ×`,
    });
    this.compare(outcomes);
    this.draw(trace, outcomes.find((outcome) => outcome.name === this.planner.value));
  }

  /** What each slider stands for, to read and, exactly, for whoever repeats the computation. */
  write(texts) {
    for (const [name, input] of Object.entries(this.inputs)) {
      this.section.querySelector(`output[for=what-if-${name}]`).textContent = texts[name];
      input.setAttribute("aria-valuetext", texts[name]);
      input.dataset.value = this.setting(name);
    }
  }

  compare(outcomes) {
    const longest_s = outcomes.reduce((most, one) => Math.max(most, one.iteration_s), 0);
    this.comparison.replaceChildren(
      ...outcomes.map((outcome) => {
        const row = make("tr", outcome.name === this.planner.value ? "chosen" : "");
        const bar = make("td", "length");
        const length = make("i");
        length.style.width = `${(100 * outcome.iteration_s) / longest_s}%`;
        bar.append(length);
        row.append(
          make("th", "", outcome.name),
          bar,
          make("td", "number", milliseconds(outcome.iteration_s, longest_s)),
          make("td", "number", percent(outcome.compute_s / outcome.iteration_s)),
          make("td", "number", number(outcome.messages.length)),
        );
        row.firstChild.scope = "row";
        return row;
      }),
    );
  }

  draw(trace, outcome) {
    const { forward_s, compute_s } = outcome;
    const blocks = [
      { name: "forward", start_s: 0, end_s: forward_s, slots: [] },
      { name: "backward", start_s: forward_s, end_s: compute_s, slots: backwardSlots(trace, forward_s) },
    ].filter((block) => block.end_s > block.start_s);
    const { collective } = this.run.price;
    const by = `all-reduce by ${collective}`;
    const messages = outcome.messages.map((message, bucket) => ({
      ...message,
      bucket,
      label: this.wire.selectedIndex === 0 ? by : `${this.wire.value} ${by}`,
    }));
    const timeline = completeTimeline(blocks, messages);
    const exposed = milliseconds(totalLength(timeline.exposed), outcome.iteration_s);
    const note =
      `${milliseconds(outcome.iteration_s)} an iteration, ${exposed} of it waiting for the ` +
      `network, ${counted(outcome.lengths.length, "message")}`;
    this.gantt.show([{ title: `predicted, ${outcome.name}`, note, timeline }], timeline.end_s);
    let first = 0;
    const buckets = outcome.lengths.map((length) => [(first += length) - length, length]);
    drawSkyline(this.strip, this.run.tensors, buckets, buckets.map(() => collective));
    this.section.dataset.plan = JSON.stringify(outcome.lengths);
    this.section.dataset.iteration = outcome.iteration_s;
  }
}

function backwardSlots(trace, forward_s) {
  let now_s = forward_s;
  return trace.ready_s.map((ready_s, place) => {
    const start_s = now_s;
    now_s = forward_s + ready_s;
    return [start_s, now_s, place];
  });
}
