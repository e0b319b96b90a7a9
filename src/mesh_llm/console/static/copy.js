// Buttons that copy.

import { announce, h } from "./dom.js";

const SAID_MS = 1600;

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Not a secure context, or not allowed: the old way needs a selection.
    const field = h("textarea", { class: "off-screen", "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
}

/** `source` gives the text when the button is pressed; `what` names it for those who do not see where it stands. */
export function copyButton(source, what) {
  let timer = 0;
  const button = h("button", {
    class: "copy",
    type: "button",
    text: "Copy",
    "aria-label": `Copy ${what}`,
    async onclick() {
      await copy(source());
      button.textContent = "Copied";
      announce(`Copied ${what}`);
      clearTimeout(timer);
      timer = setTimeout(() => (button.textContent = "Copy"), SAID_MS);
    },
  });
  return button;
}

/** A text to copy, in a box of its own. */
export function snippet(text, what) {
  const code = h("code", { text });
  return h(
    "div",
    { class: "snippet" },
    h("pre", { tabindex: "0", "aria-label": what, role: "region" }, code),
    copyButton(() => code.textContent, what),
  );
}
