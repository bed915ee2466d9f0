// The federation as a picture: who is here, who talks to whom, who is late or gone.

import { drawn, volume } from "/assets/shared/dom.js";

const ROLES = { "data-owner": "data owners", client: "client hosts", "decrypting-client": "key holders" };
const MOST = 8;

function short(name, width) {
  const most = Math.max(6, Math.floor(width / 7));
  return name.length > most ? `${name.slice(0, most - 1)}…` : name;
}

// Whoever is late or gone is drawn, however many parties there are.
function troubledFirst(a, b) {
  return (a.state === "here") - (b.state === "here") || a.name.localeCompare(b.name, undefined, { numeric: true });
}

// Returns how the picture reads aloud.
export function described(parties, now) {
  const parts = Object.entries(ROLES).map(([role, words]) => {
    const some = parties.filter((one) => one.role === role);
    const away = some.filter((one) => one.state !== "here").map((one) => `${one.name} ${one.change}`);
    return some.length ? `${some.length} ${words}${away.length ? ` (${away.join(", ")})` : ""}` : "";
  });
  const known = parts.filter(Boolean).join("; ") || "no party yet";
  return `Orchestration server with ${known}. ${volume(now.bytes_in || 0)} in, ${volume(now.bytes_out || 0)} out.`;
}

function place(some, y, width) {
  const shown = some.slice(0, some.length > MOST ? MOST - 1 : MOST);
  const more = some.length - shown.length;
  const count = shown.length + (more ? 1 : 0);
  const step = width / Math.max(count, 1);
  const rows = width < 480 && count > 4 ? 2 : 1;
  const each = rows === 2 ? Math.ceil(count / 2) : count;
  const at = (index) =>
    rows === 1
      ? [step * (index + 0.5), y]
      : [(width / each) * ((index % each) + 0.5), y + (index < each ? -42 : 14)];
  return { shown, more, at, room: rows === 2 ? width / each : step };
}

export function picture(parties, now, round, width, height) {
  const cos = [width / 2, height * 0.44];
  const busy = now.rate_in > 0 && now.code !== "RUN_PHASE_DONE" && now.code !== "RUN_PHASE_FAILED";
  const wires = [], nodes = [];
  const box = (x, y, label, second) => {
    const half = Math.min(100, width / 3.4);
    nodes.push(
      drawn("rect", { class: "party", x: x - half, y: y - 21, width: 2 * half, height: 42, rx: 8 }),
      drawn("text", { x, y: y - 3, "text-anchor": "middle" }, label),
      drawn("text", { x, y: y + 13, "text-anchor": "middle", class: "soft" }, second),
    );
  };
  const rows = [
    ["data-owner", height * 0.15],
    ["decrypting-client", height * 0.66],
    ["client", height * 0.87],
  ];
  const places = {};
  for (const [role, y] of rows) {
    const some = parties.filter((one) => one.role === role).sort(troubledFirst);
    if (!some.length) continue;
    const { shown, more, at, room } = place(some, y, width);
    places[role] = shown.map((one, index) => at(index));
    shown.forEach((one, index) => {
      const [x, top] = at(index);
      const state = one.state === "here" ? (busy ? " busy" : "") : ` ${one.state}`;
      wires.push(drawn("path", { class: `wire${state}`, d: `M${x} ${top} L${cos[0]} ${cos[1]}` }));
      const mark = { here: "", late: "late", gone: "gone" }[one.state] || "";
      nodes.push(
        drawn("circle", { class: `party ${one.state}`, cx: x, cy: top, r: 9 }, drawn("title", {}, `${one.party}: ${one.change}`)),
        drawn("text", { x, y: role === "data-owner" ? top - 14 : top + 23, "text-anchor": "middle" }, short(one.name, room)),
      );
      if (mark) nodes.push(drawn("text", { x: x + 13, y: top + 4, class: `mark-${one.state}` }, mark));
    });
    if (more) {
      const [x, top] = at(shown.length);
      nodes.push(drawn("text", { x, y: top + 4, "text-anchor": "middle", class: "soft" }, `+ ${more} more`));
    }
    nodes.push(drawn("text", { x: 4, y: y - (some.length > 4 && width < 480 ? 72 : 36), class: "soft" }, ROLES[role]));
  }
  // Interactions go straight from hosts to owners where owners train side by side.
  if (now.direct && places.client && places["data-owner"]) {
    for (const from of places.client)
      for (const to of places["data-owner"].slice(0, 4))
        wires.unshift(drawn("path", { class: "wire side", d: `M${from[0]} ${from[1]} Q${from[0]} ${cos[1]} ${to[0]} ${to[1]}` }));
  }
  // Certificates and the key directory; and whoever reads this page.
  for (const [x, words] of [[width * 0.93, "third party"], [width * 0.07, "you"]]) {
    wires.push(drawn("path", { class: "wire side", d: `M${x} ${cos[1]} L${cos[0]} ${cos[1]}` }));
    nodes.push(
      drawn("circle", { class: "party", cx: x, cy: cos[1], r: 7 }),
      drawn("text", { x: x > cos[0] ? width : 0, y: cos[1] + 22, "text-anchor": x > cos[0] ? "end" : "start", class: "soft" }, words),
    );
  }
  box(cos[0], cos[1], "orchestration server", now.version ? `version ${now.version.toLocaleString()}` : "waits");
  if (round) {
    nodes.push(
      drawn("text", { x: cos[0], y: cos[1] + 37, "text-anchor": "middle", class: "soft" }, `${round.heard} of ${round.members - round.dropped} heard`),
    );
  }
  return drawn(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": described(parties, now) },
    ...wires,
    ...nodes,
  );
}
