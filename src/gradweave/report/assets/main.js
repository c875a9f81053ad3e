// Puts the pictures into their places. Those far down the page are drawn when they come near.

const SCALES_APART = 3;
const TOUCHING_S = 2e-9;

function onceNear(element, draw) {
  const watcher = new IntersectionObserver(
    (entries) => {
      if (entries.some((entry) => entry.isIntersecting)) {
        watcher.disconnect();
        draw();
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

function drawTimelines(section, run) {
  const panels = [...section.querySelectorAll(".panel")].map((panel, place) => {
    const runtime = run.runtimes[place];
    const kinds = ["measured", "predicted"].filter((kind) => runtime[kind] !== null);
    const timelines = kinds.map((kind) => readTimeline(run, runtime, kind));
    const groups = timelines.map((timeline, index) => ({
      title: kinds[index],
      note:
        `${milliseconds(timeline.end_s)}, ${milliseconds(totalLength(timeline.exposed))} of it ` +
        "waiting for the network",
      timeline,
    }));
    const end_s = Math.max(0, ...timelines.map((timeline) => timeline.end_s));
    return { panel, runtime, groups, end_s };
  });
  const longest_s = Math.max(...panels.map(({ end_s }) => end_s));
  const shortest_s = Math.min(...panels.map(({ end_s }) => end_s));
  const alike = section.querySelector("[name=alike]");
  alike.checked = longest_s < SCALES_APART * shortest_s;
  for (const one of panels) {
    const show = () => one.gantt.show(one.groups, alike.checked ? longest_s : one.end_s);
    onceNear(one.panel, () => {
      if (one.groups.length === 0) {
        one.panel.querySelector(".gantt").textContent =
          "No timeline: this training has noted none, and what messages cost is not known.";
        return;
      }
      one.gantt = new Gantt(
        one.panel.querySelector(".gantt"),
        run.tensors,
        `timelines of ${one.runtime.name}`,
      );
      show();
    });
    alike.addEventListener("change", () => one.gantt && show());
  }
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

const report = JSON.parse(document.getElementById("data").textContent);
document.body.append(tip, dialog);
document.querySelector("[name=theme]").addEventListener("click", switchTheme);
reachCharts();
document.querySelectorAll("section.run").forEach((section, place) => {
  drawTimelines(section, report.runs[place]);
  drawPlans(section, report.runs[place]);
});
if (document.getElementById("what-if")) {
  new WhatIf(document.getElementById("what-if"), report);
}
document.documentElement.dataset.ready = "true";
