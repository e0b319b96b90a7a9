// Guests on the local network: an address and its QR code for each, what their keys were used for, and the end of it.

import { attempted } from "./attempt.js";
import { confirmed } from "./confirm.js";
import { snippet } from "./copy.js";
import { announce, calm, find, h, keyed, say, show } from "./dom.js";
import { on } from "./feed.js";
import { post } from "./session.js";
import { day, grouped, several } from "./words.js";

export function start() {
  find("guest-form").addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(share);
  });
  find("guest-hide").addEventListener("click", hide);
  find("guest-stop").addEventListener("click", () => attempt(stop));
  on(["status"], ({ status }) => {
    const api = status?.api;
    const shared = api?.shared_url;
    say(find("guest-where"), shared ? `Shared at ${shared}` : "");
    show(find("guest-shared"), shared);
    draw(api?.keys ?? []);
  });
}

const attempt = (what) => attempted(what, find("guest-problem"));

async function share() {
  const number = (id) => Number(find(id).value) || null;
  const made = await post("/api/share", {
    name: find("guest-name").value.trim() || null,
    lifetime_s: number("guest-lifetime"),
    requests_per_day: number("guest-requests"),
    tokens_per_day: number("guest-tokens"),
  });
  find("guest-name").value = "";
  find("guest-url").replaceChildren(snippet(made.url, "the guest’s address"));
  const label = `The address for ${made.name} as a QR code`;
  find("guest-qr").replaceChildren(h("img", { class: "qr", src: made.picture, alt: label }));
  say(find("guest-fingerprint"), made.fingerprint);
  show(find("guest-certificate"), made.own_certificate);
  show(find("guest-made"), true);
  find("guest-made").scrollIntoView({ block: "nearest", behavior: calm.matches ? "instant" : "smooth" });
  announce(`Address made for ${made.name}`);
}

/** Nothing secret stays on a page that nobody looks at. */
function hide() {
  for (const id of ["guest-url", "guest-qr"]) find(id).replaceChildren();
  show(find("guest-made"), false);
}

async function stop() {
  const isSure = await confirmed({
    title: "Stop sharing?",
    text: "The port to the local network is closed, and the keys of all guests are revoked.",
    action: "Stop sharing",
  });
  if (!isSure) return;
  await post("/api/stop-sharing", { revoke: true });
  hide();
  announce("No longer shared");
}

function draw(keys) {
  show(find("keys-empty"), !keys.length);
  keyed(find("keys-list"), keys, {
    key: (entry) => entry.name,
    make: (entry) => {
      const text = h("span");
      const button = h("button", {
        type: "button",
        class: "copy",
        text: "Revoke",
        "aria-label": `Revoke the key ${entry.name}`,
      });
      button.addEventListener("click", () => attempt(() => revoke(entry.name)));
      // That of --api-key belongs to the command line.
      show(button, entry.name !== "api-key");
      const element = h("li", {}, h("code", { text: entry.name }), text, button);
      element.pieces = { text };
      return element;
    },
    update: (element, entry) => say(element.pieces.text, described(entry)),
  });
}

function described(entry) {
  const tokens = entry.prompt_tokens_today + entry.completion_tokens_today;
  const until = entry.expires ? `${entry.expired ? "expired" : "until"} ${day(entry.expires)}` : "";
  const asked = used(entry.requests_today, entry.requests_per_day, "request");
  const today = `today ${asked}, ${used(tokens, entry.tokens_per_day, "token")}`;
  return [entry.manage ? "may manage" : "", until, today]
    .filter(Boolean)
    .join(", ");
}

const used = (count, limit, what) =>
  limit === null ? several(count, what) : `${grouped(count)} of ${several(limit, what)}`;

async function revoke(name) {
  const isSure = await confirmed({
    title: "Revoke this key?",
    text: `Requests with the key ${name} are refused from now on.`,
    action: "Revoke",
  });
  if (!isSure) return;
  await post("/api/revoke-key", { name });
  announce(`Revoked ${name}`);
}
