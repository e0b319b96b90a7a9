// Where a token's time goes: one bar per part, each beginning where the one before it ends.

import { find, h, keyed, say, show } from "./dom.js";
import { on } from "./feed.js";
import { nameOf, paint } from "./nodes.js";
import { duration, figure, length, percent } from "./words.js";
import { ticks } from "./scale.js";

const KINDS = {
  compute: (name) => `${name ?? "engine"} computes`,
  wire: (name) => `link to ${name ?? "the next"}`,
  wait: (name) => (name ? `wait for ${name}` : "the rest"),
  draft: (name) => (name ? `draft on ${name}` : "draft"),
};

const plain = (tick) => figure(tick).replace(/\.0$/, "");

export function start() {
  on(["status"], ({ status }) => status && draw(status));
}

function draw(status) {
  const token = status.engine?.token?.total_ms > 0 ? status.engine.token : null;
  show(find("waterfall"), token);
  show(find("waterfall-empty"), !token);
  say(find("token-total"), token ? `${duration(token.total_ms)} a token` : "");
  say(find("token-sentence"), token?.sentence ?? "");
  if (!token) return;
  const total =
    Math.max(
      token.total_ms,
      token.parts.reduce((sum, part) => sum + part.ms, 0),
    ) || 1;
  const { top, at } = ticks(total, 4);
  keyed(find("waterfall-parts"), placed(status, token.parts), {
    key: (part) => part.key,
    make: makePart,
    update: (element, part) => fillPart(element, part, token.total_ms || total, top),
  });
  keyed(find("waterfall-axis"), at, {
    key: (tick) => tick,
    make: () => h("span", { class: "tick" }),
    update: (element, tick) => {
      say(element, tick === at.at(-1) ? `${plain(tick)} ms` : plain(tick));
      element.style.left = length(tick / top);
      element.classList.toggle("last", tick === at.at(-1));
    },
  });
}

/** With the beginning of each, and a key by which it stays the same bar. */
function placed(status, parts) {
  const seen = new Map();
  let begin = 0;
  return parts.map((part) => {
    const name = part.node ? nameOf(status, part.node) : null;
    const label = (KINDS[part.kind] ?? (() => part.kind))(name);
    const nth = (seen.get(label) ?? 0) + 1;
    seen.set(label, nth);
    const placed = { ...part, label, begin, key: `${label} ${nth}` };
    begin += part.ms;
    return placed;
  });
}

function makePart(part) {
  const label = h("span", { class: "part-label", text: part.label });
  const bar = h("span", { class: `part-bar ${part.kind}` });
  const value = h("span", { class: "part-value" });
  const element = h(
    "li",
    { class: "part" },
    label,
    h("span", { class: "part-lane", "aria-hidden": "true" }, bar),
    value,
  );
  element.pieces = { bar, value };
  return element;
}

function fillPart(element, part, total, top) {
  const { bar, value } = element.pieces;
  paint(bar, part.node);
  bar.style.left = length(part.begin / top);
  bar.style.width = length(part.ms / top);
  say(value, `${duration(part.ms)} · ${percent(part.ms / total)}`);
}
