// Elements without HTML strings: text is always text, whoever wrote it.

const SVG = "http://www.w3.org/2000/svg";

/** An element: `class`, `text`, `on…` listeners and properties that exist are set as such, the rest as attributes. */
export function h(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const find = (id) => document.getElementById(id);

/** Sets the text, and touches nothing when it is the same already: a selection in it stays. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function attribute(element, name, value) {
  const text = String(value);
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

export const show = (element, is) => {
  if (element.hidden === Boolean(is)) element.hidden = !is;
};

const LEAVE_MS = 600;
export const calm = matchMedia("(prefers-reduced-motion: reduce)");

/**
 * The children of `parent` follow `items`: kept by key, in order, entering and leaving as the style sheet says
 * (`.entering` for the first frame, `.leaving` until gone).
 */
export function keyed(parent, items, { key, make, update }) {
  const known = (parent.keyed ??= new Map());
  const wanted = new Set(items.map(key));
  for (const [id, element] of known) {
    if (wanted.has(id)) continue;
    known.delete(id);
    element.classList.add("leaving");
    element.setAttribute("aria-hidden", "true");
    element.inert = true;
    element.leave?.();
    setTimeout(() => element.remove(), calm.matches ? 0 : LEAVE_MS);
  }
  let place = parent.firstElementChild;
  for (const item of items) {
    let element = known.get(key(item));
    const isNew = !element;
    if (isNew) {
      element = make(item);
      known.set(key(item), element);
    }
    while (place?.classList.contains("leaving")) place = place.nextElementSibling;
    if (place === element) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
    if (isNew && parent.dataset.settled && !calm.matches) {
      element.classList.add("entering");
      // Two frames: the first one paints it where it enters from.
      requestAnimationFrame(() => requestAnimationFrame(() => element.classList.remove("entering")));
    }
    update(element, item);
  }
  parent.dataset.settled = "yes";
}

let announcing = 0;

/** For screen readers: only what a person would look up for. */
export function announce(text) {
  const announcer = find("announcer");
  // The same words once more are news only after they were gone.
  announcer.textContent = "";
  clearTimeout(announcing);
  announcing = setTimeout(() => (announcer.textContent = text), 100);
}
