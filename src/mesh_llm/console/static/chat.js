// The chat: what is said, who says it, and what is asked next.

import { ask } from "./ask.js";
import { Conversations, SETTINGS, request, titleOf } from "./conversations.js";
import { copyButton } from "./copy.js";
import { announce, find, h, keyed, say, show } from "./dom.js";
import { on, state } from "./feed.js";
import { render } from "./markdown.js";
import { pictures } from "./pictures.js";
import { duration, figure, several } from "./words.js";

/** As near as this to the end, the view follows what is written. */
const NEAR_PX = 80;
/** While an answer streams: often enough to look alive, seldom enough to cost nothing. */
const DRAW_MS = 60;

const conversations = new Conversations();
let stopping = null;
let drawTimer = 0;

export function start() {
  find("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!stopping) send();
  });
  find("chat-stop").addEventListener("click", () => stopping?.abort());
  find("chat-text").addEventListener("keydown", onKey);
  find("chat-text").addEventListener("input", grow);
  find("chat-new").addEventListener("click", () => change(() => conversations.begin()));
  find("chat-remove").addEventListener("click", () => change(() => conversations.remove()));
  find("chat-choice").addEventListener("change", (event) =>
    change(() => conversations.choose(event.target.value)),
  );
  addEventListener("pagehide", () => conversations.keep());
  startSettings();
  pictures.start();
  on(["status", "link"], drawReadiness);
  draw();
}

function onKey(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("chat-form").requestSubmit();
  } else if (event.key === "Escape" && stopping) {
    stopping.abort();
  }
}

function grow() {
  const field = find("chat-text");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, 220)}px`;
}

/** Another conversation; an answer under way belongs to the one that is left. */
function change(how) {
  stopping?.abort();
  how();
  fillSettings();
  draw();
  find("chat-text").focus();
}

// -- asking ------------------------------------------------------------------------------------------

async function send() {
  const field = find("chat-text");
  const content = field.value.trim();
  const images = pictures.take();
  if (!content && !images.length) return;
  field.value = "";
  grow();
  conversations.current.turns.push({ role: "user", content, ...(images.length ? { images } : {}) });
  await answer();
}

async function again() {
  const { turns } = conversations.current;
  if (stopping || turns.at(-1)?.role !== "assistant") return;
  turns.pop();
  await answer();
}

async function answer() {
  const conversation = conversations.current;
  const body = request(conversation, state.status?.model?.name ?? "default");
  const turn = { role: "assistant", content: "", isOpen: true };
  conversation.turns.push(turn);
  stopping = new AbortController();
  conversations.keep();
  draw();
  follow(true);
  await ask(body, turn, { signal: stopping.signal, changed: drawSoon });
  stopping = null;
  conversations.keep();
  draw();
  announce(
    turn.error ? `The answer failed: ${turn.error}` : turn.isStopped ? "Answer stopped" : "Answer complete",
  );
}

// -- drawing -----------------------------------------------------------------------------------------

let isFollowing = true;

function follow(isWanted) {
  isFollowing = isWanted ?? isFollowing;
  const log = find("chat-log");
  if (isFollowing) log.scrollTop = log.scrollHeight;
}

function drawSoon() {
  drawTimer ||= setTimeout(() => {
    drawTimer = 0;
    draw();
  }, DRAW_MS);
}

function draw() {
  const log = find("chat-log");
  isFollowing = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
  const { turns, id } = conversations.current;
  keyed(
    find("chat-turns"),
    turns.map((turn, index) => ({ turn, key: `${id} ${index}`, isLast: index === turns.length - 1 })),
    {
      key: (entry) => entry.key,
      make: ({ turn }) => (turn.role === "user" ? makeQuestion() : makeAnswer()),
      update: (element, { turn, isLast }) => element.fill(turn, isLast),
    },
  );
  show(find("chat-empty"), !turns.length);
  drawComposer();
  drawChoice();
  follow();
}

function drawComposer() {
  show(find("chat-stop"), stopping);
  show(find("chat-send"), !stopping);
  find("chat-log").setAttribute("aria-busy", String(Boolean(stopping)));
}

function drawChoice() {
  const choice = find("chat-choice");
  const titles = conversations.all.map((one) => [one.id, titleOf(one)]);
  const drawn = JSON.stringify(titles);
  if (choice.dataset.drawn !== drawn) {
    // Only then: a list that is open would close.
    choice.dataset.drawn = drawn;
    choice.replaceChildren(...titles.map(([value, text]) => h("option", { value, text })));
  }
  choice.value = conversations.current.id;
}

function drawReadiness({ status, link }) {
  const isServing = link.is === "open" && status?.node.state === "serving";
  const why =
    link.is !== "open"
      ? "The node does not answer at the moment."
      : `The node is ${status?.node.state ?? "starting"}.`;
  say(find("chat-ready"), isServing || !status ? "" : `${why} Your question waits until the model is ready.`);
  show(find("chat-ready"), !isServing && status);
  if (isServing) pictures.look(`${status.model?.fingerprint} ${status.plan?.epoch}`);
}

function makeQuestion() {
  const text = h("p", { class: "question-text" });
  const images = h("div", { class: "images" });
  const element = h(
    "li",
    { class: "turn question" },
    h("h3", { class: "off-screen", text: "You" }),
    text,
    images,
  );
  element.fill = (turn) => {
    say(text, turn.content);
    const urls = turn.images ?? [];
    if (images.childElementCount !== urls.length) {
      images.replaceChildren(
        ...urls.map((src, index) => h("img", { src, alt: `Picture ${index + 1} of the question` })),
      );
    }
  };
  return element;
}

function makeAnswer() {
  const part = {
    thought: h("div", { class: "prose" }),
    text: h("div", { class: "prose answer-text" }),
    resumed: h("ul", { class: "resumed" }),
    note: h("p", { class: "answer-note quiet" }),
    error: h("p", { class: "answer-error", role: "alert" }),
    stats: h("span", { class: "stats" }),
    again: h("button", { type: "button", class: "copy", text: "Ask again", onclick: again }),
  };
  const thoughts = h("details", { class: "thoughts" }, h("summary", { text: "Reasoning" }), part.thought);
  let shown = null;
  const copy = copyButton(() => shown?.content ?? "", "the answer");
  const foot = h("div", { class: "answer-foot" }, part.stats, part.again, copy);
  const element = h(
    "li",
    { class: "turn answer" },
    h("h3", { class: "off-screen", text: "Answer" }),
    thoughts,
    part.text,
    part.resumed,
    part.note,
    part.error,
    foot,
  );
  element.fill = (turn, isLast) => {
    shown = turn;
    if (turn.reasoning) render(part.thought, turn.reasoning);
    if (turn.isOpen && turn.reasoning && !turn.content) thoughts.open = true;
    else if (turn.content && turn.isOpen && !element.hasAnswered) thoughts.open = false;
    element.hasAnswered = Boolean(turn.content);
    show(thoughts, turn.reasoning);
    render(part.text, turn.content);
    element.classList.toggle("open", Boolean(turn.isOpen));
    fillResumed(part.resumed, turn.resumed ?? []);
    say(part.note, noteOf(turn));
    show(part.note, part.note.textContent);
    say(part.error, turn.error ? `Failed: ${turn.error}` : "");
    show(part.error, turn.error);
    say(part.stats, statsOf(turn));
    show(foot, !turn.isOpen);
    show(part.again, isLast);
    show(copy, turn.content);
  };
  return element;
}

function fillResumed(list, resumed) {
  show(list, resumed.length);
  if (list.childElementCount === resumed.length) return;
  list.replaceChildren(
    ...resumed.map(({ text }) => h("li", { text: `Resumed after a failure, now served by ${text}` })),
  );
}

function noteOf(turn) {
  if (turn.isStopped) return "Stopped.";
  if (turn.finish === "length" && !turn.isOpen) return "Stopped at the maximum length.";
  if (!turn.isOpen) return "";
  if (turn.note) return `mesh-llm ${turn.note} …`;
  return turn.content || turn.reasoning ? "" : "Waiting for the first token …";
}

function statsOf({ stats }) {
  if (!stats) return "";
  const speed = stats.tok_s ? `${figure(stats.tok_s)} tok/s` : "";
  return [speed, `first token after ${duration(stats.first_token_ms)}`, several(stats.tokens, "token")]
    .filter(Boolean)
    .join(" · ");
}

// -- settings ----------------------------------------------------------------------------------------

function startSettings() {
  find("settings-fields").append(
    ...SETTINGS.map(({ name, label, hint, ...range }) => {
      const field = h("input", {
        id: `set-${name}`,
        type: "number",
        placeholder: "model’s own",
        inputmode: "decimal",
        ...range,
      });
      field.addEventListener("change", () => {
        const { settings } = conversations.current;
        if (field.value === "" || !field.validity.valid) delete settings[name];
        else settings[name] = Number(field.value);
        if (!field.validity.valid) field.value = "";
        conversations.keep();
      });
      return h(
        "label",
        { class: "field", for: `set-${name}` },
        h("span", { text: label }),
        field,
        h("small", { class: "quiet", text: hint }),
      );
    }),
  );
  find("system-prompt").addEventListener("change", (event) => {
    conversations.current.system = event.target.value;
    conversations.keep();
  });
  fillSettings();
}

function fillSettings() {
  const { settings, system } = conversations.current;
  for (const { name } of SETTINGS) find(`set-${name}`).value = settings[name] ?? "";
  find("system-prompt").value = system;
}
