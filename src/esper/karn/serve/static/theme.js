// Before anything is drawn, so that a page does not flash in the wrong colours. "auto" follows the system.
"use strict";
(() => {
  const order = ["auto", "light", "dark"];
  const apply = (theme) => { document.documentElement.dataset.theme = theme; };
  let theme = "auto";
  try { theme = localStorage.getItem("esper-theme") || "auto"; } catch { /* storage is switched off */ }
  apply(order.includes(theme) ? theme : "auto");
  document.addEventListener("click", (event) => {
    if (!(event.target instanceof Element) || !event.target.closest("#theme")) return;
    const next = order[(order.indexOf(document.documentElement.dataset.theme) + 1) % order.length];
    apply(next);
    try { localStorage.setItem("esper-theme", next); } catch { /* then it lasts until the page is left */ }
  });
})();
