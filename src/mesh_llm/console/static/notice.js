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

export function start() {
  on(["events"], ({ events }) => {
    const news = events.filter(({ kind, t }) => WORDS[kind] && t > last);
    if (!news.length) return;
    const { kind, t, text } = news.at(-1);
    last = t;
    if (Date.now() / 1000 - t > FRESH_S) return;
    const words = WORDS[kind](text);
    say(find("notice"), words);
    show(find("notice"), true);
    announce(words);
    clearTimeout(timer);
    timer = setTimeout(() => show(find("notice"), false), SHOWN_MS);
  });
}
