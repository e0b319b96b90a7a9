// Pictures for models that take them: chosen or pasted, made smaller here, sent with the next question.

import { find, h, show } from "./dom.js";
import { get } from "./session.js";

const MOST = 4;
/** The longest side, in pixels: what vision models look at, and no more. */
const LONGEST = 1536;

let chosen = [];
let modelKnown = null;
let isTaken = false;

async function shrunk(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  const canvas = h("canvas", {
    width: Math.round(bitmap.width * scale),
    height: Math.round(bitmap.height * scale),
  });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL(file.type === "image/png" ? "image/png" : "image/jpeg", 0.9);
}

async function add(files) {
  for (const file of files) {
    if (!isTaken || chosen.length >= MOST || !file.type.startsWith("image/")) continue;
    const url = await shrunk(file).catch(() => null);
    if (url) chosen.push(url);
  }
  draw();
}

function draw() {
  const remove = (index) => () => {
    chosen.splice(index, 1);
    draw();
  };
  find("chat-images").replaceChildren(
    ...chosen.map((src, index) =>
      h(
        "li",
        {},
        h("img", { src, alt: `Picture ${index + 1}` }),
        h("button", {
          type: "button",
          class: "copy",
          text: "Remove",
          "aria-label": `Remove picture ${index + 1}`,
          onclick: remove(index),
        }),
      ),
    ),
  );
}

export const pictures = {
  start() {
    find("chat-file").addEventListener("change", (event) => {
      add([...event.target.files]);
      event.target.value = "";
    });
    find("chat-text").addEventListener("paste", (event) => add([...event.clipboardData.files]));
  },

  /** Whether the model takes pictures; asked once per model. */
  async look(model) {
    if (modelKnown === model) return;
    modelKnown = model;
    const list = await get("/v1/models").catch(() => null);
    if (!list) modelKnown = null;
    const modalities = list?.data?.[0]?.architecture?.input_modalities ?? [];
    isTaken = modalities.includes("image");
    show(find("chat-picture"), isTaken);
  },

  take() {
    const taken = chosen;
    chosen = [];
    draw();
    return taken;
  },
};
