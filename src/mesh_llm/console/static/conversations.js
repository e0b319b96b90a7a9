// Conversations of this tab: they survive a reload, and end with the tab.

const PLACE = "mesh-llm conversations";
const KEPT = 20;

export const SETTINGS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1, hint: "0 = always the likeliest" },
  { name: "top_p", label: "Top-p", min: 0, max: 1, step: 0.05, hint: "share of the likeliest tokens" },
  { name: "top_k", label: "Top-k", min: 0, max: 500, step: 1, hint: "number of the likeliest tokens" },
  { name: "min_p", label: "Min-p", min: 0, max: 1, step: 0.01, hint: "relative to the likeliest token" },
  { name: "repeat_penalty", label: "Repeat penalty", min: 0.5, max: 2, step: 0.05, hint: "1 = none" },
  { name: "max_tokens", label: "Longest answer", min: 1, max: 1_000_000, step: 1, hint: "tokens" },
  { name: "seed", label: "Seed", min: 0, max: 4_294_967_295, step: 1, hint: "same seed, same answer" },
];

const fresh = () => ({
  id: `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`,
  system: "",
  settings: {},
  turns: [],
});

export class Conversations {
  constructor() {
    const kept = read();
    this.all = kept.all.length ? kept.all : [fresh()];
    this.current = this.all.find((one) => one.id === kept.current) ?? this.all[0];
    // An answer that was under way when the page was left.
    for (const one of this.all)
      for (const turn of one.turns) if (turn.isOpen) Object.assign(turn, { isOpen: false, isStopped: true });
  }

  /** A new one, with the settings of the last; an empty one is used again. */
  begin() {
    const { system, settings } = this.current;
    if (this.current.turns.length) {
      this.current = { ...fresh(), system, settings: { ...settings } };
      this.all.unshift(this.current);
      this.all.splice(KEPT);
    }
    this.keep();
  }

  choose(id) {
    this.current = this.all.find((one) => one.id === id) ?? this.current;
    this.keep();
  }

  remove() {
    this.all = this.all.filter((one) => one !== this.current);
    if (!this.all.length) this.all.push(fresh());
    this.current = this.all[0];
    this.keep();
  }

  keep() {
    const write = (all) => sessionStorage.setItem(PLACE, JSON.stringify({ current: this.current.id, all }));
    try {
      write(this.all);
    } catch {
      try {
        // Full: pictures are what takes the room.
        write(this.all.map((one) => ({ ...one, turns: one.turns.map(({ images, ...turn }) => turn) })));
      } catch {
        sessionStorage.removeItem(PLACE);
      }
    }
  }
}

export function titleOf(conversation) {
  const first =
    conversation.turns
      .find((turn) => turn.role === "user")
      ?.content.trim()
      .split("\n")[0] ?? "";
  if (!first) return "New conversation";
  return first.length > 48 ? `${first.slice(0, 47)}…` : first;
}

function read() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(PLACE) ?? "{}");
    return { current: kept.current, all: Array.isArray(kept.all) ? kept.all : [] };
  } catch {
    return { all: [] };
  }
}

/** What the API is sent: the system prompt, all turns, and the settings that were chosen. */
export function request(conversation, model) {
  const messages = conversation.turns.filter(isPart).map(message);
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  const chosen = Object.entries(conversation.settings).filter(([, value]) => value !== null && value !== "");
  return {
    model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    ...Object.fromEntries(chosen),
  };
}

/** A question that got no answer is left out with it: many templates want the two to alternate. */
function isPart(turn, index, turns) {
  const next = turns[index + 1];
  if (turn.role === "assistant") return Boolean(turn.content);
  return !next || next.role !== "assistant" || Boolean(next.content);
}

function message({ role, content, images }) {
  if (!images?.length) return { role, content };
  const pictures = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role, content: [...(content ? [{ type: "text", text: content }] : []), ...pictures] };
}
