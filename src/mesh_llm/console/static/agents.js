// What to type or paste so that other programs use this mesh: real port, real model name.

import { find, h, show } from "./dom.js";
import { snippet } from "./copy.js";
import { on } from "./feed.js";
import { needsKey } from "./session.js";

const json = (value) => JSON.stringify(value, null, 2);
/** A shell takes it as one word, whatever stands in it. */
const word = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** [name, steps], each step [what it is, text]. */
function agents({ url, model, key, context }) {
  const id = word(model);
  const piModel = {
    id: model,
    name: `${model} (mesh)`,
    reasoning: false,
    input: ["text"],
    contextWindow: context,
    maxTokens: Math.min(context, 32768),
    compat: { supportsUsageInStreaming: true, maxTokensField: "max_tokens", supportsDeveloperRole: false },
  };
  const pi = { mesh: { baseUrl: `${url}/v1`, api: "openai-completions", apiKey: key, models: [piModel] } };
  const opencode = {
    $schema: "https://opencode.ai/config.json",
    provider: {
      mesh: {
        npm: "@ai-sdk/openai-compatible",
        name: "mesh-llm",
        options: { baseURL: `${url}/v1`, apiKey: key },
        models: { [model]: { name: model } },
      },
    },
  };
  const question = { model, messages: [{ role: "user", content: "Hello!" }] };
  const authorise = key === "mesh" ? "" : ` \\\n  -H "Authorization: Bearer ${key}"`;
  return [
    [
      "pi",
      [
        ["Run", `pi --provider mesh --model ${id}`],
        [
          'Once, in ~/.pi/agent/models.json under "providers" (or: mesh-llm agent pi --write)',
          json(pi)
            .split("\n")
            .slice(1, -1)
            .map((line) => line.slice(2))
            .join("\n"),
        ],
      ],
    ],
    [
      "goose",
      [
        [
          "Run",
          `GOOSE_PROVIDER=openai OPENAI_HOST=${url} OPENAI_API_KEY=${key} GOOSE_MODEL=${id} goose session`,
        ],
      ],
    ],
    [
      "aider",
      [
        [
          "Run",
          `aider --openai-api-base ${url}/v1 --openai-api-key ${key} --model ${word(`openai/${model}`)}`,
        ],
      ],
    ],
    [
      "OpenCode",
      [
        ["Run", `opencode --model ${word(`mesh/${model}`)}`],
        ["Once, as opencode.json in the project", json(opencode)],
      ],
    ],
    [
      "Claude Code",
      [
        [
          "Run",
          `ANTHROPIC_BASE_URL=${url} ANTHROPIC_AUTH_TOKEN=${key} ANTHROPIC_MODEL=${id} ANTHROPIC_SMALL_FAST_MODEL=${id} claude`,
        ],
      ],
    ],
    [
      "curl",
      [
        [
          "Run",
          `curl ${url}/v1/chat/completions \\\n  -H "Content-Type: application/json"${authorise} \\\n  -d ${word(JSON.stringify(question))}`,
        ],
      ],
    ],
    [
      "Python",
      [
        [
          "With the openai package",
          [
            "from openai import OpenAI",
            "",
            `client = OpenAI(base_url=${JSON.stringify(`${url}/v1`)}, api_key=${JSON.stringify(key)})`,
            "answer = client.chat.completions.create(",
            `    model=${JSON.stringify(model)},`,
            '    messages=[{"role": "user", "content": "Hello!"}],',
            ")",
            "print(answer.choices[0].message.content)",
          ].join("\n"),
        ],
      ],
    ],
  ];
}

let drawnFor = "";
let chosen = 0;

export function start() {
  on(["status"], ({ status }) => {
    if (!status) return;
    const url = (status.api?.url ?? "").replace("//127.0.0.1:", "//localhost:");
    const about = {
      url,
      model: status.model?.name ?? "",
      key: needsKey() ? "YOUR_API_KEY" : "mesh",
      context: status.model?.context ?? 8192,
    };
    const isKnown = Boolean(url && about.model);
    show(find("agents-box"), isKnown);
    show(find("agents-empty"), !isKnown);
    const drawn = JSON.stringify(about);
    if (!isKnown || drawn === drawnFor) return;
    drawnFor = drawn;
    draw(agents(about));
  });
}

function draw(list) {
  const panels = list.map(([name, steps], index) =>
    h(
      "div",
      {
        role: "tabpanel",
        id: `agent-panel-${index}`,
        "aria-labelledby": `agent-tab-${index}`,
        hidden: index !== chosen,
      },
      ...steps.flatMap(([what, text]) => [
        h("p", { class: "step", text: what }),
        snippet(text, `${what} for ${name}`),
      ]),
    ),
  );
  const tabs = list.map(([name], index) =>
    h("button", {
      role: "tab",
      type: "button",
      id: `agent-tab-${index}`,
      "aria-controls": `agent-panel-${index}`,
      text: name,
      onclick: () => choose(index),
      onkeydown: (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (step) choose((index + step + list.length) % list.length).focus();
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
}
