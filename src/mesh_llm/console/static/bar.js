// The cluster bar: who lends how much, and which layers of the model lie where.

import { announce, find, h, keyed, say, show } from "./dom.js";
import { on } from "./feed.js";
import { describe, layersAt, nameOf, paint } from "./nodes.js";
import { bytes, layers, length, percent, several } from "./words.js";

/** A node with little memory still has room for its name. */
const LEAST_SHARE = 0.06;

export function start() {
  on(["status"], ({ status }) => {
    if (!status) return;
    const nodes = describe(status);
    drawMemory(nodes);
    drawLayers(status);
    drawTable(nodes);
    drawExcluded(nodes);
    say(find("mesh-summary"), summary(status, nodes));
    tell(nodes);
  });
}

function summary(status, nodes) {
  const lenders = nodes.filter((node) => node.memory_bytes);
  const clients = nodes.length - lenders.length;
  // Nodes on one machine share its memory: what the plan says there is counts it once.
  const total = status.plan?.have_bytes || lenders.reduce((sum, node) => sum + node.memory_bytes, 0);
  const who = several(lenders.length, "node") + (clients ? ` and ${several(clients, "client")}` : "");
  const plan = status.plan;
  if (!plan) return `${who}, ${bytes(total)} of memory. No plan yet.`;
  if (plan.mode === "waiting") {
    return `${who}. Waiting for more memory: the model needs ${bytes(plan.need_bytes)}, the mesh has ${bytes(plan.have_bytes)}.`;
  }
  const over = new Set(plan.stages.map((stage) => stage.node)).size;
  const all = over === lenders.length ? "all" : over;
  const where = over > 1 ? `split over ${all} of them` : `whole on ${nameOf(status, plan.host)}`;
  return `${who}, ${bytes(total)} of memory. The model is ${where}.`;
}

// -- memory: one segment per lender --

function drawMemory(nodes) {
  const lenders = nodes.filter((node) => node.memory_bytes);
  const total = lenders.reduce((sum, node) => sum + node.memory_bytes, 0) || 1;
  keyed(find("memory-track"), lenders, {
    key: (node) => node.id,
    make: makeSegment,
    update: (segment, node) => fillSegment(segment, node, node.memory_bytes / total),
  });
}

function makeSegment() {
  const part = {};
  const segment = h(
    "li",
    { class: "segment" },
    (part.gauge = h("span", { class: "gauge", "aria-hidden": "true" })),
    h(
      "span",
      { class: "segment-head" },
      (part.name = h("strong")),
      (part.role = h("span", { class: "role" })),
    ),
    h(
      "span",
      { class: "segment-line" },
      (part.used = h("span", { class: "used" })),
      (part.memory = h("span")),
    ),
    (part.link = h("span", { class: "segment-line quiet" })),
  );
  segment.pieces = part;
  segment.leave = () => (segment.style.flexGrow = "0.0001");
  return segment;
}

function fillSegment(segment, node, share) {
  const { gauge, name, role, used, memory, link } = segment.pieces;
  paint(segment, node.id);
  const grow = String(Math.max(LEAST_SHARE, share).toFixed(4));
  if (segment.classList.contains("entering")) {
    segment.style.flexGrow = "0.0001";
    requestAnimationFrame(() => requestAnimationFrame(() => (segment.style.flexGrow = grow)));
  } else {
    segment.style.flexGrow = grow;
  }
  gauge.style.width = length(Math.min(1, node.used / node.memory_bytes));
  say(name, node.name);
  say(role, node.role);
  role.dataset.role = node.role;
  say(used, node.used ? `${short(node.used, node.memoryText)} of ` : "");
  say(memory, node.memoryText);
  say(link, node.linkBrief);
  segment.classList.toggle("away", node.isAway);
  segment.title = [node.name, node.role, node.linkText, node.leftOut].filter(Boolean).join(" · ");
}

/** Without its unit where the other one has the same. */
function short(used, whole) {
  const [value, unit] = bytes(used).split(" ");
  return whole.endsWith(unit) ? value : `${value} ${unit}`;
}

// -- layers: one segment per stage --

function drawLayers(status) {
  const stages = status.plan?.mode === "waiting" ? [] : (status.plan?.stages ?? []);
  const count = stages.reduce((sum, stage) => sum + stage.last - stage.first, 0) || 1;
  show(find("layers-row"), stages.length > 0);
  keyed(find("layers-track"), stages, {
    key: (stage) => `${stage.node} ${stage.device ?? ""}`,
    make: () => {
      const label = h("span", { class: "stage-label" });
      const range = h("span", { class: "stage-range quiet" });
      const segment = h("li", { class: "stage" }, label, range);
      segment.pieces = { label, range };
      segment.leave = () => (segment.style.flexGrow = "0.0001");
      return segment;
    },
    update: (segment, stage) => {
      paint(segment, stage.node);
      segment.style.flexGrow = String(((stage.last - stage.first) / count).toFixed(4));
      say(segment.pieces.label, percent(stage.share));
      say(segment.pieces.range, layers(stage).replace(/^layers? /, ""));
      segment.title = `${nameOf(status, stage.node)}: ${layersAt(stage)}, ${bytes(stage.weight_bytes)} of weights`;
    },
  });
}

// -- the table: the same in full --

const COLUMNS = [
  ["Node", (node) => node.name],
  ["Role", (node) => node.role],
  ["State", (node) => (node.isAway ? node.standing : node.state)],
  ["Layers", (node) => node.layerText.replaceAll("layers ", "").replaceAll("layer ", "") || "–"],
  ["Share", (node) => node.shareText || "–"],
  ["Used", (node) => (node.memory_bytes ? bytes(node.used) : "–")],
  ["Free", (node) => (node.memory_bytes ? bytes(node.free) : "–")],
  ["Device", (node) => (node.devices ?? []).join(", ") || "–"],
  ["Link", (node) => node.linkText],
];

function drawTable(nodes) {
  keyed(find("nodes-rows"), nodes, {
    key: (node) => node.id,
    make: () => {
      const [first, ...others] = COLUMNS;
      const head = h("th", { scope: "row", role: "rowheader", "data-label": first[0] });
      const cells = others.map(([label]) => h("td", { role: "cell", "data-label": label }));
      const swatch = h("span", { class: "swatch", "aria-hidden": "true" });
      const name = h("span");
      head.append(swatch, name);
      const row = h("tr", { role: "row" }, head, ...cells);
      row.pieces = { swatch, texts: [name, ...cells] };
      return row;
    },
    update: (row, node) => {
      paint(row.pieces.swatch, node.memory_bytes ? node.id : null);
      COLUMNS.forEach(([, text], index) => say(row.pieces.texts[index], text(node)));
      row.classList.toggle("away", node.isAway);
      row.dataset.node = node.name;
    },
  });
}

function drawExcluded(nodes) {
  const left = nodes.filter((node) => node.leftOut);
  show(find("excluded"), left.length > 0);
  keyed(find("excluded-list"), left, {
    key: (node) => node.id,
    make: () => h("li", {}, h("strong"), h("span")),
    update: (item, node) => {
      say(item.firstChild, node.name);
      say(item.lastChild, ` ${node.leftOut}`);
    },
  });
}

// -- for those who do not see it --

let known = null;

function tell(nodes) {
  const now = new Map(nodes.map((node) => [node.id, node.name]));
  if (known) {
    const came = [...now].filter(([id]) => !known.has(id)).map(([, name]) => name);
    const went = [...known].filter(([id]) => !now.has(id)).map(([, name]) => name);
    const said = [
      came.length ? `${came.join(", ")} joined` : "",
      went.length ? `${went.join(", ")} left` : "",
    ];
    const text = said.filter(Boolean).join("; ");
    if (text) announce(text);
  }
  known = now;
}
