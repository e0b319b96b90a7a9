// Pairing: a machine of this network is let in by a short code, after somebody here has agreed.

import { attempted } from "./attempt.js";
import { confirmed } from "./confirm.js";
import { announce, find, say, show } from "./dom.js";
import { get, post } from "./session.js";

const LOOK_MS = 1000;

export function start() {
  find("pair-begin").addEventListener("click", () => attempt(begin));
  find("pair-end").addEventListener("click", () => attempt(end));
}

const attempt = (what) => attempted(what, find("invite-problem")).then((done) => done || draw({ open: false }));

async function begin() {
  let state = await post("/api/pair", { role: find("invite-role").value });
  announce(`Announced as ${state.label}`);
  while (state.open) {
    draw(state);
    if (state.waiting) await decide(state.waiting);
    await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    state = await get("/api/pair");
  }
  draw(state);
  if (state.admitted) announce(`${state.admitted} was let in`);
}

async function decide({ id, name, address }) {
  const accept = await confirmed({
    title: `Let ${name} in?`,
    text: `A machine at ${address} that calls itself ${name} knows the code.`,
    action: "Let it in",
  });
  await post("/api/pair-answer", { id, accept });
}

async function end() {
  draw(await post("/api/pair-end"));
}

function draw({ open, label, code }) {
  show(find("pair-open"), open);
  find("pair-begin").disabled = open;
  // Nothing secret stays on a page that nobody looks at.
  say(find("pair-code"), open ? code : "");
  say(find("pair-label"), open ? label : "");
}
