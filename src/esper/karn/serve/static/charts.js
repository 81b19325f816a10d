// Line charts and seed timelines as SVG. Colours come from the style sheet, so they follow the theme by themselves.
import { clean, el, number } from "/dom.js";

const HEIGHT = 170, LEFT = 46, RIGHT = 8, TOP = 6, BOTTOM = 20;
const charts = new Map(); // id -> what the cursor of that chart needs
const cursors = new Map(); // id -> index that is pointed at

function nice(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((one) => one >= rough * 0.999);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) ticks.push(tick);
  let digits = 0;
  while (digits < 8 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-9 * step * 10 ** digits) digits += 1;
  return { ticks, digits };
}

const finite = (value) => typeof value === "number" && Number.isFinite(value);

// A chart: { id, title, x: [...], xname, series: [{ name, y, color, dash, thin, low, high }], unit, width }
export function chart(spec) {
  const { id, title, x, series, width } = spec;
  const values = series.flatMap((one) => [one.y, one.low || [], one.high || []].flat()).filter(finite);
  const shown = series.filter((one) => one.y.some(finite));
  const caption = el("figcaption", null, el("h3", null, title), shown.filter((one) => one.name).map((one) =>
    el("span", { class: `key k${one.color}${one.dash ? " dashed" : ""}` }, one.name)), readout(spec));
  if (!x.length || !values.length) {
    return el("figure", { "data-key": id }, el("figcaption", null, el("h3", null, title)), el("p", { class: "note" }, "Nothing measured yet."));
  }
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) { low -= Math.abs(low) * 0.05 || 0.5; high += Math.abs(high) * 0.05 || 0.5; }
  const pad = (high - low) * 0.04;
  low -= pad; high += pad;
  const first = x[0], last = x[x.length - 1];
  const px = (at) => LEFT + (last === first ? 0.5 : (at - first) / (last - first)) * (width - LEFT - RIGHT);
  const py = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const vertical = nice(low, high, 4), horizontal = nice(first, last, Math.max(2, Math.floor(width / 90)));
  const parts = [];
  for (const tick of vertical.ticks) {
    parts.push(el("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: py(tick).toFixed(1), y2: py(tick).toFixed(1) }));
    parts.push(el("text", { x: LEFT - 5, y: (py(tick) + 4).toFixed(1), "text-anchor": "end" }, number(tick, vertical.digits)));
  }
  for (const tick of horizontal.ticks.filter(Number.isInteger)) {
    parts.push(el("text", { x: px(tick).toFixed(1), y: HEIGHT - 5, "text-anchor": "middle" }, String(tick)));
  }
  for (const one of series) if (one.low) parts.push(el("path", { class: `band f${one.color}`, d: band(x, one, px, py) }));
  for (const one of shown) {
    parts.push(el("path", { class: `line c${one.color}${one.dash ? " dash" : ""}${one.thin ? " thin" : ""}`, d: line(x, one.y, px, py) }));
    if (one.y.filter(finite).length === 1) {
      const at = one.y.findIndex(finite);
      parts.push(el("circle", { class: `f${one.color}`, cx: px(x[at]).toFixed(1), cy: py(one.y[at]).toFixed(1), r: 3 }));
    }
  }
  const at = cursors.get(id);
  if (at !== undefined && at < x.length) parts.push(el("line", { class: "cursor", x1: px(x[at]).toFixed(1), x2: px(x[at]).toFixed(1), y1: TOP, y2: HEIGHT - BOTTOM }));
  charts.set(id, { x, px });
  const newest = shown.map((one) => `${one.name || title} ${number(one.y.filter(finite).at(-1), 3)}`).join(", ");
  return el("figure", { "data-key": id }, caption, el("svg", {
    class: "chart", viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", tabindex: "0", "data-chart": id,
    "aria-label": `${title} by ${spec.xname || "round"}: newest ${newest}`,
  }, parts));
}

function readout(spec) {
  const at = cursors.get(spec.id);
  if (at === undefined || at >= spec.x.length) return null;
  const values = spec.series.filter((one) => finite(one.y[at])).map((one) => `${one.name || ""} ${number(one.y[at], 3)}${spec.unit || ""}`.trim());
  return el("span", { class: "note", "aria-live": "polite" }, `${spec.xname || "round"} ${spec.x[at]}: ${values.join(", ") || "not measured"}`);
}

function line(x, y, px, py) {
  let path = "", drawing = false;
  y.forEach((value, index) => {
    if (!finite(value)) { drawing = false; return; }
    path += `${drawing ? "L" : "M"}${px(x[index]).toFixed(1)} ${py(value).toFixed(1)}`;
    drawing = true;
  });
  return path;
}

function band(x, one, px, py) {
  const at = x.map((_, index) => index).filter((index) => finite(one.low[index]) && finite(one.high[index]));
  if (!at.length) return "";
  const up = at.map((index) => `${px(x[index]).toFixed(1)} ${py(one.high[index]).toFixed(1)}`);
  const down = at.map((index) => `${px(x[index]).toFixed(1)} ${py(one.low[index]).toFixed(1)}`).reverse();
  return `M${[...up, ...down].join("L")}Z`;
}

// Pointing at a chart, or walking along it with the arrow keys, shows the values there.
export function pointing(redraw) {
  const point = (event) => {
    const svg = event.target instanceof Element ? event.target.closest("svg[data-chart]") : null;
    if (!svg || !charts.has(svg.dataset.chart)) {
      if (cursors.size && !document.activeElement?.matches("svg[data-chart]")) { cursors.clear(); redraw(); }
      return;
    }
    const { x, px } = charts.get(svg.dataset.chart);
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    let best = 0;
    x.forEach((value, index) => { if (Math.abs(px(value) - at) < Math.abs(px(x[best]) - at)) best = index; });
    if (cursors.get(svg.dataset.chart) !== best) { cursors.clear(); cursors.set(svg.dataset.chart, best); redraw(); }
  };
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("keydown", (event) => {
    const svg = event.target instanceof Element ? event.target.closest("svg[data-chart]") : null;
    if (!svg || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    const { x } = charts.get(svg.dataset.chart);
    const now = cursors.get(svg.dataset.chart) ?? x.length - 1;
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: x.length - 1 }[event.key];
    cursors.clear();
    if (next !== undefined) cursors.set(svg.dataset.chart, Math.max(0, Math.min(x.length - 1, next)));
    redraw();
  });
}

// The life of every seed: a row per host and slot, time in epochs to the right, a colour per stage.
export function timeline(seeds, rows, epochs, first, last, width) {
  const label = Math.min(130, Math.max(60, ...rows.map((row) => row.label.length * 7 + 8)));
  const high = 16, top = 16;
  const total = (last - first + 1) * epochs;
  const px = (episode, epoch) => label + ((episode - first) * epochs + epoch) / total * (width - label - 4);
  const place = new Map(rows.map((row, index) => [row.key, index]));
  const parts = [];
  for (let episode = first; episode <= last; episode += 1) {
    const x = px(episode, 0).toFixed(1);
    parts.push(el("line", { class: "grid", x1: x, x2: x, y1: top - 4, y2: top + rows.length * high }));
    parts.push(el("text", { x: (px(episode, epochs / 2)).toFixed(1), y: 11, "text-anchor": "middle" }, String(episode)));
  }
  rows.forEach((row, index) => parts.push(el("text", { x: label - 6, y: top + index * high + 11, "text-anchor": "end" }, row.label)));
  for (const seed of seeds) {
    const index = place.get(seed.env + " " + seed.slot_id);
    if (index === undefined || seed.episode < first) continue;
    const y = top + index * high;
    const spans = seed.spans.map(([stage, start, stop]) => {
      if (stage === "PRUNED") {
        const x = px(seed.episode, start);
        return [el("line", { class: "cross", x1: x - 3, x2: x + 3, y1: y + 3, y2: y + 11 }), el("line", { class: "cross", x1: x - 3, x2: x + 3, y1: y + 11, y2: y + 3 })];
      }
      const x = px(seed.episode, start), end = px(seed.episode, Math.max(stop, start + 0.25));
      return el("rect", { class: clean(stage).replace(/\W/g, "_"), x: x.toFixed(1), y: y + 1, width: Math.max(end - x, 0.5).toFixed(1), height: high - 4 });
    });
    parts.push(el("g", { class: "row" }, el("title", null, story(seed)), spans));
  }
  return el("svg", { class: "timeline", width, height: top + rows.length * high + 4, role: "img", "aria-label": `Stages of ${seeds.length} seeds in episodes ${first} to ${last}; the table below has them in words` }, parts);
}

export function story(seed) {
  const path = seed.spans.map(([stage, start, stop]) => `${stage.toLowerCase()} ${start}${stop > start ? "-" + stop : ""}`).join(", ");
  return `${seed.blueprint} in ${seed.slot_id} of host ${seed.env}, episode ${seed.episode}: ${path}; brings ${number(seed.contribution_pp, 2, " pp")}`;
}
