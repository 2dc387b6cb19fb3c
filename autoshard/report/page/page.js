"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);

// ---- figures as people read them: the same as autoshard/common/sizes.py
function formatBytes(size) {
  const sign = size < 0 ? "-" : "";
  size = Math.abs(size);
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (i < 4 && !(size < 1000 || (i === 0 && size < 1024))) { size /= 1024; i++; }
  return sign + size.toFixed(i === 0 || size >= 100 ? 0 : size >= 10 ? 1 : 2) + " " + units[i];
}
function formatSeconds(seconds) {
  const [scale, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e-3, "ms"] : [1e-6, "us"];
  const value = seconds / scale;
  return value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2) + " " + unit;
}

// ---- theme
byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

// ---- timeline
const NS = "http://www.w3.org/2000/svg";
const shape = (name, attributes, text) => {
  const made = document.createElementNS(NS, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  return made;
};
const timeline = data.timeline;
const chart = byId("lanes");
const lanes = timeline.lanes.map(() => []);
for (const event of timeline.events) lanes[event[0]].push(event);
const END = timeline.end || 1;
let view = [0, END], lane = 0, chosen = null;

for (const kind of timeline.kinds) {
  const item = document.createElement("li"), mark = document.createElement("span");
  mark.className = "mark";
  mark.style.setProperty("--c", data.kinds[kind]);
  item.append(mark, kind);
  byId("kinds").append(item);
}

function tickStep(span, most) {
  const rough = span / most, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find(step => step * power >= rough);
}

function tickText(seconds, step) {  // one unit for all ticks, and digits that tell neighbours apart
  const [scale, unit] = view[1] >= 1 ? [1, "s"] : view[1] >= 1e-3 ? [1e-3, "ms"] : [1e-6, "us"];
  return (seconds / scale).toFixed(Math.max(0, Math.ceil(-Math.log10(step / scale) - 1e-9))) + " " + unit;
}

const longest = Math.max(0, ...timeline.lanes.map(name => name.length));
function draw() {
  const width = Math.max(chart.clientWidth, 200), left = Math.min(16 + 7 * longest, width < 500 ? 104 : 144), height = timeline.lanes.length > 24 ? 14 : 22;
  const top = 22, scale = (width - left - 8) / (view[1] - view[0]);
  const x = seconds => left + (seconds - view[0]) * scale;
  const svg = shape("svg", {height: top + timeline.lanes.length * height + 4, role: "presentation"});
  const step = tickStep(view[1] - view[0], Math.max(2, (width - left) / 90));
  for (let t = Math.ceil(view[0] / step) * step; t <= view[1] * (1 + 1e-9); t += step) {
    svg.append(shape("line", {class: "grid", x1: x(t), x2: x(t), y1: top - 4, y2: top + timeline.lanes.length * height}));
    if (x(t) < width - 30) svg.append(shape("text", {class: "tick", x: x(t) + 3, y: 13}, tickText(t, step)));
  }
  lanes.forEach((events, number) => {
    const y = top + number * height;
    svg.append(shape("rect", {class: "row", x: left, y: y + 1, width: width - left - 8, height: height - 2}));
    let drawn = -1, before = "";  // what is narrower than half a pixel is drawn with what came before it
    for (const event of events) {
      if (event[3] < view[0] || event[2] > view[1]) continue;
      const a = Math.max(x(event[2]), left), b = Math.min(x(event[3]), width - 8);
      if (b - drawn < 0.5 && event[1] === before) continue;
      const wide = Math.max(b - a, 0.7);
      svg.append(shape("rect", {x: a, y: y + 1, width: wide > 2 ? wide - 0.6 : wide, height: height - 2, fill: data.kinds[timeline.kinds[event[1]]]}));
      if (event[6] >= 0 && wide > 12 && height > 16) svg.append(shape("text", {class: "inside", x: a + 3, y: y + height - 7}, event[6]));
      drawn = b; before = event[1];
    }
    const name = timeline.lanes[number], fits = Math.floor((left - 15) / 7);
    svg.append(shape("text", {class: number === lane ? "current" : "", x: 5, y: y + height - (height > 16 ? 6 : 3)},
      name.length > fits ? "…" + name.slice(name.length - fits + 1) : name));
  });
  if (chosen && chosen[3] >= view[0] && chosen[2] <= view[1]) {
    const a = Math.max(x(chosen[2]), left), b = Math.min(x(chosen[3]), width - 8);
    svg.append(shape("rect", {class: "at", x: a, y: top + chosen[0] * height + 1, width: Math.max(b - a, 2), height: height - 2}));
  }
  chart.replaceChildren(svg);
  chart.view = {left, top, height, scale};
}

function look(begin, end) {
  const span = Math.min(Math.max(end - begin, END * 1e-7), END);
  begin = Math.min(Math.max(begin, 0), END - span);
  view = [begin, begin + span];
  draw();
}
const zoom = (factor, at = (view[0] + view[1]) / 2) => look(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
const move = share => look(view[0] + share * (view[1] - view[0]), view[1] + share * (view[1] - view[0]));

function describe(event) {
  const [number, kind, begin, end, label] = event;
  const words = [timeline.lanes[number].replace("→", "to"), timeline.kinds[kind]];
  if (event.length > 5) {
    if (event[5] >= 0) words.push("stage " + event[5]);
    if (event[6] >= 0) words.push("micro-batch " + event[6]);
    if (timeline.labels[event[7]]) words.push("from " + timeline.labels[event[7]]);
    if (event[8]) words.push(formatBytes(event[8]));
  }
  if (timeline.labels[label]) words.push(timeline.labels[label]);
  return words.join(" · ") + " · " + formatSeconds(end - begin) + ", from " + formatSeconds(begin);
}

function choose(event) {
  chosen = event;
  if (event) {
    lane = event[0];
    byId("event").textContent = describe(event);
    if (event[2] < view[0] || event[3] > view[1]) {
      const span = Math.max(view[1] - view[0], event[3] - event[2]);
      look(event[2] - span / 10, event[2] - span / 10 + span);
      return;
    }
  }
  draw();
}

function step(direction) {
  const own = lanes[lane];
  let at = chosen && chosen[0] === lane ? own.indexOf(chosen) + direction : own.findIndex(event => event[3] > view[0]);
  at = Math.min(Math.max(at, 0), own.length - 1);
  choose(own[at]);
}

const views = {
  in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.4), right: () => move(0.4), all: () => look(0, END),
};
document.querySelectorAll("[data-view]").forEach(button => button.addEventListener("click", views[button.dataset.view]));
const keys = {
  "+": views.in, "=": views.in, "-": views.out, "0": views.all, Home: views.all, ArrowLeft: views.left, ArrowRight: views.right,
  ArrowUp: () => { lane = Math.max(lane - 1, 0); chosen = null; draw(); },
  ArrowDown: () => { lane = Math.min(lane + 1, lanes.length - 1); chosen = null; draw(); },
  ".": () => step(1), ",": () => step(-1),
};
chart.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
});
const secondsAt = event => view[0] + (event.clientX - chart.getBoundingClientRect().left - chart.view.left) / chart.view.scale;
chart.addEventListener("wheel", event => {
  if (!event.ctrlKey) return;
  event.preventDefault();
  zoom(event.deltaY > 0 ? 1.25 : 0.8, secondsAt(event));
}, {passive: false});
let drag = null;
chart.addEventListener("pointerdown", event => { drag = {x: event.clientX, view, moved: false}; });
addEventListener("pointermove", event => {
  if (!drag) return;
  const by = (drag.x - event.clientX) / chart.view.scale;
  if (Math.abs(event.clientX - drag.x) > 3) drag.moved = true;
  if (drag.moved) look(drag.view[0] + by, drag.view[1] + by);
});
addEventListener("pointerup", event => {
  const clicked = drag && !drag.moved && chart.contains(event.target);
  drag = null;
  if (!clicked) return;
  const number = Math.floor((event.clientY - chart.getBoundingClientRect().top - chart.view.top) / chart.view.height);
  if (!lanes[number]) return;
  const at = secondsAt(event), near = 3 / chart.view.scale;
  choose(lanes[number].find(one => one[2] - near <= at && at <= one[3] + near) || null);
});
new ResizeObserver(draw).observe(chart);
draw();

// ---- tables that are wider than the page
const wide = new ResizeObserver(entries => entries.forEach(({target}) => target.classList.toggle("more", target.scrollWidth > target.clientWidth + 1)));
document.querySelectorAll(".scroll").forEach(table => wide.observe(table));

// ---- tree
const folds = [...document.querySelectorAll(".tree details")];
byId("open-all").addEventListener("click", () => folds.forEach(fold => { fold.open = true; }));
byId("close-all").addEventListener("click", () => folds.forEach((fold, i) => { fold.open = i === 0; }));
