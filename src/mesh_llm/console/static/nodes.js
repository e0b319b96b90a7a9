// The nodes of the mesh as both the bar and the table show them.

import { bytes, duration, figure, layers, percent } from "./words.js";

const COLOURS = 8;
const colours = new Map();

/** A node keeps its colour as long as the page is open; the name stands beside it always. */
export function colour(id) {
  if (!colours.has(id)) colours.set(id, colours.size % COLOURS);
  return `node-${colours.get(id)}`;
}

export function paint(element, id) {
  const wanted = id ? colour(id) : "node-none";
  if (element.paintedAs === wanted) return;
  if (element.paintedAs) element.classList.remove(element.paintedAs);
  element.classList.add(wanted);
  element.paintedAs = wanted;
}

const names = new Map();

/** Of a lost one, too, as long as the page is open. */
export function nameOf(status, id) {
  const name = status.mesh.nodes.find((node) => node.id === id)?.name ?? names.get(id);
  return name ?? (id ? id.slice(0, 8) : "?");
}

const LINKS = { self: "this node", local: "same machine", quic: "QUIC", tcp: "plain TCP", relay: "relay" };

function linkText(link) {
  if (!link?.kind) return "no link";
  const kind = LINKS[link.kind] ?? link.kind;
  const via = link.via?.length ? ` via ${link.via.join(", ")}` : "";
  return link.kind === "self" || link.rtt_ms === null || link.rtt_ms === undefined
    ? kind + via
    : `${kind}${via}, ${duration(link.rtt_ms)}`;
}

function linkBrief(link) {
  if (link?.kind === "self") return "this node";
  if (!link?.kind) return "no link";
  return link.rtt_ms === null || link.rtt_ms === undefined
    ? link.kind
    : `${link.kind} ${figure(link.rtt_ms)} ms`;
}

/** Of a stage, with its device where the node lends several. */
export function layersAt(stage) {
  return stage.device ? `${layers(stage)} on ${stage.device}` : layers(stage);
}

/** One entry per member, with what the plan says of it. */
export function describe(status) {
  const plan = status.plan;
  const reasons = new Map((plan?.excluded ?? []).map((entry) => [entry.node, entry.reason]));
  return status.mesh.nodes.map((node) => {
    const stages = (plan?.stages ?? []).filter((stage) => stage.node === node.id);
    const share = stages.reduce((sum, stage) => sum + stage.share, 0);
    const used = node.lent_bytes ?? 0;
    names.set(node.id, node.name);
    return {
      ...node,
      stages,
      share,
      used,
      free: Math.max(0, (node.memory_bytes ?? 0) - used),
      isSelf: node.id === status.node.id,
      isAway: Boolean(node.standing) && node.standing !== "alive",
      leftOut: reasons.get(node.id) ?? "",
      linkText: linkText(node.link),
      linkBrief: linkBrief(node.link),
      layerText: stages.map(layersAt).join(", "),
      shareText: stages.length ? percent(share) : "",
      memoryText: node.memory_bytes ? bytes(node.memory_bytes) : "",
    };
  });
}
