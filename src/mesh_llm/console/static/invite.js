// Invites: made, shown and copied on demand, revoked.

import { attempted } from "./attempt.js";
import { confirmed } from "./confirm.js";
import { snippet } from "./copy.js";
import { announce, calm, find, h, keyed, say, show } from "./dom.js";
import { get, post } from "./session.js";
import { day, several } from "./words.js";

export function start() {
  find("invite-form").addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(make);
  });
  find("invite-hide").addEventListener("click", hide);
  find("invites-box").addEventListener("toggle", (event) => event.target.open && attempt(list));
}

const attempt = (what) => attempted(what, find("invite-problem"));

async function make() {
  const lifetime_s = Number(find("invite-lifetime").value) || null;
  const role = find("invite-role").value;
  const { token } = await post("/api/invite", { role, lifetime_s });
  const command = `mesh-llm${role === "client" ? " --client" : ""} --join ${token}`;
  find("invite-command").replaceChildren(snippet(command, "the command to join"));
  find("invite-token").replaceChildren(snippet(token, "the invite token"));
  const { picture } = await post("/api/qr", { text: token });
  const label = "The invite token as a QR code";
  find("invite-qr").replaceChildren(h("img", { class: "qr", src: picture, alt: label }));
  show(find("invite-made"), true);
  find("invite-made").scrollIntoView({ block: "nearest", behavior: calm.matches ? "instant" : "smooth" });
  announce("Invite made");
  if (find("invites-box").open) await list();
}

/** Nothing secret stays on a page that nobody looks at. */
function hide() {
  for (const id of ["invite-command", "invite-token", "invite-qr"]) find(id).replaceChildren();
  show(find("invite-made"), false);
}

async function list() {
  const { invites } = await get("/api/invites");
  show(find("invites-empty"), !invites.length);
  keyed(find("invites-list"), [...invites].reverse(), {
    key: (invite) => invite.id,
    make: (invite) => {
      const text = h("span");
      const button = h("button", {
        type: "button",
        class: "copy",
        text: "Revoke",
        "aria-label": `Revoke invite ${invite.id}`,
      });
      button.addEventListener("click", () => attempt(() => revoke(invite)));
      const element = h("li", {}, h("code", { text: invite.id }), text, button);
      element.pieces = { text, button };
      return element;
    },
    update: (element, invite) => {
      const until = invite.expires ? `until ${day(invite.expires)}` : "for ever";
      const uses = several(Array.isArray(invite.uses) ? invite.uses.length : (invite.uses ?? 0), "use");
      say(element.pieces.text, `${invite.role}, ${invite.state}, ${until}, ${uses}`);
      show(element.pieces.button, invite.state === "open");
    },
  });
}

async function revoke(invite) {
  const isSure = await confirmed({
    title: "Revoke this invite?",
    text: `Nobody can join with ${invite.id} any more, and everyone who joined with it is expelled from the mesh.`,
    action: "Revoke",
  });
  if (!isSure) return;
  const { expelled } = await post("/api/revoke", { id: invite.id });
  announce(expelled?.length ? `Revoked; ${expelled.join(", ")} expelled` : "Revoked");
  await list();
}
