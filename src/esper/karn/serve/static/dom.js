// Elements from values, and changes to a page that keep focus, selection and scroll position.
// Text is only ever set as text: whatever a log holds, it cannot become markup.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "path", "line", "rect", "text", "title", "circle"]);
// Control characters, and those that turn the direction of text around.
const UNPRINTABLE = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

export function clean(text) { return String(text).replace(UNPRINTABLE, " "); }

export function el(tag, attributes, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(name, value === true ? "" : clean(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(clean(child)));
  }
  return node;
}

// Makes the children of `target` what `wanted` are, reusing nodes. Elements with a data-key are matched by it.
export function morph(target, wanted) {
  const keyed = new Map([...target.children].filter((node) => node.dataset.key).map((node) => [node.dataset.key, node]));
  wanted.flat(Infinity).filter((node) => node !== null && node !== undefined && node !== false).forEach((next, index) => {
    let node = next instanceof Node ? next : document.createTextNode(clean(next));
    const key = node instanceof Element ? node.dataset.key : undefined;
    let old = key ? keyed.get(key) : target.childNodes[index];
    if (old && key && target.childNodes[index] !== old) target.insertBefore(old, target.childNodes[index] || null);
    old = target.childNodes[index];
    if (!old) target.append(node);
    else if (!same(old, node)) target.replaceChild(node, old);
    else if (node instanceof Element) adopt(old, node);
    else if (old.data !== node.data) old.data = node.data;
  });
  const count = wanted.flat(Infinity).filter((node) => node !== null && node !== undefined && node !== false).length;
  while (target.childNodes.length > count) target.lastChild.remove();
}

function same(old, node) {
  if (old.nodeType !== node.nodeType || old.nodeName !== node.nodeName) return false;
  return !(node instanceof Element) || (old.dataset.key || "") === (node.dataset.key || "");
}

function adopt(old, node) {
  for (const name of old.getAttributeNames()) if (!node.hasAttribute(name)) old.removeAttribute(name);
  for (const name of node.getAttributeNames()) {
    if (old.getAttribute(name) !== node.getAttribute(name)) old.setAttribute(name, node.getAttribute(name));
  }
  if (old instanceof HTMLInputElement || old instanceof HTMLSelectElement) return; // theirs is what a person set
  morph(old, [...node.childNodes]);
}

// A cell with a class: n for numbers, secondary for what a narrow window leaves out.
export class Cell {
  constructor(kind, content) { this.kind = kind; this.content = content; }
}
export const cell = (kind, ...content) => new Cell(kind, content);

// Heads and cells are text, elements, or a `cell`. A row is a list of them, or { attributes, cells }.
export function table(heads, rows, attributes) {
  const make = (tag, extra, value) => (value instanceof Cell ? el(tag, { ...extra, class: value.kind }, value.content) : el(tag, extra, value));
  return el("div", { class: "wide" }, el("table", attributes || null,
    el("thead", null, el("tr", null, heads.map((head) => make("th", { scope: "col" }, head)))),
    el("tbody", null, rows.map((row) => el("tr", row.attributes || null, (row.cells || row).map((value) => make("td", null, value)))))));
}

export function number(value, digits = 2, unit = "") {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  const text = size !== 0 && (size < 10 ** -digits || size >= 1e7) ? value.toPrecision(3) : value.toFixed(digits);
  return text + unit;
}

export const whole = (value) => (value === null || value === undefined ? "-" : Number(value).toLocaleString("en"));

export function bytes(count) {
  const [size, unit] = count >= 1e9 ? [count / 1e9, "GB"] : count >= 1e6 ? [count / 1e6, "MB"] : [count / 1e3, "kB"];
  return `${size.toFixed(size < 10 ? 1 : 0)} ${unit}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  const minutes = Math.floor(seconds / 60);
  if (minutes >= 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return minutes < 2 ? `${Math.round(seconds)} s` : `${minutes} min`;
}

export function when(wall) {
  if (!wall) return "-";
  return new Date(wall * 1000).toLocaleString("sv", { hour12: false });
}
