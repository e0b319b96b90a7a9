// Pairing: a machine of this network is let in by a short code, after somebody here has agreed.

import { attempted } from "./attempt.js";
import { confirmed } from "./confirm.js";
import { announce, find, say, show } from "./dom.js";
import { get, post } from "./session.js";

const LOOK_MS = 1000;
let isFollowed = false;

export function start() {
  find("pair-begin").addEventListener("click", () => attempt(begin));
  find("pair-end").addEventListener("click", () => attempt(end));
  // Open already: the page was loaded anew, or somebody began in a terminal.
  get("/api/pair").then((state) => state.open && attempt(() => follow(state)), () => {});
}

const tried = (what) => attempted(what, find("invite-problem"));
const pause = () => new Promise((resolve) => setTimeout(resolve, LOOK_MS));

/** One failure does not close the offer: only the node says whether it is open. */
async function attempt(what) {
  if (await tried(what)) return;
  await pause();
  const state = await get("/api/pair").catch(() => ({}));
  if (state.open) attempt(() => follow(state));
  else draw(state);
}

async function begin() {
  const state = await post("/api/pair", { role: find("invite-role").value });
  announce(`Announced as ${state.label}`);
  await follow(state);
}

async function follow(state) {
  if (isFollowed) return;
  isFollowed = true;
  try {
    while (state.open) {
      draw(state);
      // Refused where the machine gave up while the owner was asked: others may come.
      if (state.waiting) await tried(() => decide(state.waiting));
      await pause();
      state = await get("/api/pair");
    }
    draw(state);
    if (state.admitted) announce(`${state.admitted} was let in`);
  } finally {
    isFollowed = false;
  }
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
