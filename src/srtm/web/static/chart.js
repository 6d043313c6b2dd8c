// Percentiles over time against the SLO: one SVG, three lines and a limit.

import { draw, make, ms, text } from "./dom.js";

const HEIGHT = 144, LEFT = 4, RIGHT = 78, TOP = 8, BOTTOM = 18;
const SHOWN_MS = 600_000, LEAST_MS = 60_000, GAP_MS = 12_000;
const LINES = ["p50", "p95", "p99"];

/** A chart of one part of the latency. */
export function chart(title) {
  const svg = draw("svg", { role: "img" });
  let width = 400;
  new ResizeObserver(([seen]) => (width = seen.contentRect.width || width)).observe(svg);
  const grid = draw("path", { class: "grid", fill: "none" });
  const limit = draw("path", { class: "limit" });
  const lines = Object.fromEntries(LINES.map((name) => [name, draw("path", { class: name })]));
  const labels = [0, 1, 2].map(() => draw("text"));
  const from = draw("text", { x: LEFT, y: HEIGHT - 4 });
  const now = draw("text", { y: HEIGHT - 4, "text-anchor": "end" });
  now.textContent = "now";
  svg.append(grid, ...LINES.map((name) => lines[name]), limit, ...labels, from, now);
  const values = make("span");
  const node = make(
    "figure", {}, make("figcaption", {}, make("strong", {}, title), values), svg,
  );

  function update(points, key, slo, at) {
    const right = width - RIGHT;
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    now.setAttribute("x", right);
    const begin = Math.min(at - LEAST_MS, Math.max(points[0]?.at_ms ?? at, at - SHOWN_MS));
    const shown = points.filter((point) => point[key] && point.at_ms >= begin);
    const worst = Math.max(0, ...shown.map((point) => point[key].p99));
    const top = Math.max(worst, key === "processing_ms" ? worst || slo : slo) * 1.15;
    const x = (when) => LEFT + ((when - begin) / (at - begin)) * (right - LEFT);
    const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
    for (const name of LINES) {
      let before = -Infinity, path = "";
      for (const point of shown) {
        path += `${point.at_ms - before > GAP_MS ? "M" : "L"}${x(point.at_ms).toFixed(1)} ${y(point[key][name]).toFixed(1)}`;
        before = point.at_ms;
      }
      lines[name].setAttribute("d", path);
    }
    const visible = slo <= top;
    limit.setAttribute("d", visible ? `M${LEFT} ${y(slo)}H${right}` : "");
    grid.setAttribute("d", `M${LEFT} ${y(0)}H${right}M${LEFT} ${TOP}H${right}`);
    const limits = visible && slo < top * 0.9 ? [[slo, `SLO ${ms(slo)}`]] : [];
    const marks = [[top, ms(top)], ...limits, ...(limits.length && slo < top * 0.12 ? [] : [[0, "0"]])];
    labels.forEach((label, i) => {
      if (!marks[i]) return void (label.textContent = "");
      label.setAttribute("x", right + 6);
      label.setAttribute("y", y(marks[i][0]) + 4);
      label.textContent = marks[i][1];
    });
    const span = Math.round((at - begin) / 1000);
    from.textContent = span >= 120 ? `${Math.round(span / 60)} min ago` : `${span} s ago`;
    const last = points.at(-1)?.[key];
    const said = last ? LINES.map((name) => `${name} ${ms(last[name])}`).join(" · ") : "no messages";
    text(values, said);
    svg.setAttribute("aria-label", `${title} over the last ${from.textContent.replace(" ago", "")}: ${said}, SLO ${ms(slo)}`);
  }
  return { node, update };
}

/** The legend of the lines. */
export function legend() {
  return make(
    "p", { class: "soft" },
    make("span", { class: "key k50" }, "p50 "), make("span", { class: "key k95" }, "p95 "),
    make("span", { class: "key k99" }, "p99 "), make("span", { class: "key kslo" }, "SLO"),
    ", each over the preceding ten seconds",
  );
}
