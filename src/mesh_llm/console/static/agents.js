// What to type or paste so that other programs use this mesh; the node knows the words, as its command does.

import { find, h, show } from "./dom.js";
import { snippet } from "./copy.js";
import { on } from "./feed.js";
import { get } from "./session.js";

let knownFor = "";
let chosen = 0;

export function start() {
  on(["status"], async ({ status }) => {
    if (!status?.api?.url || !status.model?.name) return;
    const about = JSON.stringify([status.api.url, status.api.key_needed, status.model.name, status.model.context]);
    if (about === knownFor) return;
    knownFor = about;
    try {
      draw((await get("/api/agents")).agents);
    } catch {
      // Asked again with the next news of the node.
      knownFor = "";
    }
  });
}

function steps({ title, command, snippet: text, note }) {
  return [
    snippet(command, `the command for ${title}`),
    h("p", { class: "step", text: note }),
    text ? snippet(text, `the snippet for ${title}`) : null,
  ];
}

function draw(agents) {
  const panels = agents.map((agent, index) =>
    h(
      "div",
      {
        role: "tabpanel",
        id: `agent-panel-${index}`,
        "aria-labelledby": `agent-tab-${index}`,
        hidden: index !== chosen,
      },
      ...steps(agent),
    ),
  );
  const tabs = agents.map(({ title }, index) =>
    h("button", {
      role: "tab",
      type: "button",
      id: `agent-tab-${index}`,
      "aria-controls": `agent-panel-${index}`,
      text: title,
      onclick: () => choose(index),
      onkeydown: (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (step) choose((index + step + agents.length) % agents.length).focus();
      },
    }),
  );
  const choose = (index) => {
    chosen = index;
    tabs.forEach((tab, other) => {
      tab.setAttribute("aria-selected", String(other === index));
      tab.tabIndex = other === index ? 0 : -1;
      panels[other].hidden = other !== index;
    });
    return tabs[index];
  };
  find("agents-tabs").replaceChildren(...tabs);
  find("agents-panels").replaceChildren(...panels);
  choose(chosen);
  show(find("agents-box"), true);
  show(find("agents-empty"), false);
}
