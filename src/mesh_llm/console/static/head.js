// The head of the page: which node this is, how it is, whether it can be heard, and how to end it.

import { confirmed } from "./confirm.js";
import { announce, attribute, find, say, show } from "./dom.js";
import { on, retry, state } from "./feed.js";
import { post } from "./session.js";

const ACTIONS = {
  unload: {
    title: "Unload the model here?",
    text: "This frees the machine’s memory. Others take over first, if they can; the node stays in its mesh.",
    action: "Unload",
  },
  stop: {
    title: "Stop this node?",
    text: "It finishes what it is answering, then ends. It comes back to its mesh when it is started again.",
    action: "Stop",
    doing: "The node is stopping.",
  },
  leave: {
    title: "Leave the mesh?",
    text: "The node hands over, leaves its mesh and ends. To come back it needs a new invite.",
    action: "Leave",
    doing: "The node is leaving its mesh.",
  },
};

let ending = "";
let countdown = 0;

export function start() {
  for (const [name, words] of Object.entries(ACTIONS)) {
    find(`node-${name}`).addEventListener("click", () => act(name, words));
  }
  find("node-load").addEventListener("click", () => tell("load"));
  find("retry").addEventListener("click", retry);
  on(["status"], ({ status }) => status && drawNode(status));
  on(["link"], drawLink);
}

async function act(name, words) {
  if (!(await confirmed(words))) return;
  if ((await tell(name)) && words.doing) {
    ending = words.doing;
    announce(ending);
  }
}

/** Whether the node does it; otherwise it has said why not. */
async function tell(name) {
  const problem = find("node-problem");
  try {
    await post(`/api/${name}`);
    show(problem, false);
    return true;
  } catch (error) {
    say(problem, [error.message, error.hint].filter(Boolean).join(": "));
    show(problem, true);
    return false;
  }
}

function drawNode(status) {
  const { node, model, version } = status;
  say(find("node-name"), node.name);
  say(find("node-role"), node.role);
  say(find("node-version"), version ? `mesh-llm ${version}` : "");
  const badge = find("node-state");
  if (badge.dataset.state && badge.dataset.state !== node.state) announce(`The node is ${node.state}`);
  badge.dataset.state = node.state;
  say(badge, node.state);
  badge.title = node.reason ?? "";
  show(find("node-unload"), node.role !== "client" && !node.resting);
  show(find("node-load"), node.resting);
  // A lite client may not let others in.
  for (const id of ["invite", "invite-link"]) show(find(id), node.role !== "client");
  const url = (status.api?.url ?? "").replace("//127.0.0.1:", "//localhost:");
  say(find("api-url"), url);
  attribute(find("chat-link"), "href", url);
  show(find("chat-link"), url);
  document.title = `${node.name} · ${model?.name ?? "mesh-llm"}`;
}

function drawLink({ link }) {
  clearInterval(countdown);
  document.body.classList.toggle("is-lost", link.is === "lost");
  show(find("lost"), link.is === "lost" || (link.is === "opening" && state.status));
  if (link.is === "open") {
    ending = "";
    return;
  }
  if (link.is === "lost") {
    count(link);
    countdown = setInterval(() => count(link), 1000);
    announce(ending || link.why);
  }
}

function count(link) {
  const seconds = Math.max(0, Math.ceil((link.retry_at - Date.now()) / 1000));
  say(find("lost-text"), `${ending || link.why} Trying again in ${seconds} s.`);
}
