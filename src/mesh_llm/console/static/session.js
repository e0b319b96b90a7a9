// The page's token: what management calls and chat carry, so that no other page can make them.

import { find } from "./dom.js";

const HEADER = "X-Mesh-LLM-Page";
let token = null;
let key = "";
let opening = null;
let isKeyNeeded = false;

/** What went wrong, in the node's own words. */
export class Refused extends Error {
  constructor(message, status, hint = "") {
    super(message);
    this.status = status;
    this.hint = hint;
  }
}

async function open() {
  const response = await fetch("/api/session", {
    headers: key ? { Authorization: `Bearer ${key}` } : {},
    cache: "no-store",
  });
  const session = await response.json().catch(() => ({}));
  isKeyNeeded = Boolean(session.api_key_needed ?? response.status === 401);
  if (session.token) return session.token;
  if (!isKeyNeeded && !response.ok) throw await refusal(response, session);
  key = await askForKey(Boolean(key));
  return open();
}

/** One at a time: several callers wait for the same answer. */
export async function session() {
  if (token) return token;
  opening ??= open().finally(() => (opening = null));
  token = await opening;
  return token;
}

/** As fetch, with the token; it is asked for anew once, when a node that was started again does not know it. */
export async function call(path, options = {}) {
  for (let attempt = 0; ; attempt++) {
    const headers = { ...options.headers, [HEADER]: await session() };
    const response = await fetch(path, { ...options, headers, cache: "no-store" });
    if (attempt === 0 && (response.status === 401 || response.status === 403)) {
      token = null;
      continue;
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }
}

export async function post(path, body = {}) {
  const headers = { "Content-Type": "application/json" };
  return (await call(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
}

export const get = async (path) => (await call(path)).json();

async function refusal(response, known) {
  const body = known ?? (await response.json().catch(() => ({})));
  const said = typeof body.error === "string" ? body.error : body.error?.message;
  return new Refused(said || `the node answered ${response.status}`, response.status, body.hint ?? "");
}

function askForKey(wasWrong) {
  const dialog = find("key-dialog");
  find("key-wrong").hidden = !wasWrong;
  const field = find("key-field");
  field.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(field.value), { once: true });
  });
}
