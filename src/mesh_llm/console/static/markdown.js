// Markdown to elements, never to HTML: what a model writes can be shown in no other way than as text.
//
// Blocks: headings, paragraphs, lists in lists, quotes, fenced code, tables, rules. Within: code, strong,
// emphasis, strike, links to http, https and mailto. A picture is shown as a link, as the page loads nothing
// from elsewhere.

import { copyButton } from "./copy.js";
import { h } from "./dom.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 12;

// -- blocks ------------------------------------------------------------------------------------------

/** The source cut into blocks, none of which depends on another. */
export function blocks(source) {
  const lines = source.replace(/\r\n?/g, "\n").split("\n");
  const found = [];
  let index = 0;
  while (index < lines.length) {
    if (!lines[index].trim()) {
      index++;
      continue;
    }
    const end = blockEnd(lines, index);
    found.push(lines.slice(index, end).join("\n"));
    index = end;
  }
  return found;
}

function blockEnd(lines, start) {
  const line = lines[start];
  const fence = FENCE.exec(line);
  if (fence) return fenceEnd(lines, start, fence[2]);
  if (HEADING.test(line) || RULE.test(line)) return start + 1;
  if (ITEM.test(line)) return listEnd(lines, start);
  let end = start + 1;
  const isQuote = QUOTE.test(line);
  while (end < lines.length && lines[end].trim()) {
    const next = lines[end];
    if (isQuote ? !QUOTE.test(next) && begins(next) : begins(next)) break;
    end++;
  }
  return end;
}

const begins = (line) =>
  FENCE.test(line) ||
  HEADING.test(line) ||
  RULE.test(line) ||
  QUOTE.test(line) ||
  /^ {0,3}([-*+]|1[.)])\s+\S/.test(line);

function fenceEnd(lines, start, mark) {
  for (let end = start + 1; end < lines.length; end++) {
    const closing = lines[end].trim();
    if (closing.startsWith(mark) && closing === closing[0].repeat(closing.length)) return end + 1;
  }
  return lines.length;
}

function listEnd(lines, start) {
  const isOrdered = /\d/.test(ITEM.exec(lines[start])[2]);
  const outer = ITEM.exec(lines[start])[1].length;
  let end = start + 1;
  while (end < lines.length) {
    const line = lines[end];
    if (!line.trim()) {
      const next = lines.slice(end + 1).find((other) => other.trim());
      const item = next === undefined ? null : ITEM.exec(next);
      const goesOn =
        item && item[1].length <= outer ? /\d/.test(item[2]) === isOrdered : /^\s{2,}/.test(next ?? "");
      if (!goesOn) return end;
    } else if (!/^\s/.test(line)) {
      const item = ITEM.exec(line);
      if (item ? /\d/.test(item[2]) !== isOrdered : begins(line)) return end;
      if (!item && !lines[end - 1].trim()) return end;
    }
    end++;
  }
  return end;
}

/** The elements of one block. */
export function block(source, depth = 0) {
  const lines = source.split("\n");
  const first = lines[0];
  const fence = FENCE.exec(first);
  if (fence) return code(lines, fence);
  const heading = HEADING.exec(first);
  // The page's own headings end at the third level.
  if (heading) return h(`h${Math.min(6, heading[1].length + 3)}`, {}, ...inline(heading[2]));
  if (RULE.test(first)) return h("hr");
  if (depth < DEEPEST && QUOTE.test(first)) {
    return h("blockquote", {}, ...whole(lines.map((line) => line.replace(QUOTE, "")).join("\n"), depth + 1));
  }
  if (depth < DEEPEST && ITEM.test(first)) return list(lines, depth);
  if (lines.length > 1 && first.includes("|") && TABLE_LINE.test(lines[1])) return table(lines);
  return h("p", {}, ...inline(lines.map((line) => line.trimStart()).join("\n")));
}

const whole = (source, depth) => blocks(source).map((part) => block(part, depth));

function code(lines, fence) {
  const isClosed = lines.length > 1 && lines.at(-1).trim().startsWith(fence[2]);
  const indent = new RegExp(`^ {0,${fence[1].length}}`);
  const text = lines
    .slice(1, isClosed ? -1 : undefined)
    .map((line) => line.replace(indent, ""))
    .join("\n");
  const language = fence[3].trim().split(/\s+/)[0];
  return h(
    "div",
    { class: "code" },
    h(
      "div",
      { class: "code-head" },
      h("span", { text: language || "text" }),
      copyButton(() => text, "this code"),
    ),
    h(
      "pre",
      { tabindex: "0", role: "region", "aria-label": `Code${language ? `, ${language}` : ""}` },
      h("code", { text }),
    ),
  );
}

function list(lines, depth) {
  const [, outer, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= outer.length) {
      items.push({ width: item[0].length, lines: [line.slice(item[0].length)] });
    } else {
      const { width, lines: body } = items.at(-1);
      const indent = line.length - line.trimStart().length;
      body.push(line.slice(Math.min(indent, Math.max(width, 2))));
    }
  }
  const isLoose = items.some((item) => item.lines.slice(0, -1).some((line) => !line.trim()));
  const made = items.map((item) => {
    const parts = whole(item.lines.join("\n"), depth + 1);
    const inner = isLoose
      ? parts
      : parts.flatMap((part) => (part.localName === "p" ? [...part.childNodes] : [part]));
    return h("li", {}, ...inner);
  });
  const number = parseInt(mark, 10);
  return Number.isNaN(number)
    ? h("ul", {}, ...made)
    : h("ol", { start: number === 1 ? null : number }, ...made);
}

function table(lines) {
  const cells = (line) =>
    line
      .trim()
      .replace(/^\||\|$/g, "")
      .split(/(?<!\\)\|/)
      .map((cell) => cell.trim().replaceAll("\\|", "|"));
  const sides = cells(lines[1]).map((mark) =>
    /:$/.test(mark) ? (/^:/.test(mark) ? "centre" : "right") : null,
  );
  const row = (line, tag) =>
    h(
      "tr",
      {},
      ...cells(line).map((cell, index) => h(tag, { class: sides[index] ?? null }, ...inline(cell))),
    );
  return h(
    "div",
    { class: "table-box", tabindex: "0", role: "region", "aria-label": "Table" },
    h(
      "table",
      {},
      h("thead", {}, row(lines[0], "th")),
      h("tbody", {}, ...lines.slice(2).map((line) => row(line, "td"))),
    ),
  );
}

// -- within a line -----------------------------------------------------------------------------------

const INLINE = [
  [/^\\([!-/:-@[-`{-~])/, ([, sign]) => sign],
  [
    /^(`{1,8})(?!`)([\s\S]{0,2000}?[^`])\1(?!`)/,
    ([, , text]) => h("code", { text: text.replace(/^ (.*) $/s, "$1") }),
  ],
  [
    /^!?\[((?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]\(\s*<?([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)/,
    link,
  ],
  [/^<((?:https?:\/\/|mailto:)[^\s<>]+)>/, ([, address]) => anchor(address, [address])],
  [/^https?:\/\/[^\s<>]*[^\s<>.,;:!?'")\]*_]/, ([address]) => anchor(address, [address])],
  [/^\*\*(?=\S)([\s\S]{0,1000}?\S)\*\*(?!\*)/, ([, text], deep) => h("strong", {}, ...inline(text, deep))],
  [/^__(?=\S)([\s\S]{0,1000}?\S)__(?!\w)/, ([, text], deep) => h("strong", {}, ...inline(text, deep)), true],
  [
    /^\*(?=[^\s*])((?:[^*]|\*\*[^*]+\*\*)*?[^\s*])\*(?!\*)/,
    ([, text], deep) => h("em", {}, ...inline(text, deep)),
  ],
  [/^_(?=[^\s_])([^_]*?[^\s_])_(?!\w)/, ([, text], deep) => h("em", {}, ...inline(text, deep)), true],
  [/^~~(?=\S)([\s\S]{0,1000}?\S)~~/, ([, text], deep) => h("del", {}, ...inline(text, deep))],
  [/^(?: {2,}|\\)?\n/, () => h("br")],
];
const SPECIAL = /[\\`![<*_~\n]| {2,}\n|https?:\/\//g;
/** Beyond it a paragraph is no prose, and nobody waits for its signs to be paired; nor for far ones (above). */
const LONGEST = 20_000;

export function inline(text, depth = 0) {
  if (depth > DEEPEST || text.length > LONGEST) return [text];
  const made = [];
  let plain = "";
  let index = 0;
  const flush = () => {
    if (plain) made.push(plain);
    plain = "";
  };
  while (index < text.length) {
    SPECIAL.lastIndex = index;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(index, next);
    index = next;
    if (index >= text.length) break;
    const rest = text.slice(index);
    const isInWord = index > 0 && /\w/.test(text[index - 1]);
    const hit = INLINE.map(([pattern, make, notInWord]) => {
      if (notInWord && isInWord) return null;
      const match = pattern.exec(rest);
      return match && { match, make };
    }).find(Boolean);
    if (!hit) {
      // A run that pairs with nothing is tried once, not once for each of its signs.
      const run = /^(`+|\*+|_+|~+)?/.exec(rest)[0] || text[index];
      plain += run;
      index += run.length;
      continue;
    }
    const part = hit.make(hit.match, depth + 1);
    if (typeof part === "string") {
      plain += part;
    } else {
      flush();
      made.push(part);
    }
    index += hit.match[0].length;
  }
  flush();
  return made;
}

function link([all, label, address], depth) {
  const inner = inline(label || address, depth);
  return /^(https?:\/\/|mailto:)/i.test(address)
    ? anchor(address, inner)
    : h("span", { title: all }, ...inner);
}

const anchor = (href, inner) =>
  h(
    "a",
    { href, target: "_blank", rel: "noopener noreferrer nofollow", referrerpolicy: "no-referrer" },
    ...inner,
  );

// -- a text that grows -------------------------------------------------------------------------------

/** Shows `source` in `element`; blocks that are the same as before stay as they are, selections included. */
export function render(element, source) {
  const wanted = blocks(source);
  const shown = (element.blocks ??= []);
  let same = 0;
  while (same < shown.length && shown[same] === wanted[same]) same++;
  while (element.children.length > same) element.lastElementChild.remove();
  for (const part of wanted.slice(same)) element.append(block(part));
  element.blocks = wanted;
}
