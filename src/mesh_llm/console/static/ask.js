// One question to the model, and its answer as it comes.

import { call } from "./session.js";
import { events } from "./sse.js";

/**
 * Fills `turn` (content, reasoning, resumed, stats …) and calls `changed` after each piece, until the answer
 * is whole, is stopped by `signal`, or fails: then `turn.error` says how.
 */
export async function ask(body, turn, { signal, changed }) {
  const clock = { asked: performance.now(), first: null, last: null, pieces: 0 };
  Object.assign(turn, {
    content: "",
    reasoning: "",
    resumed: [],
    note: "",
    error: "",
    isOpen: true,
    isStopped: false,
  });
  changed();
  try {
    const headers = { "Content-Type": "application/json" };
    const response = await call("/v1/chat/completions", {
      method: "POST",
      headers,
      body: JSON.stringify(body),
      signal,
    });
    let isWhole = false;
    for await (const { data, comment } of events(response)) {
      if (comment !== undefined) remark(turn, comment);
      else if (data === "[DONE]") isWhole = true;
      else take(turn, JSON.parse(data), clock);
      changed();
    }
    if (!isWhole && !turn.error) turn.error = "the answer was cut off";
  } catch (error) {
    if (signal.aborted) turn.isStopped = true;
    else turn.error = error.message + (error.hint ? `: ${error.hint}` : "");
  }
  turn.isOpen = false;
  turn.note = "";
  finish(turn, clock);
  changed();
}

function take(turn, chunk, clock) {
  if (chunk.error) {
    turn.error = chunk.error.message ?? String(chunk.error);
    return;
  }
  const choice = chunk.choices?.[0];
  const text = choice?.delta?.content ?? "";
  const thought = choice?.delta?.reasoning_content ?? "";
  if (text || thought) {
    clock.last = performance.now();
    clock.first ??= clock.last;
    clock.pieces++;
    turn.note = "";
  }
  turn.content += text;
  turn.reasoning += thought;
  if (choice?.finish_reason) turn.finish = choice.finish_reason;
  if (chunk.usage) turn.usage = chunk.usage;
  if (chunk.timings) turn.timings = chunk.timings;
}

/** The gateway's remarks between the events: signs of life, and that another engine has taken over. */
function remark(turn, comment) {
  const said = comment.replace(/^mesh-llm /, "");
  if (said === comment) return;
  const resumed = /^resumed \d+, served by (.*)$/.exec(said);
  if (resumed) {
    turn.resumed.push({ at: turn.content.length, text: resumed[1] });
    turn.note = "";
  } else {
    turn.note = said;
  }
}

/** Seen from here: the answer of several engines has one speed, and a stopped one has one, too. */
function finish(turn, clock) {
  if (clock.first === null) return;
  const tokens = turn.usage?.completion_tokens ?? clock.pieces;
  const spent_ms = clock.last - clock.first;
  turn.stats = {
    first_token_ms: clock.first - clock.asked,
    tokens,
    tok_s: tokens > 1 && spent_ms > 0 ? (1000 * (tokens - 1)) / spent_ms : null,
  };
}
