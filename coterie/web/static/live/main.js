// The live page: draws the parts that the stream brings, at most once a frame, and only while the page is looked at.

import { clock, element, lasting, table, text, volume } from "/assets/shared/dom.js";
import { enter, enterWithPassword, leave, post } from "/assets/shared/session.js";
import { Stream } from "/assets/shared/stream.js";
import { picture } from "/assets/live/picture.js";
import { heat, quality, swatch, traffic } from "/assets/live/charts.js";

const at = (id) => document.getElementById(id);
const parts = { now: {}, parties: [], rounds: [], traffic: [], lines: [], alerts: [], processes: [], runs: [], actions: { start: "", stop: false, measure: false }, network: null, preview: null, quality: { names: [], curves: [], references: [] }, round: null, run: {}, end: null };
const stale = new Set();
let asked = 0, stream = null;

function size(node) {
  return [Math.max(260, Math.round(node.clientWidth)), Math.max(120, Math.round(node.clientHeight))];
}

function put(id, ...children) {
  at(id).replaceChildren(...children);
}

const draw = {
  run() {
    text(at("title"), parts.run.id ? `Run ${parts.run.id}` : "Coterie, live");
    text(at("headline"), parts.run.headline || "\u00a0");
    document.title = parts.run.id ? `${parts.run.id}, live` : "Coterie, live";
  },
  now() {
    const { now } = parts;
    const doing = parts.end ? (parts.end.ok ? "the run has ended" : "the run has failed") : now.waiting ? `waiting: ${now.waiting}` : now.stage || now.phase || "nothing has begun";
    const left = now.left && !parts.end && !now.stage ? `, ${now.left}` : "";
    text(at("now"), doing.charAt(0).toUpperCase() + doing.slice(1) + left);
    at("now").className = now.waiting ? "big warn" : now.code === "RUN_PHASE_FAILED" ? "big bad" : "big";
    at("progress").max = now.of || 1;
    at("progress").value = Math.min(now.done || 0, now.of || 1);
    const totals = now.totals || {};
    const figures = [
      [now.unit === "epoch" ? "Epoch" : "Pass", `${now.done || 0} of ${now.of || 0}`],
      ["Model version", (now.version || 0).toLocaleString()],
      ["Users", (now.users || 0).toLocaleString()],
      ["Items", (now.items || 0).toLocaleString()],
      ["Client hosts alive", String(now.hosts || 0)],
      ["Data owners alive", String(now.owners || 0)],
      ["Secure sum", now.secure_sum || "–"],
      ["Rounds", `${totals.rounds || 0}, ${totals.abandoned || 0} abandoned`],
      ["Members dropped out", String(totals.dropped || 0)],
      ["Messages refused", String(totals.refused || 0)],
      ...(totals.epsilon ? [["Epsilon so far", String(totals.epsilon)]] : []),
    ];
    put("figures", ...figures.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
    text(at("traffic-now"), `${volume(now.bytes_in || 0)} in, ${volume(now.bytes_out || 0)} out; now ${volume(now.rate_in || 0)}/s in, ${volume(now.rate_out || 0)}/s out`);
    stale.add("picture");
  },
  parties() {
    const words = { "data-owner": "data owner", client: "client host", "decrypting-client": "key holder" };
    const rows = parts.parties.map((one) => [one.name, words[one.role] || one.role, one.state, one.change, clock(one.at)]);
    const hidden = parts.now.hidden ? `, and ${parts.now.hidden} more` : "";
    put("parties", table(`${rows.length} parties${hidden}`, ["Party", "Role", "State", "Last change", "At"], rows));
    stale.add("picture");
  },
  picture() {
    put("picture", picture(parts.parties, parts.now, parts.round, ...size(at("picture"))));
  },
  round() {
    const { round } = parts;
    const here = round ? round.steps.indexOf(round.step) : -1;
    text(at("round"), round ? `Round ${round.number}: ${round.purpose}. ${round.heard} of ${round.members - round.dropped} heard${round.dropped ? `, ${round.dropped} dropped out` : ""}.` : "No round is going on.");
    put("steps", ...(round ? round.steps : []).map((step, index) => element("li", index === here ? { "aria-current": "step" } : { class: index < here ? "done" : "" }, step)));
    stale.add("picture");
  },
  rounds() {
    put("heat", heat(parts.rounds, ...size(at("heat"))));
    const rows = [...parts.rounds].reverse().map((one) => [
      String(one.number), one.purpose, `${one.summed} of ${one.users}`, `${one.dropped} of ${one.members}`, String(one.refused), volume(one.bytes),
      one.seconds.reduce((sum, value) => sum + value, 0).toFixed(2), one.reason || "–",
    ]);
    put("rounds", table("The last rounds, newest first", ["Round", "Purpose", "Users in the sum", "Dropped out", "Refused", "Bytes", "Seconds", "Why abandoned"], rows));
  },
  quality() {
    const { names } = parts.quality, list = at("metric");
    const chosen = names.includes(list.value) ? list.value : names[0] || "";
    if (names.join("\n") !== [...list.options].map((one) => one.value).join("\n")) list.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    list.value = chosen;
    const { svg, legend } = quality(parts.quality, chosen, ...size(at("quality")));
    put("quality", svg);
    put("legend", ...legend);
    const rows = parts.quality.curves.flatMap((curve) => (curve.points[chosen] || []).slice(-40).map(([pass, value]) => [String(pass), curve.label, value.toFixed(4)]));
    const levels = parts.quality.references.filter((one) => chosen in one.metrics).map((one) => ["–", one.label, Number(one.metrics[chosen]).toFixed(4)]);
    put("points", table(chosen || "Nothing was measured yet", [parts.quality.unit || "pass", "Of", "Value"], [...rows, ...levels]));
  },
  traffic() {
    put("traffic", traffic(parts.traffic, volume, ...size(at("traffic"))));
    put("traffic-legend", ...["in", "out"].map((name, colour) => element("li", {}, swatch("line", colour), `bytes ${name}, a second`)));
  },
  lines() {
    put("lines", ...[...parts.lines].reverse().map(line));
  },
  alerts() {
    put("alerts", ...(parts.alerts.length ? [...parts.alerts].reverse().map(line) : [element("li", {}, element("span", {}, "–"), element("span", {}, "None so far."))]));
    text(at("newest"), parts.alerts.at(-1)?.text || "");
  },
  processes() {
    if (!parts.processes.length) return;
    const rows = parts.processes.map((one) => [one.party, one.alive ? (one.cpu === null ? "–" : `${Math.round(100 * one.cpu)}%`) : "ended", one.memory === null ? "–" : volume(one.memory)]);
    put("processes", table("CPU is that of the last seconds; 100% is one core", ["Process", "CPU", "Memory"], rows));
  },
  runs() {
    if (!parts.runs.length) return;
    const names = [...new Set(parts.runs.flatMap((one) => Object.keys(one.metrics || {})))].slice(0, 4);
    const rows = parts.runs.map((one) => [one.run, one.system, one.secure_sum, one.state || "–", one.dataset || "–", (one.started || "–").replace("T", " ").slice(0, 16), one.seconds ? lasting(one.seconds) : "–", ...names.map((name) => (name in (one.metrics || {}) ? Number(one.metrics[name]).toFixed(4) : "–"))]);
    put("runs", table("Newest first", ["Run", "System", "Secure sum", "State", "Data", "Started", "Took", ...names], rows));
  },
  actions() {
    const { start, stop } = parts.actions;
    at("start").hidden = !start;
    text(at("start"), start === "resume" ? "Resume the run" : "Start the run");
    at("stop").hidden = !stop;
    at("measure").disabled = !parts.actions.measure;
  },
  network() {
    if (!parts.network) return;
    const { pairs, without, at: when } = parts.network;
    const targets = [...new Set(pairs.map((one) => one.target))].sort(), most = Math.max(...pairs.map((one) => one.ms), 1e-6);
    const found = new Map(pairs.map((one) => [`${one.source}\n${one.target}`, one.ms]));
    const rows = [...new Set(pairs.map((one) => one.source))].sort().map((source) => [source, ...targets.map((target) => found.get(`${source}\n${target}`))]);
    const made = table(`Median round trips at ${clock(when)}, milliseconds; the longer the darker`, ["From, to", ...targets], rows.map(([source, ...rest]) => [source, ...rest.map((ms) => (ms === undefined ? "" : ms.toFixed(2)))]));
    made.querySelectorAll("tbody tr").forEach((row, i) => row.querySelectorAll("td").forEach((cell, j) => {
      const share = (rows[i][j + 1] ?? -1) / most;
      cell.className = share > 0.75 ? "hottest" : share > 0.4 ? "hot" : share > 0.15 ? "warm" : "";
    }));
    const silent = parts.parties.map((one) => one.party).filter((name) => !rows.some(([source]) => source === name) && !without.some((one) => one.party === name));
    put("network", made, ...(silent.length ? [element("p", { class: "soft" }, `Not reached: ${silent.slice(0, 12).join(", ")}${silent.length > 12 ? ` and ${silent.length - 12} more` : ""}; a service can be asked a few seconds after its start.`)] : []), ...without.map((one) => element("p", { class: "soft" }, `${one.party} measured nothing: ${one.why}`)));
  },
  preview() {
    if (!parts.preview) return;
    const words = { cos: "orchestration server", "data-owner": "data owner", client: "client host", "decrypting-client": "key holder", thirdparty: "third party", operator: "operator" };
    const rows = parts.preview.rows.map((one) => [one.kind, ...parts.preview.roles.map((role) => one.roles[role] || "–")]);
    put("preview", table("A dash: none of it", ["Kind of data", ...parts.preview.roles.map((role) => words[role] || role)], rows));
  },
  end() {
    const { end } = parts, box = at("end");
    if (!end) {
      stale.add("now");
      box.className = "";
      put("end", element("p", { class: "soft" }, "The result will stand here when the run has ended."));
      return;
    }
    box.className = end.ok ? "done" : "failed";
    stale.add("now");
    put("end", ...end.text.map((one) => element("p", {}, one)), ...(end.report ? [element("p", { class: "soft" }, `Report: ${end.report}`)] : []));
  },
};

function line(one) {
  const marks = { good: "✓ ", warn: "! ", bad: "✕ " };
  return element("li", {}, element("time", { datetime: new Date(one.at * 1000).toISOString() }, clock(one.at)), element("span", { class: one.kind }, `${marks[one.kind] || ""}${one.text}`));
}

function schedule() {
  if (!asked) asked = requestAnimationFrame(render);
}

function render() {
  asked = 0;
  for (const name of ["run", "now", "parties", "round", "rounds", "quality", "traffic", "lines", "alerts", "processes", "runs", "actions", "network", "preview", "end", "now", "picture"]) {
    if (stale.delete(name)) draw[name]();
  }
}

function changed(some) {
  for (const [name, value] of Object.entries(some)) {
    if (!(name in parts)) continue;
    parts[name] = value;
    stale.add(name);
  }
  schedule();
}

const STATES = {
  open: ["live", "pill good"],
  lost: ["connection lost, trying again", "pill warn"],
  ended: ["ended: last state", "pill"],
  outside: ["closed", "pill bad"],
};

function told(state) {
  const [words, kind] = STATES[state];
  text(at("connection"), words);
  at("connection").className = kind;
  document.body.dataset.state = state;
  if (state === "outside") closed({ reason: "The session has ended.", passwords: at("password-form").dataset.used === "yes" });
  at("share").disabled = at("leave").disabled = state !== "open";
  if (state !== "open") for (const id of ["start", "stop", "measure"]) at(id).disabled = true;
  else if (at("stop").disabled) {
    at("start").disabled = at("stop").disabled = false;
    stale.add("actions");
    schedule();
  }
}

function closed({ reason, passwords }) {
  at("page").hidden = true;
  at("entry").hidden = false;
  text(at("entry-reason"), reason);
  at("entry-how").hidden = passwords;
  at("password-form").hidden = !passwords;
  at("password-form").dataset.used = passwords ? "yes" : "no";
  told.closed = true;
  text(at("connection"), "closed");
  at("connection").className = "pill bad";
  document.body.dataset.state = "outside";
}

function opened() {
  at("entry").hidden = true;
  at("page").hidden = false;
  for (const name of Object.keys(draw)) stale.add(name);
  schedule();
  stream = new Stream(changed, told);
}

at("metric").addEventListener("change", () => {
  stale.add("quality");
  schedule();
});
at("password-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const error = await enterWithPassword(at("name").value, at("password").value);
  at("password").value = "";
  text(at("entry-error"), error);
  if (!error) opened();
});
at("share").addEventListener("click", async () => {
  const { ok, said } = await post("/links");
  put("link", ...(ok ? ["Opens the page once, within an hour: ", element("code", {}, said.link)] : [said.error || "Refused."]));
});
let carried = "";
function ask(what) {
  carried = what;
  text(at("asked-title"), what === "stop" ? "Stop the run?" : `${at("start").textContent}?`);
  text(at("asked-what"), what === "stop" ? "It ends now for all parties, and the model stays as it is." : "All parties are asked to take part; what they may see stands under \u201cWho may see what\u201d.");
  text(at("asked-yes"), what === "stop" ? "Stop it" : at("start").textContent);
  at("asked-why").hidden = what !== "stop";
  at("asked").showModal();
}
at("stop").addEventListener("click", () => ask("stop"));
at("start").addEventListener("click", () => ask("start"));
at("measure").addEventListener("click", async () => {
  at("measure").disabled = true;
  text(at("measure-said"), "Measuring\u2026");
  const { ok, said } = await post("/run/measure");
  text(at("measure-said"), ok ? "" : said.error || "Refused.");
  stale.add("actions");
  schedule();
});
at("asked-no").addEventListener("click", () => at("asked").close());
at("asked-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  at("asked").close();
  text(at("action-said"), "Asked\u2026");
  const { ok, said } = await post(`/run/${carried}`, carried === "stop" ? { reason: at("reason").value } : {});
  text(at("action-said"), ok ? "" : said.error || "Refused.");
});
at("leave").addEventListener("click", async () => {
  await leave();
  stream?.stop("outside");
});
let resized = 0;
new ResizeObserver(() => {
  if (innerWidth === resized) return;
  resized = innerWidth;
  for (const name of ["picture", "rounds", "quality", "traffic"]) stale.add(name);
  schedule();
}).observe(document.documentElement);

try {
  const { inside, passwords, refused } = await enter();
  if (inside) opened();
  else closed({ reason: refused || "There is no session in this browser.", passwords });
} catch {
  closed({ reason: "The server does not answer.", passwords: false });
}
