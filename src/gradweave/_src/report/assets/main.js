// Puts the pictures into their places. Those far down the page are drawn when they come near, and all
// of them before the page is printed.

// Beyond so many times the median, one runtime would squeeze all others on a common time scale.
const SQUEEZES = 2.5;
const TOUCHING_S = 2e-9;

const undrawn = new Map(); // what draws an element that is not in view yet

function drawNow(element) {
  const draw = undrawn.get(element);
  undrawn.delete(element);
  draw?.();
}

function onceNear(element, draw) {
  undrawn.set(element, draw);
  const watcher = new IntersectionObserver(
    (entries) => {
      if (entries.some((entry) => entry.isIntersecting)) {
        watcher.disconnect();
        drawNow(element);
      }
    },
    { rootMargin: "400px" },
  );
  watcher.observe(element);
}

/** A pass is one block, or several where it waited: times are written to the nanosecond. */
function passBlocks(name, slots) {
  const blocks = [];
  for (const slot of slots) {
    const last = blocks[blocks.length - 1];
    if (last && slot[0] <= last.end_s + TOUCHING_S) {
      last.end_s = Math.max(last.end_s, slot[1]);
      last.slots.push(slot);
    } else {
      blocks.push({ name, start_s: slot[0], end_s: slot[1], slots: [slot] });
    }
  }
  return blocks;
}

function readTimeline(run, runtime, kind) {
  const { compute, messages } = runtime[kind];
  const bucketOf = new Map();
  runtime.buckets.forEach((ranges, bucket) => {
    for (const place of tensorPlaces(ranges)) {
      bucketOf.set(place, bucket);
    }
  });
  const slots = run.computes[compute];
  const blocks = ["forward", "backward"].flatMap((name) => passBlocks(name, slots[name]));
  const forward_s = run.tensors.forward_s.reduce((sum, seconds) => sum + seconds, 0);
  const begin_s = slots.backward.length > 0 ? slots.backward[0][0] : forward_s;
  return completeTimeline(
    blocks,
    messages.map(([start_s, end_s, bytes, label, tensors]) => {
      const last = tensors[tensors.length - 2] + tensors[tensors.length - 1] - 1;
      const ready_s = kind === "measured" ? start_s : begin_s + run.tensors.ready_s[last];
      const bucket = bucketOf.get(tensors[0]);
      const way = `${label} by ${runtime.ways[bucket]}`;
      return { start_s, end_s, ready_s: Math.min(ready_s, start_s), bytes, label: way, tensors, bucket };
    }),
  );
}

const KINDS = ["measured", "predicted"];

/** What is known of a runtime, of one iteration each; the median stands above it. */
function timelineGroups(run, runtime) {
  return KINDS.filter((kind) => runtime[kind] !== null).map((kind) => {
    const timeline = readTimeline(run, runtime, kind);
    const exposed = milliseconds(totalLength(timeline.exposed), timeline.end_s);
    return {
      title: kind,
      note: `one iteration: ${milliseconds(timeline.end_s)}, ${exposed} of it waiting for the network`,
      timeline,
    };
  });
}

function drawTimelines(section, run) {
  const view = new View();
  const panels = [...section.querySelectorAll(".panel")]
    .map((panel, place) => ({ panel, runtime: run.runtimes[place] }))
    .filter(({ runtime }) => KINDS.some((kind) => runtime[kind] !== null))
    .map(({ panel, runtime }) => {
      const groups = timelineGroups(run, runtime);
      return { panel, runtime, groups, end_s: lastEnd(groups, runtime.ranks) };
    });
  if (panels.length === 0) {
    return;
  }
  const ends_s = panels.map(({ end_s }) => end_s);
  const longest_s = Math.max(...ends_s);
  const alike = section.querySelector("[name=alike]");
  alike.checked = longest_s <= SQUEEZES * median(ends_s);
  for (const one of panels) {
    const show = () =>
      one.gantt.show(one.groups, alike.checked ? longest_s : one.end_s, one.runtime.ranks);
    onceNear(one.panel, () => {
      const place = one.panel.querySelector(".gantt");
      one.gantt = new Gantt(place, run.tensors, `timelines of ${one.runtime.name}`, view);
      show();
    });
    alike.addEventListener("change", () => one.gantt && show());
  }
  views.push(view);
}

function drawPlans(section, run) {
  section.querySelectorAll(".plans .strip").forEach((strip, place) => {
    const runtime = run.runtimes[place];
    explore(strip, ".bucket", (part) => part.about());
    onceNear(strip, () => drawSkyline(strip, run.tensors, runtime.buckets, runtime.ways));
  });
}

function reachCharts() {
  const marks = ".role-mark [role=graphics-symbol][aria-label]:not([aria-label=''])";
  for (const chart of document.querySelectorAll(".chart")) {
    explore(chart, marks, (part) => ({ title: part.getAttribute("aria-label") }));
    reachable(chart, marks);
  }
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = getComputedStyle(root).getPropertyValue("--is-dark").trim() === "1";
  root.dataset.theme = isDark ? "light" : "dark";
}

function ganttsOnPage() {
  return [...views.flatMap(({ gantts }) => gantts), ...(asking === null ? [] : [asking.gantt])];
}

function preparePrint() {
  for (const element of [...undrawn.keys()]) {
    drawNow(element);
  }
  ganttsOnPage().forEach((gantt) => gantt.print());
}

function afterPrint() {
  ganttsOnPage().forEach((gantt) => gantt.follow());
}

const views = [];
const report = JSON.parse(document.getElementById("data").textContent);
document.body.append(tip, dialog);
document.querySelector("[name=theme]").addEventListener("click", switchTheme);
reachCharts();
document.querySelectorAll("section.run").forEach((section, place) => {
  drawTimelines(section, report.runs[place]);
  drawPlans(section, report.runs[place]);
});
const whatIf = document.getElementById("what-if");
const asking = whatIf === null ? null : new WhatIf(whatIf, report);
addEventListener("beforeprint", preparePrint);
addEventListener("afterprint", afterPrint);
document.documentElement.dataset.ready = "true";
