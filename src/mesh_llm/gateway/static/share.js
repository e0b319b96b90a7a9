// A guest's address: the key stands behind its #, which a browser sends to no server.
// It goes to where llama.cpp's page keeps its settings, and out of the address and the history.
"use strict";

const SETTINGS = "LlamaUi.config";
const KEY = /^mk-[0-9a-f]{8}-[\w-]{43}$/;

function settings() {
  try {
    const kept = JSON.parse(localStorage.getItem(SETTINGS));
    return kept !== null && typeof kept === "object" ? kept : {};
  } catch {
    return {};
  }
}

function open() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key") ?? "";
  history.replaceState(null, "", location.pathname);
  if (!KEY.test(key)) {
    return "There is no key in this address. Ask whoever shares this machine for a new one.";
  }
  try {
    localStorage.setItem(SETTINGS, JSON.stringify({ ...settings(), apiKey: key }));
  } catch {
    return "This browser keeps no settings of pages: leave its private mode, and open the address again.";
  }
  location.replace("/");
  return "Opening the chat …";
}

document.getElementById("said").textContent = open();
