// The pages, as functions from what is known to elements. They keep nothing and judge nothing.
import { bytes, cell, duration, el, number, table, when, whole } from "/dom.js";
import { chart, story, timeline } from "/charts.js";

export const SCREENS = ["overview", "hosts", "policy", "seeds", "events"];
const MARKS = { GERMINATED: "g", TRAINING: "t", BLENDING: "b", HOLDING: "h", FOSSILIZED: "F", PRUNED: "x" };
const COLORS = ["0", "1", "2", "3", "4", "5"];
const STATE_CLASS = { running: "info", completed: "info", failed: "error", died: "error", unreadable: "error", interrupted: "warning", elsewhere: "warning", empty: "note" };
const waiting = (text) => [el("p", { class: "note" }, text)];
const words = (text) => el("span", { class: "text" }, text);
const search = (name, ui, placeholder, label) => el("input", { type: "search", "data-set": name, "data-key": name, value: ui[name], placeholder, "aria-label": label });

// ---- all runs

export function runsPage(at, { ui, section, link }) {
  const found = section("", "catalogue");
  if (!found) return waiting("Looking for runs.");
  const wanted = ui.runFilter.toLowerCase();
  const shown = found.runs.filter((run) => [run.id, run.group, run.task, run.state].some((text) => String(text ?? "").toLowerCase().includes(wanted)));
  const chosen = [...ui.chosen].filter((id) => found.runs.some((run) => run.id === id));
  const rows = shown.map((run) => ({
    attributes: { "data-key": run.id },
    cells: [
      el("input", { type: "checkbox", "data-choose": run.id, checked: ui.chosen.has(run.id), "aria-label": `compare ${run.id}` }),
      el("a", { class: "text", href: link("run", run.id) }, run.id),
      el("span", { class: STATE_CLASS[run.state] || null }, run.state, run.note ? el("span", { class: "note text" }, " " + run.note) : null),
      cell("n", run.num_rounds ? `${run.num_rounds_done ?? 0}/${run.num_rounds}` : "-"),
      cell("n", number(run.accuracy_pct, 1, " %")),
      cell("n secondary", number(run.return_mean, 3)),
      cell("secondary", words(run.task ?? "-")),
      cell("secondary", words(run.group ?? "-")),
      cell("nowrap secondary", when(run.started_wall)),
      cell("n secondary", bytes(run.log_bytes)),
    ],
  }));
  return [
    el("h2", null, "Runs"),
    el("div", { class: "tools" },
      search("runFilter", ui, "filter: name, group, task, state", "filter runs"),
      el("button", { type: "button", "data-go": link("compare", ...chosen), disabled: chosen.length < 1 }, `compare ${chosen.length || "the chosen"}`),
      el("span", { class: "note" }, `${shown.length} of ${found.runs.length}`)),
    rows.length
      ? table(["", "run", "state", cell("n", "rounds"), cell("n", "accuracy"), cell("n secondary", "return"), cell("secondary", "task"), cell("secondary", "group"), cell("secondary", "began"), cell("n secondary", "log")], rows)
      : el("p", { class: "note" }, found.runs.length ? "No run fits the filter." : "There is no run below this folder. esper train makes one."),
    found.cut ? el("p", { class: "warning" }, "There is more below this folder than is listed. Serve a smaller one.") : null,
    found.evaluations.length ? el("h2", null, "Evaluations") : null,
    found.evaluations.length ? table(["evaluation", "task", "subject", cell("n", "pairs"), "best arm", "claims", cell("secondary", "written")],
      found.evaluations.map((one) => ({
        attributes: { "data-key": one.id },
        cells: [el("a", { class: "text", href: link("evaluation", one.id) }, one.id), words(one.task ?? "-"), words(one.subject ?? "-"),
          cell("n", whole(one.num_seeds)), words(one.best_arm ?? "-"), words(one.outcome ?? "-"), cell("nowrap secondary", when(one.written_wall))],
      }))) : null,
  ];
}

// ---- one run

export function runPage(at, context) {
  const failed = context.section(at.run, "error");
  if (failed) return [el("div", { class: "verdict error" }, el("p", { class: "now" }, "This run cannot be read."), el("p", { class: "text" }, failed.error))];
  const overview = context.section(at.run, "overview");
  if (!overview) {
    const found = context.section("", "catalogue");
    const missing = found && !found.runs.some((run) => run.id === at.run);
    return waiting(missing ? "There is no such run below the served folder." : "Reading the log.");
  }
  const screen = { overview: overviewScreen, hosts: hostsScreen, policy: policyScreen, seeds: seedsScreen, events: eventsScreen }[at.screen];
  return [
    overview.reading ? el("p", { class: "warning", role: "status" }, overview.reading) : null,
    overview.reading && at.screen !== "overview" ? null : screen(at, context, overview),
    overview.passed_over ? el("p", { class: "note" }, overview.passed_over) : null,
  ];
}

function columns(context) {
  const width = context.width();
  const count = Math.max(1, Math.floor((width + 16) / (26 * 16 + 16)));
  return Math.floor((width - (count - 1) * 16) / count);
}

function overviewScreen(at, context, overview) {
  const { verdict } = overview;
  const share = overview.num_rounds ? overview.rounds_done / overview.num_rounds : null;
  const left = overview.left_s === null ? "" : `, about ${duration(overview.left_s)} left`;
  return [
    verdict ? el("div", { class: `verdict ${verdict.severity}`, role: "status" },
      el("p", { class: "now" }, verdict.headline), el("p", null, "Why: ", verdict.why), el("p", null, "Next: ", verdict.next)) : null,
    overview.others.length ? el("ul", null, overview.others.map((one) => el("li", null, el("span", { class: one.severity }, one.headline), " ", el("span", { class: "note" }, one.why)))) : null,
    el("label", null, `${overview.rounds_done} of ${overview.num_rounds ?? "?"} rounds${left}`,
      el("progress", { max: 1, value: share })),
    roundCharts(context.section(at.run, "curves"), columns(context)),
    el("h2", null, "Now"),
    el("dl", { class: "figures" }, overview.figures.map(([name, text]) => [el("dt", null, name), el("dd", { class: "text" }, text)])),
    el("h2", null, "Newest warnings; what to act on is said above"),
    overview.warnings.length ? eventTable([...overview.warnings].reverse()) : el("p", { class: "note" }, "None."),
    overview.num_warnings > overview.warnings.length ? el("p", { class: "note" }, el("a", { href: context.link("run", at.run, "events") }, `all ${overview.num_warnings} warnings`)) : null,
    el("p", { class: "note text" }, `${overview.task ?? ""}, controller ${overview.controller ?? "-"}, seed ${overview.seed ?? "-"}, group ${overview.group ?? "-"}, attempt ${overview.attempt ?? "-"}, ${overview.folder}`),
  ];
}

function roundCharts(curves, width) {
  if (!curves) return null;
  const r = curves.rounds;
  const spread = (sign) => r.return_mean.map((value, index) => (value === null || r.return_std[index] === null ? null : value + sign * r.return_std[index]));
  return el("div", { class: "charts" },
    chart({ id: "accuracy", title: "validation accuracy (%)", x: r.round, width, unit: " %", series: [
      { name: "mean of hosts", y: r.accuracy_mean_pct, low: r.accuracy_worst_pct, high: r.accuracy_best_pct, color: "0" },
      { name: "delivered network", y: r.committed_accuracy_pct, color: "2" },
      { name: "ten rounds", y: r.rolling_accuracy_pct, color: "1", dash: true }] }),
    chart({ id: "return", title: "return", x: r.round, width, series: [{ name: "mean of hosts", y: r.return_mean, low: spread(-1), high: spread(1), color: "5" }] }),
    chart({ id: "size", title: "parameters, times the host's own", x: r.round, width, series: [{ name: "", y: r.params_ratio_mean, color: "3" }] }),
    chart({ id: "loss", title: "validation loss at the end", x: r.round, width, series: [{ name: "mean of hosts", y: r.loss_mean, low: r.loss_best, high: r.loss_worst, color: "4" }] }));
}

// ---- hosts

const chip = (stage, title) => el("span", { class: stage ? `chip ${String(stage).replace(/\W/g, "_")}` : "chip empty", title }, stage ? MARKS[stage] ?? "?" : "·");
const legend = () => el("p", { class: "note" }, Object.entries(MARKS).map(([stage, mark]) => [chip(stage, stage), stage.toLowerCase(), " \u00a0"]));

function hostsScreen(at, context) {
  const hosts = context.section(at.run, "hosts");
  if (!hosts || !hosts.rows.length) return waiting("No host has finished an epoch yet.");
  const slots = hosts.slot_ids;
  const rows = hosts.rows.map((row) => ({
    attributes: { "data-key": String(row.env), class: String(row.env) === at.host ? "chosen" : null },
    cells: [
      el("a", { href: context.link("run", at.run, "hosts", String(row.env)) }, `host ${row.env}`), cell("n", whole(row.episode)),
      cell("n", whole(row.epoch) + (hosts.epochs ? `/${hosts.epochs - 1}` : "")), cell("n", number(row.accuracy_pct, 1)), cell("n secondary", number(row.committed_pct, 1)), cell("n", number(row.loss, 3)), cell("n", whole(row.params)),
      cell("nowrap", slots.map((slot) => chip(row.slots[slot]?.stage, slot))), words(row.action ?? ""),
    ],
  }));
  return [
    table(["", cell("n", "episode"), cell("n", "epoch"), cell("n", "acc. %"), cell("n secondary", "delivered %"), cell("n", "loss"), cell("n", "params"), "slots", "last action"], rows),
    legend(),
    at.host === null ? el("p", { class: "note" }, "Choose a host to see its seeds, decisions and coalitions.") : hostDetail(at, context, hosts),
  ];
}

function hostDetail(at, context, hosts) {
  const { data, error } = context.ask(`/api/host?run=${encodeURIComponent(at.run)}&env=${encodeURIComponent(at.host)}`, true);
  if (!data) return el("p", { class: "note text" }, error || "Reading.");
  const width = columns(context), e = data.epochs;
  const rows = (hosts.slot_ids.length ? hosts.slot_ids : Object.keys(data.slots)).map((slot) => ({ key: data.env + " " + slot, label: slot }));
  const gate = (slot, state) => {
    const found = data.gates[slot];
    if (!found || found.passed || found.seed_id !== state.seed_id || state.stage === "FOSSILIZED") return "";
    return found.failed.map(([name, value, limit]) => `${name} ${number(value, 3)} (limit ${number(limit, 3)})`).join(", ");
  };
  return el("section", { "data-key": "host-detail" },
    el("h2", null, `Host ${data.env}, episode ${data.episode}`),
    el("div", { class: "charts" },
      chart({ id: "host-accuracy", title: "accuracy (%)", xname: "epoch", x: e.epoch, width, unit: " %", series: [{ name: "with all seeds", y: e.accuracy_pct, color: "0" }, { name: "delivered network", y: e.committed_pct, color: "2" }] }),
      chart({ id: "host-loss", title: "loss", xname: "epoch", x: e.epoch, width, series: [{ name: "", y: e.loss, color: "4" }] })),
    el("h2", null, "Slots over time"),
    data.seeds.length ? el("div", { class: "wide" }, timeline(data.seeds, rows, hosts.epochs || Math.max(1, e.epoch.length), data.episode, data.episode, Math.min(context.width(), 900))) : el("p", { class: "note" }, "Nothing was planted in this episode."),
    Object.keys(data.slots).length ? table(["slot", "stage", "blueprint", cell("n", "blended in"), cell("n", "epochs in stage"), cell("n", "params"), cell("n", "brings pp"), cell("n", "gradient to the host's"), "waits for"],
      Object.entries(data.slots).map(([slot, s]) => [words(slot), cell("nowrap", [chip(s.stage), " ", words(String(s.stage).toLowerCase())]), words(s.blueprint), cell("n", number(s.alpha_share, 2)), cell("n", whole(s.epochs_in_stage)), cell("n", whole(s.params)), cell("n", number(s.contribution_pp, 2)), cell("n", number(s.grad_ratio, 2)), words(gate(slot, s))])) : null,
    el("h2", null, "Last decisions"),
    table([cell("n", "epoch"), "op", cell("n", "probability"), cell("n", "value"), cell("n", "reward"), "paid for"], data.actions.map((a) => [
      cell("n", whole(a.epoch)), words([a.op, a.slot_id, a.blueprint, a.blend].filter(Boolean).join(" ") + (a.forced ? " (only choice)" : "")), cell("n", number(a.prob_share, 2)), cell("n", number(a.value, 3)), cell("n", number(a.reward, 3)),
      words(Object.entries(a.components).map(([term, amount]) => `${term} ${number(amount, 3)}`).join(", "))])),
    data.coalition ? [el("h2", null, "What the seeds are worth together"), table(["enabled", cell("n", "acc. %"), cell("n", "loss")],
      data.coalition.rows.map((row) => [words(data.coalition.slot_ids.filter((_, index) => row.mask[index] === "1").join(" + ") || "none"), cell("n", number(row.accuracy_pct, 1)), cell("n", number(row.loss, 3))]))] : null);
}

// ---- policy

function policyScreen(at, context) {
  const policy = context.section(at.run, "policy"), curves = context.section(at.run, "curves");
  if (!policy || !policy.update || !curves) return waiting("No policy was updated yet; a fixed controller never has an update.");
  const u = policy.update, c = curves.updates, width = columns(context);
  const heads = Object.keys(u.heads);
  const one = (id, title, series) => chart({ id, title, x: c.round, width, series });
  return [
    u.performed ? null : el("p", { class: "error text" }, `The newest update took no step: ${u.skip_reason}`),
    table(["head", cell("n", "entropy share"), cell("n", "KL"), cell("n", "clipped"), cell("n", "gradient"), cell("n", "usable steps"), "state", "what it chose in the newest round"], heads.map((head) => {
      const h = u.heads[head], stats = policy.choices[head];
      const mix = stats && stats.num_decisions ? Object.entries(stats.choices).map(([name, count]) => `${name} ${(100 * count.num_chosen / stats.num_decisions).toFixed(0)} %`).join(", ") : "";
      return [words(head), cell("n", number(u.head_entropies[head], 2)), cell("n", number(h.kl, 4)), cell("n", number(h.clip_fraction, 2)), cell("n", number(h.grad_norm, 3)), cell("n", whole(h.num_usable)), words(h.grad_state), words(mix)];
    })),
    el("div", { class: "charts" },
      one("kl", "KL (nats)", [{ name: "KL", y: c.approx_kl, color: "0" }, { name: "target", y: c.target_kl, color: "dim", dash: true }]),
      one("entropy", "entropy (share of the maximum)", heads.filter((head) => c["entropy_" + head]).map((head, index) => ({ name: head, y: c["entropy_" + head], color: COLORS[index % COLORS.length] }))),
      one("critic", "critic", [{ name: "error / deviation", y: c.value_nrmse, color: "1" }, { name: "explained variance", y: c.explained_variance, color: "0" }]),
      one("losses", "losses", [{ name: "policy", y: c.policy_loss, color: "0" }, { name: "value", y: c.value_loss, color: "1" }]),
      one("clipped", "clipped (share)", [{ name: "", y: c.clip_fraction, color: "3" }]),
      one("gradient", "gradient norm", [{ name: "largest", y: c.max_grad, color: "5" }, { name: "clipped at", y: c.clip_norm, color: "dim", dash: true }])),
    el("h2", null, `Update of round ${policy.round}`),
    el("dl", { class: "figures" }, facts(u).map(([name, text]) => [el("dt", null, name), el("dd", null, text)])),
  ];
}

function facts(u) {
  const found = [
    ["ratio", `${number(u.ratio_min, 3)} to ${number(u.ratio_max, 3)}`],
    ["steps", `${whole(u.num_optimizer_steps)}${u.kl_stopped ? ", ended early by its KL" : ""}`],
    ["learning rate", number(u.learning_rate, 6)], ["entropy coefficient", number(u.entropy_coef, 4)],
    ["decisions with a choice", number(u.decision_share, 2)], ["return correlation", number(u.return_corr, 2)],
  ];
  if (u.lstm) found.push(["memory", `output rms ${number(u.lstm.h_rms, 3)}, cell rms ${number(u.lstm.c_rms, 3)}, saturated ${number(u.lstm.saturated_share, 3)}, dead units ${number(u.lstm.dead_share, 3)}`]);
  if (u.observations) found.push(["observations", `outliers ${number(u.observations.outlier_share, 4)}, clipped ${number(u.observations.clipped_share, 4)}, drift ${number(u.observations.drift, 3)}`]);
  return found;
}

// ---- seeds

function seedsScreen(at, context) {
  const data = context.section(at.run, "seeds");
  if (!data || !data.seeds.length || !data.epochs) return waiting("No seed was planted yet.");
  const keys = [...new Map(data.seeds.map((seed) => [seed.env + " " + seed.slot_id, seed])).values()].sort((a, b) => a.env - b.env || (a.slot_id < b.slot_id ? -1 : 1));
  const wanted = context.ui.slotFilter;
  const rows = keys.map((seed) => ({ key: seed.env + " " + seed.slot_id, label: `host ${seed.env} ${seed.slot_id}` })).filter((row) => row.label.includes(wanted));
  const width = Math.max(context.width(), 560);
  const newest = data.seeds.filter((seed) => `host ${seed.env} ${seed.slot_id}`.includes(wanted)).slice(-60).reverse();
  return [
    el("h2", null, "What became of each blueprint"),
    table(["blueprint", cell("n", "planted"), cell("n", "kept"), cell("n", "pruned"), cell("n", "mean gain of the kept (pp)")], data.blueprints.map((one) => [words(one.name), cell("n", whole(one.num_germinated)), cell("n", whole(one.num_fossilized)), cell("n", whole(one.num_pruned)), cell("n", number(one.mean_contribution_pp, 2))])),
    el("h2", null, `The life of every seed, episodes ${data.first_episode} to ${data.last_episode}`),
    el("div", { class: "tools" }, search("slotFilter", context.ui, "filter, such as host 0 or r0c1", "filter hosts and slots"), legend()),
    el("div", { class: "wide" }, timeline(data.seeds, rows, data.epochs, data.first_episode, data.last_episode, width)),
    el("h2", null, "Newest seeds"),
    table([cell("n", "host"), cell("n", "episode"), "slot", "blueprint", cell("n", "params"), cell("n", "brings pp"), "life in epochs"], newest.map((seed) => [cell("n", seed.env), cell("n", seed.episode), words(seed.slot_id), words(seed.blueprint), cell("n", whole(seed.params)), cell("n", number(seed.contribution_pp, 2)), words(story(seed).split(": ")[1]?.split("; ")[0] ?? "")])),
  ];
}

// ---- events

function eventsScreen(at, context) {
  const data = context.section(at.run, "events");
  if (!data) return waiting("No event yet.");
  const { ui } = context;
  const kept = { events: data.events, warnings: data.warnings, steps: data.steps }[ui.eventKind] || data.events;
  const wanted = ui.eventFilter.toLowerCase();
  const shown = kept.filter((event) => `${event.type} ${event.severity} round ${event.round} env ${event.env} ${event.text}`.toLowerCase().includes(wanted));
  return [
    el("div", { class: "tools" },
      el("select", { "data-set": "eventKind", "data-key": "eventKind", "aria-label": "which events" },
        [["events", "all but single steps"], ["warnings", "warnings"], ["steps", "single steps"]].map(([value, text]) => el("option", { value, selected: value === ui.eventKind }, text))),
      search("eventFilter", ui, "filter by text", "filter events"),
      el("span", { class: "note" }, `${shown.length} newest, newest first. esper query has all.`)),
    eventTable(shown),
  ];
}

function eventTable(events) {
  return table([cell("n", "seq"), cell("secondary", "time"), cell("n", "round"), cell("n", "host"), cell("n secondary", "epoch"), "event", "what"], events.map((event) => ({
    attributes: { "data-key": String(event.seq) },
    cells: [cell("n", whole(event.seq)), cell("nowrap secondary", when(event.wall).slice(11)), cell("n", event.round ?? ""), cell("n", event.env ?? ""), cell("n secondary", event.epoch ?? ""),
      el("span", { class: event.severity === "info" || event.severity === "debug" ? null : event.severity }, event.type), words(event.text)],
  })), { class: "events" });
}

// ---- several runs

export function comparePage(at, context) {
  if (!at.runs.length) return waiting("Choose runs in the list first.");
  const { data, error } = context.ask("/api/compare?" + at.runs.map((run) => "run=" + encodeURIComponent(run)).join("&"), true);
  if (!data) return waiting(error || "Reading the logs.");
  const good = data.filter((run) => !run.error && run.round.length);
  const groups = [...new Set(good.map((run) => run.group ?? "-"))].sort();
  const width = columns(context);
  const one = (id, title, name) => chart({ id, title, x: axis(good), width, series: groupSeries(good, groups, name) });
  return [
    el("p", { class: "note" }, "Thick lines are means over the runs of a group, as far as all of them have come; thin ones are single runs."),
    el("div", { class: "charts" }, one("cmp-accuracy", "validation accuracy (%)", "accuracy_pct"), one("cmp-committed", "delivered network (%)", "committed_pct"), one("cmp-return", "return", "return_mean"), one("cmp-size", "parameters, times the host's own", "params_ratio")),
    table(["run", "group", "task", "controller", cell("n", "seed"), cell("n", "rounds"), cell("n", "accuracy"), cell("n", "delivered"), cell("n", "return")], data.map((run) => run.error
      ? [words(run.id), cell("error", words(run.error))]
      : [el("a", { class: "text", href: context.link("run", run.id) }, run.id), el("span", { class: `text key k${COLORS[groups.indexOf(run.group ?? "-") % COLORS.length]}` }, run.group ?? "-"), words(run.task ?? "-"), words(run.controller ?? "-"), cell("n", run.seed ?? "-"), cell("n", whole(run.round.length)),
        cell("n", number(run.accuracy_pct.at(-1), 1, " %")), cell("n", number(run.committed_pct.at(-1), 1, " %")), cell("n", number(run.return_mean.at(-1), 3))])),
  ];
}

function axis(runs) {
  const last = Math.max(-1, ...runs.map((run) => run.round.at(-1) ?? -1));
  return Array.from({ length: last + 1 }, (_, index) => index);
}

function groupSeries(runs, groups, name) {
  const rounds = axis(runs);
  const aligned = (run) => { const by = new Map(run.round.map((round, index) => [round, run[name][index]])); return rounds.map((round) => by.get(round) ?? null); };
  return groups.flatMap((group, index) => {
    const color = COLORS[index % COLORS.length];
    const own = runs.filter((run) => (run.group ?? "-") === group).map(aligned);
    const mean = rounds.map((_, at) => (own.every((y) => y[at] !== null) ? own.reduce((sum, y) => sum + y[at], 0) / own.length : null));
    return [...(own.length > 1 ? own.map((y) => ({ name: "", y, color, thin: true })) : []), { name: group, y: mean, color }];
  });
}

// ---- an evaluation

export function evaluationPage(at, context) {
  const url = `id=${encodeURIComponent(at.id)}`;
  const { data, error } = context.ask(`/api/evaluation?${url}`, false);
  if (!data) return waiting(error || "Reading.");
  const s = data.summary;
  const arms = Object.values(s.arms || {});
  const metric = s.metric === "accuracy" ? "test_accuracy_pct" : "test_loss";
  const figure = (arm, name, digits) => { const f = (arm.figures || {})[name]; return f ? `${number(f.mean, digits)}${f.sd === null || f.sd === undefined ? "" : " ± " + number(f.sd, digits)}` : "-"; };
  const pairs = (rows, title) => (rows && rows.length ? [el("h2", null, title), table(["", cell("n", "difference"), cell("n", "95 %"), cell("n", "p (Holm)"), cell("n", "wins, ties, losses")], rows.map((p) => [
    words(`${p.first} - ${p.second}`), cell("n", number(p.mean, 2)), cell("n", p.low === null ? "-" : `${number(p.low, 2)} to ${number(p.high, 2)}`), cell("n", number(p.holm_p, 4)), cell("n", `${whole(p.wins)}, ${whole(p.ties)}, ${whole(p.losses)}`)]))] : null);
  return [
    el("h2", { class: "text" }, `${s.task}: ${s.num_seeds} paired runs on the test split`),
    (s.verdicts || []).map((v) => el("p", { class: "text" }, `${v.letter} ${v.words}: `, el("b", null, v.outcome), v.reasons && v.reasons.length ? ` (${v.reasons.join("; ")})` : "")),
    table(["arm", cell("n", s.metric === "accuracy" ? "test accuracy %" : "test loss"), cell("n", "parameters"), cell("n", "seconds"), cell("n", "runs"), cell("n", "failed")], arms.map((arm) => [words(arm.arm), cell("n", figure(arm, metric, 2)), cell("n", figure(arm, "params", 0)), cell("n", figure(arm, "run_s", 1)), cell("n", whole(arm.num_runs)), cell("n", whole(arm.num_failed))])),
    el("div", { class: "charts pictures" }, data.pictures.map((name) => el("figure", null, el("img", { src: `/api/picture?${url}&name=${name}`, alt: name.replace(".png", "") + " of this evaluation", loading: "lazy" })))),
    pairs(s.subject_against, "The subject against the others"),
    pairs(s.against_baseline, "Against leaving the network alone"),
    s.controls && s.controls.length ? [el("h2", null, "Controls"), table(["control", "outcome", "found", "limit"], s.controls.map((c) => [words(c.name), cell(c.passed ? "info" : "error", c.passed ? "passed" : "FAILED"), words(c.found), words(c.limit)]))] : null,
    el("p", { class: "note text" }, data.folder),
  ];
}
