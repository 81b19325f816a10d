// One stream for all tabs of a browser: browsers allow six connections to a server, and an open stream holds one.
"use strict";
const tabs = new Map(); // port -> { runs, heard }
const newest = new Map(); // "run section" -> message
const FORGET_MS = 300000; // a tab that was closed without a word
let source = null;
let opened = "";

function send(port, message) { port.postMessage(message); }

function wanted() { return [...new Set([...tabs.values()].flatMap((tab) => tab.runs))].sort().slice(0, 32); }

function reopen() {
  const runs = wanted();
  const url = "/api/stream" + (runs.length ? "?" + runs.map((run) => "run=" + encodeURIComponent(run)).join("&") : "");
  if (source && url === opened && source.readyState !== EventSource.CLOSED) return;
  if (source) source.close();
  opened = url;
  if (!tabs.size) { source = null; return; }
  source = new EventSource(url);
  source.onopen = () => tabs.forEach((_, port) => send(port, { state: "live" }));
  source.onerror = () => {
    tabs.forEach((_, port) => send(port, { state: "down" }));
    if (source.readyState === EventSource.CLOSED) setTimeout(reopen, 5000); // refused; the browser gives up, we do not
  };
  source.onmessage = (event) => {
    const message = JSON.parse(event.data);
    newest.set(message.run + " " + message.section, message);
    tabs.forEach((tab, port) => { if (!message.run || tab.runs.includes(message.run)) send(port, message); });
  };
}

onconnect = (event) => {
  const port = event.ports[0];
  port.onmessage = ({ data }) => {
    if (data.bye) tabs.delete(port);
    else {
      const before = tabs.get(port);
      tabs.set(port, { runs: data.runs, heard: Date.now() });
      if (source && source.readyState === EventSource.OPEN) send(port, { state: "live" });
      if (!before || String(before.runs) !== String(data.runs)) {
        newest.forEach((message) => { if (!message.run || data.runs.includes(message.run)) send(port, message); });
      }
    }
    tabs.forEach((tab, other) => { if (Date.now() - tab.heard > FORGET_MS) tabs.delete(other); });
    const open = new Set(wanted());
    [...newest.keys()].forEach((key) => { const { run } = newest.get(key); if (run && !open.has(run)) newest.delete(key); });
    reopen();
  };
  port.start();
};
