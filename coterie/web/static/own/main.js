// A person's own page: shows what the device's stream brings, and asks the device for what the person wants changed.

import { element, table, text, volume } from "/assets/shared/dom.js";
import { enter, leave, post } from "/assets/shared/session.js";
import { Stream } from "/assets/shared/stream.js";

const at = (id) => document.getElementById(id);
const put = (id, ...children) => at(id).replaceChildren(...children);
let stream = null, token = "";

function when(first, last) {
  const words = (ms) => new Date(ms).toLocaleString([], { dateStyle: "short", timeStyle: "medium" });
  return first === last ? words(first) : `${words(first)} to ${words(last)}`;
}

const STANDING = {
  waiting: "Waiting for the run to take this device in",
  "takes part": "This device takes part in the run",
  "stays out": "This device stays out of the run: it is outside what you have agreed to",
  ended: "The run has ended",
  apart: "This device takes no part any more, until the agent is started again",
};
const LACKING = { store: "its own store takes no writes", directory: "the key directory does not answer", run: "the run's server does not answer, or has not taken this device in", key: "it does not hold the run's key", certificate: "its certificate is not valid" };

const draw = {
  about(about) {
    text(at("title"), about.user ? `Device of ${about.user}` : "Your device");
    document.title = at("title").textContent;
    const facts = about.facts;
    text(at("headline"), facts ? `Run ${facts.run}, ${facts.system}` : `Run ${about.run}`);
    const lacking = about.conditions.filter(([, held]) => !held).map(([name]) => LACKING[name] || name);
    const away = about.standing === "takes part" && lacking.length;
    text(at("now"), STANDING[about.standing] || about.standing);
    at("now").className = about.standing === "apart" || about.standing === "stays out" || away ? "big warn" : "big";
    const more = [];
    if (about.reason) more.push(about.reason);
    if (facts && facts.summed) more.push(`What it sends is summed ${facts.summed}.`);
    if (lacking.length) more.push(`Now ${lacking.join("; ")}.`);
    text(at("now-more"), more.join(" ") || "\u00a0");
    put("consent", table("Your consent beside this run", ["About", "You accept", "This run has"], about.consent));
    at("unknown").hidden = facts !== null;
    text(at("import-words"), about.import);
    at("preview").disabled = at("recommend").disabled = !facts;
  },
  choices(choices) {
    const { may, paused, left, rounds_per_day: limit } = choices;
    if (choices.error) {
      text(at("part-words"), refusal(choices));
      at("part-choices").hidden = true;
      return;
    }
    text(at("part-words"), choices.words);
    at("part-choices").hidden = !may.length;
    at("part-pause").hidden = !may.includes("pause");
    at("part-limit").hidden = !may.includes("limit");
    text(at("pause"), paused ? "Go on" : "Pause");
    at("pause").dataset.paused = String(paused);
    if (document.activeElement !== at("rounds-per-day")) at("rounds-per-day").value = limit;
    put("undone", ...choices.undone.map((one) => element("li", {}, one)));
    put("kept", ...choices.kept.map((one) => element("li", {}, one)));
    text(at("local"), choices.local);
    if (left) at("leaving").hidden = true;
  },
  receipt({ sent, declined }) {
    if (sent.length)
      put("receipt", table(`${sent.length} kinds of data`, ["To", "What", "How protected", "Values", "Bytes", "When"], sent.map((one) => [one.recipient, one.kind, one.protection, one.count.toLocaleString(), volume(one.bytes), when(one.first_ms, one.last_ms)])));
    else put("receipt", element("p", {}, "Nothing yet."));
    if (declined.length)
      put("declined", table(`${declined.length} refusals`, ["Asked by", "Refused, because", "Times", "When"], declined.map((one) => [one.recipient, one.reason, one.count.toLocaleString(), when(one.first_ms, one.last_ms)])));
    else put("declined", element("p", { class: "soft" }, "Nothing."));
  },
  preferences({ own, others }) {
    if (document.activeElement && at("preferences").contains(document.activeElement)) return (draw.waiting = { own, others });
    const rows = own.map((one) => {
      if (!one.meaning) {
        const drop = element("button", {}, `Forget ${one.name}`);
        drop.addEventListener("click", () => prefer(one.name, null));
        return element("div", { class: "preference" }, element("p", {}, `${one.name} = ${one.value}: this run does not use it.`), drop);
      }
      const field = element("input", { id: `preference-${one.name}`, type: "number", min: one.lowest, max: one.highest, step: "any", value: one.value ?? "" });
      const set = element("button", { class: "primary" }, `Set ${one.name}`);
      const drop = element("button", { disabled: one.value === null }, "Leave it to the run");
      set.addEventListener("click", () => (field.value === "" || !field.checkValidity() ? field.reportValidity() || refuse(one) : prefer(one.name, field.valueAsNumber)));
      drop.addEventListener("click", () => prefer(one.name, null));
      const now = one.value === null ? "the run's plan decides" : `yours is ${one.value}`;
      return element("div", { class: "preference" }, element("p", {}, element("label", { for: field.id }, `${one.name}, ${one.lowest} to ${one.highest}; ${now}. ${one.meaning}`)), field, set, drop);
    });
    if (!own.length) rows.push(element("p", {}, others === null ? "The run's server has not told yet which ones this run has." : "This run has no preferences."));
    for (const one of others || []) rows.push(element("p", { class: "soft" }, `${one.name}: this run does not use it; ${one.systems.join(", ")} would. ${one.meaning}`));
    put("preferences", ...rows);
  },
};

function refuse(one) {
  text(at("preferences-said"), `Expected a number from ${one.lowest} to ${one.highest}.`);
}

const refusal = (said) => [said.error || "Refused.", said.hint].filter(Boolean).join(" \u2013 ");

async function prefer(name, value) {
  document.activeElement?.blur();
  text(at("preferences-said"), "Asked\u2026");
  const { ok, said } = await post("/own/preferences", { name, value });
  text(at("preferences-said"), ok ? (value === null ? `The run's plan decides ${name} again.` : `${name} is ${value} from the next round on.`) : refusal(said));
  if (draw.waiting) {
    draw.preferences(draw.waiting);
    draw.waiting = null;
  }
}

async function choose(asked, words) {
  text(at("part-said"), "Asked\u2026");
  const { ok, said } = await post("/own/choose", asked);
  text(at("part-said"), ok ? words : refusal(said));
}

at("pause").addEventListener("click", () => {
  const paused = at("pause").dataset.paused !== "true";
  choose({ paused }, paused ? "Paused: a round that trains already keeps this device, the next one does not." : "This device takes part from the next round on.");
});
at("limit").addEventListener("click", () => {
  const field = at("rounds-per-day");
  if (field.value === "" || !field.checkValidity()) return field.reportValidity() || text(at("part-said"), "Expected a whole number, 0 or more.");
  field.blur();
  return choose({ rounds_per_day: field.valueAsNumber }, field.valueAsNumber ? `At most ${field.valueAsNumber} rounds a day (UTC), counted from now on.` : "No limit of your own.");
});
let question = "";
at("leave-run").addEventListener("click", async () => {
  const { ok, said } = await post("/own/leave", {});
  if (!ok) return text(at("part-said"), refusal(said));
  question = said.token;
  text(at("part-said"), "");
  at("leaving").hidden = false;
  at("leave-no").focus();
  return undefined;
});
at("leave-no").addEventListener("click", () => {
  at("leaving").hidden = true;
  text(at("part-said"), "Nothing was changed.");
});
at("leave-yes").addEventListener("click", async () => {
  text(at("part-said"), "Asked\u2026");
  const { ok, said } = await post("/own/leave", { token: question });
  at("leaving").hidden = true;
  const deleted = said.deleted === 1 ? "One upload was" : `${said.deleted} uploads were`;
  text(at("part-said"), ok ? `You have left. ${said.deleted ? `${deleted} deleted at the third party.` : "Nothing was published at the third party."}` : refusal(said));
});

function changed(parts) {
  for (const [name, value] of Object.entries(parts)) draw[name]?.(value);
}

const STATES = { open: ["this device answers", "pill good"], lost: ["no answer, trying again", "pill warn"], ended: ["the agent has ended", "pill"], outside: ["closed", "pill bad"] };

function told(state) {
  const [words, kind] = STATES[state];
  text(at("connection"), words);
  at("connection").className = kind;
  document.body.dataset.state = state;
  if (state === "outside") closed("The session has ended.");
}

function closed(reason) {
  at("page").hidden = true;
  at("entry").hidden = false;
  text(at("entry-reason"), reason);
  text(at("connection"), "closed");
  at("connection").className = "pill bad";
  document.body.dataset.state = "outside";
}

at("recommend").addEventListener("click", async () => {
  text(at("recommend-said"), "Asked\u2026");
  const { ok, said } = await post("/own/recommend", { k: 10 });
  if (!ok) return text(at("recommend-said"), refusal(said));
  const reasons = said.measure
    ? `Reasons name your own item that is most like the recommended one, by this model (${said.measure}). They are no proof of why: the score comes from all that the model knows.`
    : "The model of this run does not compare items: there are no reasons.";
  text(at("recommend-said"), said.items.length ? `By version ${said.version} of the model, computed on this device. ${reasons}` : "Nothing to recommend.");
  put("items", ...said.items.map((one) => element("li", {}, element("strong", {}, one.title), one.because ? ` because you have ${one.because} (${one.likeness.toFixed(2)})` : said.measure ? " (none of your items is like it)" : "")));
});

function forget() {
  token = "";
  at("keep").hidden = at("drop").hidden = true;
  put("preview-rows");
}

at("preview").addEventListener("click", async () => {
  forget();
  const file = at("file").files[0];
  if (!file) return text(at("import-said"), "Choose a file first.");
  if (file.size > 4 * 2 ** 20) return text(at("import-said"), "The file is too long; expected at most 4 MiB.");
  text(at("import-said"), "Reading\u2026");
  const { ok, said } = await post("/own/preview", { name: file.name, text: await file.text() });
  if (!ok) return text(at("import-said"), refusal(said));
  const words = [`${said.fresh} new items`, `${said.held} that you have already`];
  if (said.unrated) words.push(`${said.unrated} without a rating, left out: this run learns from ratings`);
  if (said.repeated) words.push(`${said.repeated} earlier rows of items named again`);
  if (said.unknown) words.push(`${said.unknown} that this run does not know: ${said.unknown_items.join(", ")}${said.unknown > said.unknown_items.length ? ", \u2026" : ""}`);
  if (!said.rated && said.fresh) words.push("each counts as something you like: this run learns from no ratings");
  text(at("import-said"), `${words.join("; ")}. Nothing is kept yet.`);
  if (!said.fresh) return undefined;
  const shown = said.rows.length < said.fresh ? `The first ${said.rows.length} of ${said.fresh} new items` : `${said.fresh} new items`;
  put("preview-rows", table(shown, ["Item", "Title", "Rating"], said.rows.map(([item, title, rating]) => [item, title, rating === null ? "\u2013" : String(rating)])));
  token = said.token;
  at("keep").hidden = at("drop").hidden = false;
  return undefined;
});
at("keep").addEventListener("click", async () => {
  const { ok, said } = await post("/own/keep", { token });
  forget();
  text(at("import-said"), ok ? `${said.kept} items are in your history now.` : refusal(said));
});
at("drop").addEventListener("click", () => {
  forget();
  text(at("import-said"), "Nothing was kept.");
});
at("share").addEventListener("click", async () => {
  const { ok, said } = await post("/links");
  put("link", ...(ok ? ["Opens the page once, within an hour: ", element("code", {}, said.link)] : [said.error || "Refused."]));
});
at("leave").addEventListener("click", async () => {
  await leave();
  stream?.stop("outside");
});

try {
  const { inside, refused } = await enter();
  if (inside) stream = new Stream(changed, told);
  else closed(refused || "There is no session in this browser.");
} catch {
  closed("This device does not answer.");
}
