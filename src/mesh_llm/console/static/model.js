// The model, the plan, and how the prediction compares with what is measured.

import { find, h, keyed, say, show } from "./dom.js";
import { on } from "./feed.js";
import { nameOf } from "./nodes.js";
import { bytes, duration, figure, grouped, length, percent, several } from "./words.js";

export function start() {
  on(["status"], ({ status }) => {
    if (!status) return;
    say(find("model-name"), status.model?.name ?? "No model yet");
    keyed(find("model-facts"), facts(status), { key: (fact) => fact[0], make: makeFact, update: fillFact });
    drawModels(status);
    drawSpeed(status);
    const why = status.plan?.reason || status.node.reason || "";
    say(find("plan-reason"), why);
    show(find("plan-reason"), why);
  });
}

function facts(status) {
  const { model, plan, engine } = status;
  const list = [];
  const add = (name, text) => text && list.push([name, text]);
  if (model) {
    add("Size", model.size_bytes && bytes(model.size_bytes));
    add("Quantisation", model.quantisation);
    add("Layers", model.layers && String(model.layers));
    add("Context", model.context && contextText(model));
    add("Draft", draftText(model.draft));
  }
  if (plan) {
    add("Plan", planText(status, plan));
    add("Prediction", plan.predicted_tok_s_low && rangeText(plan));
    const [served] = status.models;
    const count = countText(served);
    add("Replicas", count && `${count}: ${hostsText(status, served)}`);
    add("Lanes", lanesText(plan, engine));
    add("Memory", plan.need_bytes && `${bytes(plan.need_bytes)} needed, ${bytes(plan.have_bytes)} there`);
  }
  if (engine) {
    add("Engine", engineText(engine));
    add("Weights sent", engine.state === "ready" && sentText(engine.weights_sent_bytes));
  }
  return list;
}

const contextText = (model) =>
  `${grouped(model.context)} tokens` + (model.slots > 1 ? ` × ${several(model.slots, "slot")}` : "");

function draftText(draft) {
  if (!draft) return "none";
  const accepted = draft.drafted ? `, ${percent(draft.accepted / draft.drafted)} accepted` : "";
  const gain = draft.gain ? `, ${figure(draft.gain)}× as fast` : "";
  const by = draft.name ? `${draft.name} and the text` : "from the text itself";
  return `${by}${draft.depth ? `, ${draft.depth} deep` : ""}${accepted}${gain}`;
}

function planText(status, plan) {
  const number = plan.epoch === null ? "" : `no. ${plan.epoch}, `;
  if (plan.mode === "waiting") return `${number}waiting for more memory`;
  return `${number}${plan.mode === "solo" ? "whole on" : "split, host"} ${nameOf(status, plan.host)}`;
}

const countText = (served) =>
  served?.replicas_most > 1 ? `${served.replicas.length} of ${served.replicas_wanted}` : "";

const hostsText = (status, served) =>
  served.replicas
    .map((replica) => nameOf(status, replica.host) + (replica.lanes > 1 ? ` (${replica.lanes} lanes)` : ""))
    .join(", ");

function lanesText(plan, engine) {
  const ready = (engine?.lanes ?? []).filter((lane) => lane.state === "ready");
  const requests = ready.map((lane) => lane.requests).join(" + ");
  if (plan.lanes < 2) return plan.lanes_reason && `1: ${plan.lanes_reason}`;
  const told = `${plan.lanes} engines over the same stages${requests && `, with ${requests} requests`}`;
  return plan.lanes_reason ? `${told}; ${plan.lanes_reason}` : told;
}

function engineText(engine) {
  const restarts = engine.restarts ? `, ${several(engine.restarts, "restart")}` : "";
  if (engine.state === "ready") return `ready in ${duration(1000 * engine.ready_s)}${restarts}`;
  return `${engine.state}${engine.reason ? `: ${engine.reason}` : ""}${restarts}`;
}

const rangeText = (plan) =>
  `${figure(plan.predicted_tok_s_low)}–${figure(plan.predicted_tok_s_high)} tok/s` +
  (plan.predicted_from ? `, from ${plan.predicted_from}` : "");

const sentText = (sent) => (sent ? bytes(sent) : "none: every node had them");

/** All of them, where there are several. */
function drawModels(status) {
  const models = status.models?.length > 1 ? status.models : [];
  show(find("models-list"), models.length);
  keyed(find("models-list"), models, {
    key: (served) => served.name,
    make: () => h("li", {}, h("strong"), h("span")),
    update: (item, served) => {
      say(item.firstChild, served.name);
      const count = countText(served);
      const state = `${served.state}${count && `, ${count} replicas`}`;
      const where = served.host ? ` on ${hostsText(status, served)}` : "";
      const why = served.reason ? `: ${served.reason}` : "";
      const rank = served.priority ? `, priority ${served.priority}` : "";
      say(item.lastChild, ` ${state}${where}${served.default ? ", the default one" : ""}${rank}${why}`);
    },
  });
}

const makeFact = ([name]) => h("div", { class: "fact" }, h("dt", { text: name }), h("dd"));
const fillFact = (element, [, text]) => say(element.lastChild, text);

function drawSpeed(status) {
  const predicted = status.plan?.predicted_tok_s ?? 0;
  const measured = status.engine?.decode_tok_s ?? 0;
  const scale = Math.max(predicted, measured) || 1;
  for (const [name, value] of Object.entries({ predicted, measured })) {
    say(find(`speed-${name}`), value ? `${figure(value)} tok/s` : "–");
    find(`speed-${name}-bar`).style.width = length(value / scale);
  }
}
