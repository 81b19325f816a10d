// Where the page is, what it knows, and when it is drawn. What is drawn is in screens.js.
import { el, morph } from "/dom.js";
import { pointing } from "/charts.js";
import { comparePage, evaluationPage, runPage, runsPage, SCREENS } from "/screens.js";

const known = new Map(); // "run section" -> data
const fetched = new Map(); // url -> { data, error, at }
const ui = { runFilter: "", eventFilter: "", slotFilter: "", eventKind: "events", chosen: new Set(), feed: "connecting" };
const REFETCH_MS = 2000;

// ---- where we are: #/, #/run/ID/SCREEN, #/compare/ID/ID..., #/evaluation/ID

export const link = (...parts) => "#/" + parts.map(encodeURIComponent).join("/");

function here() {
  const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map((part) => {
    try { return decodeURIComponent(part); } catch { return part; }
  });
  const [page, ...rest] = parts;
  if (page === "run" && rest.length) return { page, run: rest[0], screen: SCREENS.includes(rest[1]) ? rest[1] : SCREENS[0], host: rest[2] ?? null };
  if (page === "compare") return { page, runs: rest };
  if (page === "evaluation" && rest.length) return { page, id: rest[0] };
  return { page: "runs" };
}

// ---- what we know: pushed by the stream, or asked for

const context = {
  ui,
  link,
  section: (run, name) => known.get(run + " " + name),
  ask: (url, live) => ask(url, live),
  width: () => {
    const main = document.getElementById("main");
    const inside = main.clientWidth - parseFloat(getComputedStyle(main).paddingLeft) * 2;
    return Math.max(280, inside);
  },
};

function ask(url, live) {
  const entry = fetched.get(url);
  const old = !entry || (live && Date.now() - entry.at > REFETCH_MS);
  if (old && !(entry && entry.asking)) {
    const next = { ...(entry || {}), asking: true, at: Date.now() };
    fetched.set(url, next);
    fetch(url, { headers: { Accept: "application/json" } })
      .then((answer) => answer.json().then((data) => (answer.ok ? { data } : { error: data.error || answer.statusText })))
      .catch(() => ({ ...(next.data ? { data: next.data } : {}), error: "the server does not answer" }))
      .then((found) => { fetched.set(url, { ...found, at: Date.now() }); draw(); });
  }
  return fetched.get(url) || {};
}

function take(message) {
  if (message.state) ui.feed = message.state;
  else known.set(message.run + " " + message.section, message.data);
  draw();
}

const wantedRuns = () => { const at = here(); return at.page === "run" ? [at.run] : []; };

function connect() {
  if (window.trustedTypes) {
    trustedTypes.createPolicy("default", { createScriptURL: (url) => { if (url !== "/stream-worker.js") throw new TypeError(url); return url; } });
  }
  if (window.SharedWorker) {
    const worker = new SharedWorker("/stream-worker.js", "esper");
    worker.port.onmessage = ({ data }) => take(data);
    const subscribe = () => worker.port.postMessage({ runs: wantedRuns() });
    addEventListener("pagehide", () => worker.port.postMessage({ bye: true }));
    addEventListener("pageshow", subscribe);
    setInterval(subscribe, 30000);
    return subscribe;
  }
  let source = null;
  return () => { // one connection per tab, given back while the tab is hidden
    if (source) source.close();
    if (document.hidden) return;
    source = new EventSource("/api/stream" + wantedRuns().map((run) => "?run=" + encodeURIComponent(run)).join(""));
    source.onopen = () => take({ state: "live" });
    source.onerror = () => take({ state: "down" });
    source.onmessage = (event) => take(JSON.parse(event.data));
  };
}

// ---- drawing, at most once per frame

let asked = false;
export function draw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; show(); });
}

const FEED = { live: "live", down: "the server does not answer; trying again", connecting: "connecting" };

function show() {
  const at = here();
  const feed = document.getElementById("feed");
  if (feed.textContent !== FEED[ui.feed]) feed.textContent = FEED[ui.feed];
  feed.className = ui.feed;
  const tabs = document.getElementById("tabs");
  tabs.hidden = at.page !== "run";
  if (at.page === "run") {
    morph(tabs, SCREENS.map((name, index) => el("a", { href: link("run", at.run, name), "aria-current": name === at.screen ? "page" : null },
      el("kbd", { "aria-hidden": "true" }, index + 1), name)));
  }
  const title = { runs: "", run: at.run, compare: "comparison", evaluation: at.id }[at.page];
  morph(document.getElementById("where"), [title ? el("span", { class: "text" }, " / ", title) : el("span", null, "runs")]);
  document.title = title ? `${title} - Esper` : "Esper runs";
  const page = { runs: runsPage, run: runPage, compare: comparePage, evaluation: evaluationPage }[at.page];
  morph(document.getElementById("main"), page(at, context));
}

// ---- what a person does

let subscribe = () => {};
addEventListener("hashchange", () => { subscribe(); draw(); scrollTo(0, 0); });
addEventListener("resize", draw);
document.addEventListener("visibilitychange", () => { if (!document.hidden) { subscribe(); draw(); } });

document.addEventListener("input", ({ target }) => {
  if (target.dataset.set) { ui[target.dataset.set] = target.value; draw(); }
  if (target.dataset.choose) {
    if (target.checked) ui.chosen.add(target.dataset.choose); else ui.chosen.delete(target.dataset.choose);
    draw();
  }
});

document.addEventListener("click", ({ target }) => {
  const button = target instanceof Element ? target.closest("[data-go]") : null;
  if (button) location.hash = button.dataset.go;
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const at = here();
  if (at.page === "run" && /^[1-5]$/.test(event.key)) location.hash = link("run", at.run, SCREENS[Number(event.key) - 1]);
  else if (event.key === "/" && document.querySelector("input[type=search]")) { event.preventDefault(); document.querySelector("input[type=search]").focus(); }
  else if (event.key === "Escape" && !event.defaultPrevented && at.page !== "runs") location.hash = at.host ? link("run", at.run, at.screen) : "#/";
});

pointing(draw);
subscribe = connect();
subscribe();
draw();
