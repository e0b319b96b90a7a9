// What happens and has happened: progress of long work, and events in plain words.

import { find, h, keyed, say, show } from "./dom.js";
import { on } from "./feed.js";
import { bytes, clock, grouped, percent } from "./words.js";

const SHOWN = 60;
const STALE_MS = 10_000;

export function start() {
  on(["progress", "status"], ({ progress, status }) => {
    // Some work says that it goes on, and not that it is done: a node that serves has finished it.
    const isOver = (entry) => status?.node.state === "serving" && Date.now() - entry.heard_at > STALE_MS;
    drawProgress([...progress.values()].filter((entry) => !isOver(entry)));
  });
  on(["events"], ({ events }) => drawEvents(events));
}

function drawProgress(entries) {
  show(find("progress"), entries.length);
  keyed(find("progress-list"), entries, {
    key: (entry) => entry.what,
    make: (entry) => {
      const text = h("span", { class: "progress-text" });
      const bar = h("progress", { max: "1", "aria-label": entry.what });
      const element = h("li", {}, h("span", { class: "progress-what", text: entry.what }), text, bar);
      element.pieces = { text, bar };
      return element;
    },
    update: (element, entry) => {
      const { text, bar } = element.pieces;
      const amount =
        entry.unit === "bytes" || entry.unit === "B"
          ? bytes
          : (count) => `${grouped(count)} ${entry.unit ?? ""}`;
      if (entry.total) {
        bar.value = entry.done / entry.total;
        say(text, `${percent(entry.done / entry.total)} of ${amount(entry.total)}`);
      } else {
        bar.removeAttribute("value");
        say(text, entry.done ? amount(entry.done) : "");
      }
    },
  });
}

function drawEvents(events) {
  const seen = new Map();
  const recent = events.slice(-SHOWN).map((event) => {
    const said = `${event.t} ${event.kind} ${event.text}`;
    seen.set(said, (seen.get(said) ?? 0) + 1);
    return { ...event, key: `${said} ${seen.get(said)}` };
  });
  show(find("events-empty"), !recent.length);
  keyed(find("events-list"), recent.reverse(), {
    key: (event) => event.key,
    make: (event) =>
      h(
        "li",
        { "data-kind": event.kind },
        h("time", { datetime: new Date(1000 * event.t).toISOString(), text: clock(event.t) }),
        h("span", { text: event.text }),
      ),
    update: () => {},
  });
}
