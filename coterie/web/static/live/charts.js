// Curves and the heat map, drawn to the size of their frame.

import { clock, drawn, element } from "/assets/shared/dom.js";

const MARGIN = { left: 58, right: 12, top: 10, bottom: 24 };
const DIGITS = new Intl.NumberFormat([], { maximumSignificantDigits: 3 });

function ticks(low, high, wanted) {
  const raw = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((one) => one * power >= raw) * power;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(at);
  return found;
}

function frame(width, height, label, xs, ys, xWord, format = (value) => DIGITS.format(value)) {
  const [left, right] = [MARGIN.left, width - MARGIN.right];
  const [top, bottom] = [MARGIN.top, height - MARGIN.bottom];
  const x = (value) => left + ((value - xs[0]) / (xs[1] - xs[0] || 1)) * (right - left);
  const y = (value) => bottom - ((value - ys[0]) / (ys[1] - ys[0] || 1)) * (bottom - top);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const at of ticks(ys[0], ys[1], height < 180 ? 3 : 5)) {
    svg.append(
      drawn("line", { class: "axis", x1: left, x2: right, y1: y(at), y2: y(at) }),
      drawn("text", { class: "soft", x: left - 5, y: y(at) + 4, "text-anchor": "end" }, format(at)),
    );
  }
  if (xWord) {
    const whole = ticks(xs[0], xs[1], width < 480 ? 4 : 8).filter((at) => Number.isInteger(at));
    for (const at of whole) svg.append(drawn("text", { class: "soft", x: x(at), y: bottom + 16, "text-anchor": "middle" }, String(at)));
    svg.append(drawn("text", { class: "soft", x: 0, y: bottom + 16 }, xWord));
  }
  return { svg, x, y, left, right, bottom };
}

const path = (points, x, y) => points.map(([at, value], i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");

export function swatch(kind, colour) {
  return drawn("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, drawn("line", { class: `${kind} c${colour}`, x1: 0, x2: 26, y1: 5, y2: 5 }));
}

export function quality(data, name, width, height) {
  const curves = data.curves.filter((curve) => curve.points[name]?.length);
  const levels = data.references.filter((one) => Number.isFinite(one.metrics[name]));
  const values = [...curves.flatMap((curve) => curve.points[name].map((point) => point[1])), ...levels.map((one) => one.metrics[name])];
  const low = Math.min(0, ...values), high = values.length ? Math.max(...values, low + 1e-9) * 1.05 : 1;
  const last = Math.max(1, data.of || 1, ...curves.flatMap((curve) => curve.points[name].map((point) => point[0])));
  const spoken = curves.map((curve) => `${curve.label}: ${DIGITS.format(curve.points[name].at(-1)[1])}`).join("; ");
  const against = levels.map((one) => `${one.label}: ${DIGITS.format(one.metrics[name])}`).join("; ");
  const { svg, x, y, left, right } = frame(
    width, height, `${name} by ${data.unit}. ${spoken || "nothing measured yet"}${against ? `. Baselines: ${against}` : ""}`,
    [0, last], [low, high], data.unit,
  );
  const legend = [];
  levels.forEach((one, index) => {
    const colour = (index + 1) % 6;
    svg.append(drawn("line", { class: `reference c${colour}`, x1: left, x2: right, y1: y(one.metrics[name]), y2: y(one.metrics[name]) }));
    legend.push(element("li", {}, swatch("reference", colour), `${one.label} ${DIGITS.format(one.metrics[name])}`));
  });
  curves.forEach((curve, index) => {
    const own = curve.points[name], colour = (curves.length - 1 - index) % 6;
    svg.append(drawn("path", { class: `line c${colour}`, d: path(own, x, y) }));
    const [at, value] = own.at(-1);
    svg.append(drawn("circle", { class: `line c${colour}`, cx: x(at), cy: y(value), r: 3 }));
    legend.unshift(element("li", {}, swatch("line", colour), `${curve.label} ${DIGITS.format(value)}`));
  });
  return { svg, legend };
}

export function traffic(points, volume, width, height) {
  const most = Math.max(1000, ...points.flatMap((point) => [point[1], point[2]]));
  const [first, last] = points.length ? [points[0][0], points.at(-1)[0]] : [0, 1];
  const now = points.at(-1) || [0, 0, 0];
  const { svg, x, y, left, right } = frame(
    width, height, `Bytes a second at the server: ${volume(now[1])} in, ${volume(now[2])} out; at most ${volume(most)}`,
    [first, last], [0, most * 1.05], "", (value) => volume(value).replace(/\.0+ /, " "),
  );
  [1, 2].forEach((column) => {
    svg.append(drawn("path", { class: `line c${column - 1}`, d: path(points.map((point) => [point[0], point[column]]), x, y) }));
  });
  if (points.length) {
    svg.append(
      drawn("text", { class: "soft", x: left, y: height - 5 }, clock(first)),
      drawn("text", { class: "soft", x: right, y: height - 5, "text-anchor": "end" }, clock(last)),
    );
  }
  return svg;
}

export function heat(rounds, width, height) {
  const steps = [...new Set(rounds.flatMap((one) => one.steps))].slice(0, 10);
  const label = 92, most = Math.max(1e-6, ...rounds.flatMap((one) => one.seconds));
  const wide = (width - label) / Math.max(rounds.length, 12), tall = (height - 20) / Math.max(steps.length, 1);
  const slow = rounds.reduce((best, one) => one.seconds.reduce((found, value, i) => (value > found[0] ? [value, one.steps[i], one.number] : found), best), [0, "", 0]);
  const svg = drawn("svg", {
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": rounds.length ? `Seconds of each step of the last ${rounds.length} rounds; the longest is ${slow[1]} in round ${slow[2]}, ${DIGITS.format(slow[0])} s` : "No round has ended yet",
  });
  steps.forEach((step, row) => svg.append(drawn("text", { class: "soft", x: 0, y: row * tall + tall / 2 + 4 }, step.length > 14 ? `${step.slice(0, 13)}…` : step)));
  rounds.forEach((one, column) => {
    one.steps.forEach((step, i) => {
      const row = steps.indexOf(step);
      if (row < 0) return;
      svg.append(
        drawn(
          "rect",
          {
            class: `cell${one.reason ? " abandoned" : ""}`, x: label + column * wide, y: row * tall, width: Math.max(wide - 1, 1), height: Math.max(tall - 1, 1),
            "fill-opacity": (0.08 + 0.92 * Math.sqrt(one.seconds[i] / most)).toFixed(2),
          },
          drawn("title", {}, `round ${one.number} (${one.purpose}), ${step}: ${DIGITS.format(one.seconds[i])} s`),
        ),
      );
    });
  });
  if (rounds.length) {
    svg.append(
      drawn("text", { class: "soft", x: label, y: height - 5 }, `round ${rounds[0].number}`),
      drawn("text", { class: "soft", x: width, y: height - 5, "text-anchor": "end" }, `darkest: ${DIGITS.format(most)} s`),
    );
  }
  return svg;
}
