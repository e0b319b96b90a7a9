// What just happened that somebody who waits for an answer wants to know, for half a minute.

import { announce, find, say, show } from "./dom.js";
import { on } from "./feed.js";

const SHOWN_MS = 30_000;
/** What was told with the snapshot may be old. */
const FRESH_S = 10;

const WORDS = {
  lost: (text) => `${text}. Answers under way go on with the others.`,
  resumed: (text) => `${text}.`,
};

let last = 0;
let timer = 0;
/** The latest of each kind: who was lost stays beside what came of it. */
let told = {};

export function start() {
  on(["events"], ({ events }) => {
    const news = events.filter(({ kind, t }) => WORDS[kind] && t > last);
    if (!news.length) return;
    last = news.at(-1).t;
    if (Date.now() / 1000 - last > FRESH_S) return;
    for (const { kind, text } of news) told[kind] = WORDS[kind](text);
    const words = Object.keys(WORDS)
      .map((kind) => told[kind])
      .filter(Boolean)
      .join(" ");
    say(find("notice"), words);
    show(find("notice"), true);
    announce(words);
    clearTimeout(timer);
    timer = setTimeout(() => {
      told = {};
      show(find("notice"), false);
    }, SHOWN_MS);
  });
}
