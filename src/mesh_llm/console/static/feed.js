// What the node tells of itself: one long answer, taken up again when it breaks off.

import { call, session } from "./session.js";
import { events } from "./sse.js";

const FIRST_WAIT_MS = 1000;
const HIGHEST_WAIT_MS = 15_000;
/** The server sends a sample every other second: after so many, the connection is dead though open. */
const SILENCE_MS = 20_000;
const EVENTS_KEPT = 200;

export const state = {
  status: null,
  interval_s: 2,
  samples: [],
  events: [],
  progress: new Map(),
  link: { is: "opening", retry_at: 0, why: "" },
};

const listeners = new Map();

/** `listener(state)` after each change of a topic: status, samples, events, progress, link. */
export function on(topics, listener) {
  for (const topic of topics) listeners.set(topic, [...(listeners.get(topic) ?? []), listener]);
}

const dirty = new Set();
let isDue = false;

function changed(...topics) {
  for (const topic of topics) dirty.add(topic);
  if (isDue) return;
  isDue = true;
  // A page that nobody sees is not drawn: the frame comes when it is looked at again.
  requestAnimationFrame(() => {
    isDue = false;
    const called = new Set([...dirty].flatMap((topic) => listeners.get(topic) ?? []));
    dirty.clear();
    for (const listener of called) listener(state);
  });
}

const KEPT_SAMPLES = () => Math.ceil(600 / state.interval_s);

const TAKE = {
  snapshot(told) {
    state.status = told.status;
    state.interval_s = told.history?.interval_s ?? 2;
    state.samples = told.history?.samples ?? [];
    state.events = told.events ?? [];
    state.progress.clear();
    for (const entry of told.progress ?? []) progress(entry);
    changed("status", "samples", "events", "progress");
  },
  status(told) {
    state.status = told;
    changed("status");
  },
  sample(told) {
    state.samples.push(told);
    state.samples.splice(0, Math.max(0, state.samples.length - KEPT_SAMPLES()));
    changed("samples");
  },
  event(told) {
    state.events.push(told);
    state.events.splice(0, Math.max(0, state.events.length - EVENTS_KEPT));
    changed("events");
  },
  progress(told) {
    progress(told);
    changed("progress");
  },
};

function progress(entry) {
  entry.heard_at = Date.now();
  if (entry.total && entry.done >= entry.total) state.progress.delete(entry.what);
  else state.progress.set(entry.what, entry);
}

function linkIs(is, more = {}) {
  state.link = { is, retry_at: 0, why: "", ...more };
  changed("link");
}

let wake = () => {};

/** At once, rather than when the wait is over. */
export const retry = () => wake();

function wait(ms) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    wake = () => {
      clearTimeout(timer);
      resolve();
    };
  });
}

async function listen() {
  await session();
  const quiet = new AbortController();
  let timer = 0;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => quiet.abort(), SILENCE_MS);
  };
  heard();
  try {
    const response = await call("/api/events", { signal: quiet.signal });
    for await (const { event, data } of events(response)) {
      heard();
      if (!data || !TAKE[event]) continue;
      TAKE[event](JSON.parse(data));
      if (state.link.is !== "open") linkIs("open");
    }
  } finally {
    clearTimeout(timer);
  }
}

export async function follow() {
  let wait_ms = FIRST_WAIT_MS;
  addEventListener("online", retry);
  for (;;) {
    let why = "Connection to the node lost: it ended.";
    try {
      await listen();
    } catch (error) {
      why = error.status
        ? `The node refuses this page: ${error.message}.`
        : "Connection to the node lost: it does not answer.";
    }
    if (state.link.is === "open") wait_ms = FIRST_WAIT_MS;
    // Pages that lost the same node do not all come back in the same moment.
    const pause_ms = wait_ms * (0.75 + 0.5 * Math.random());
    linkIs("lost", { retry_at: Date.now() + pause_ms, why });
    await wait(pause_ms);
    wait_ms = Math.min(2 * wait_ms, HIGHEST_WAIT_MS);
    linkIs("opening", { why });
  }
}
