// One dialog for every question that begins with "really".

import { find, say } from "./dom.js";

/** True when the action is chosen; Escape and the cross are a no. */
export function confirmed({ title, text, action }) {
  const dialog = find("confirm-dialog");
  say(find("confirm-title"), title);
  say(find("confirm-text"), text);
  say(find("confirm-yes"), action);
  dialog.returnValue = "";
  dialog.showModal();
  find("confirm-no").focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
