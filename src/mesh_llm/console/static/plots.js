// The last minutes: four small plots on one time axis, with one read-out for all of them.

import { attribute, find, h, say, svg } from "./dom.js";
import { on } from "./feed.js";
import { Axis } from "./scale.js";
import { ago, duration, figure, percent } from "./words.js";

const WINDOW_S = 300;
const EVERY_S = 60;
/** Further apart, two points have nothing between them. */
const GAP_SAMPLES = 3;
const MARGIN = { left: 44, right: 12, top: 10, bottom: 22 };
const HEIGHT = 148;

const number = (value) => (typeof value === "number" ? value : null);
const tokens = (value) => `${figure(value)} tok/s`;

const PLOTS = [
  {
    id: "throughput",
    title: "Throughput",
    unit: "tok/s",
    least: 5,
    form: "area",
    series: [{ name: "generated", value: (sample) => number(sample.tok_s), text: tokens }],
  },
  {
    id: "first-token",
    title: "Time to first token",
    unit: "ms",
    least: 100,
    form: "dots",
    series: [{ name: "first token", value: (sample) => number(sample.first_token_ms) || null, text: duration }],
  },
  {
    id: "acceptance",
    title: "Draft acceptance",
    unit: "%",
    least: 100,
    most: 100,
    form: "line",
    empty: "Nothing drafted yet",
    series: [
      {
        name: "accepted",
        value: (sample) => (sample.drafted > 0 ? (100 * sample.accepted) / sample.drafted : null),
        text: (value) => percent(value / 100),
      },
    ],
  },
  {
    id: "queue",
    title: "Requests",
    unit: "",
    least: 2,
    form: "steps",
    series: [
      { name: "active", value: (sample) => number(sample.active), text: String },
      { name: "queued", value: (sample) => number(sample.queued), text: String },
    ],
  },
];

export function start() {
  const plots = PLOTS.map((spec) => new Plot(spec));
  find("plots").append(...plots.map((plot) => plot.element));
  const cursor = { behind: null };
  const redraw = (state) => plots.forEach((plot) => plot.draw(state, cursor));
  let latest = null;
  on(["samples"], (state) => redraw((latest = state)));
  const move = (behind) => {
    cursor.behind = behind;
    if (latest) redraw(latest);
  };
  plots.forEach((plot) => plot.onmove(move));
  new ResizeObserver(() => latest && redraw(latest)).observe(find("plots"));
}

class Plot {
  constructor(spec) {
    this.spec = spec;
    this.axis = new Axis({ least: spec.least, most: spec.most });
    this.grid = svg("g", { class: "grid" });
    this.lines = spec.series.map((_, index) => svg("path", { class: `series series-${index}` }));
    this.area = svg("path", { class: "area" });
    this.dots = svg("path", { class: "dots" });
    this.rule = svg("line", { class: "rule" });
    this.marks = spec.series.map((_, index) => svg("circle", { class: `mark series-${index}`, r: 3.5 }));
    this.picture = svg("svg", { height: HEIGHT, "aria-hidden": "true" });
    this.picture.append(this.grid, this.area, ...this.lines, this.dots, this.rule, ...this.marks);
    this.value = h("span", { class: "plot-value" });
    this.empty = h("p", { class: "plot-empty quiet", text: spec.empty ?? "Nothing yet" });
    this.handle = h(
      "div",
      {
        class: "plot-picture",
        role: "slider",
        tabindex: "0",
        "aria-label": spec.title,
        "aria-valuemin": "0",
      },
      this.picture,
      this.empty,
    );
    const title = h(
      "h3",
      { text: spec.title },
      spec.unit ? h("span", { class: "unit", text: ` ${spec.unit}` }) : null,
    );
    this.element = h(
      "div",
      { class: "plot", id: `plot-${spec.id}` },
      h("div", { class: "plot-head" }, title, this.value),
      this.handle,
    );
  }

  /** `listener(how many samples behind the latest, or null)` as the pointer or the keys say. */
  onmove(listener) {
    const at = (event) => {
      const box = this.handle.getBoundingClientRect();
      const share = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
      const off = this.ages.map((age) => Math.abs(age - (1 - share) * WINDOW_S));
      listener(off.length - 1 - off.lastIndexOf(Math.min(...off)));
    };
    this.handle.addEventListener("pointermove", at);
    this.handle.addEventListener("pointerdown", at);
    this.handle.addEventListener("pointerleave", () => listener(null));
    this.handle.addEventListener("blur", () => listener(null));
    this.handle.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: 1, ArrowRight: -1, ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15 }[
        event.key
      ];
      const jump = { Home: this.ages.length - 1, End: 0 }[event.key];
      if (event.key === "Escape") return listener(null);
      if (steps === undefined && jump === undefined) return;
      event.preventDefault();
      const next = jump ?? (this.behind ?? 0) + steps;
      listener(Math.min(this.ages.length - 1, Math.max(0, next)));
    });
  }

  draw(state, cursor) {
    const newest = state.samples.at(-1)?.t;
    // Also none from before a clock was put back.
    const samples = state.samples.filter(({ t }) => newest >= t && newest - t <= WINDOW_S);
    const width = this.handle.clientWidth || 320;
    const inner = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
    this.ages = samples.map(({ t }) => newest - t);
    this.gap_s = GAP_SAMPLES * state.interval_s;
    this.behind = cursor.behind === null ? null : Math.min(cursor.behind, samples.length - 1);
    const rows = this.spec.series.map(({ value }) => samples.map(value));
    this.axis.fit(Math.max(0, ...rows.flat().filter((value) => value !== null)));
    const x = (index) => MARGIN.left + inner.width * (1 - this.ages[index] / WINDOW_S);
    const y = (value) => MARGIN.top + inner.height * (1 - Math.min(1, value / this.axis.top));
    attribute(this.picture, "width", width);
    attribute(this.picture, "viewBox", `0 0 ${width} ${HEIGHT}`);
    this.#drawGrid(width, inner);
    this.#drawSeries(rows, x, y, MARGIN.top + inner.height);
    this.#drawCursor(samples, rows, x, y, inner);
    const isEmpty = rows.flat().every((value) => value === null);
    this.empty.hidden = !isEmpty;
    // Axes without anything on them say that nothing took no time.
    this.picture.classList.toggle("blank", isEmpty);
  }

  #drawGrid(width, inner) {
    const key = `${width} ${this.axis.at}`;
    if (this.gridKey === key) return;
    this.gridKey = key;
    const bottom = MARGIN.top + inner.height;
    const lines = this.axis.at.map((tick) => {
      const y = Math.round(bottom - (inner.height * tick) / this.axis.top) + 0.5;
      return [
        svg("line", {
          x1: MARGIN.left,
          x2: width - MARGIN.right,
          y1: y,
          y2: y,
          class: tick === 0 ? "base" : "",
        }),
        text(MARGIN.left - 8, y + 4, figure(tick).replace(/\.0$/, ""), "end"),
      ];
    });
    const times = [];
    const sparse = inner.width < 240 ? 2 * EVERY_S : EVERY_S;
    for (let behind = 0; behind <= WINDOW_S; behind += sparse) {
      const x = MARGIN.left + inner.width * (1 - behind / WINDOW_S);
      const label = behind === 0 ? "now" : `−${behind / 60}${behind === sparse ? " min" : ""}`;
      times.push(svg("line", { x1: x, x2: x, y1: bottom, y2: bottom + 4 }));
      times.push(text(x, bottom + 17, label, behind === 0 ? "end" : "middle"));
    }
    this.grid.replaceChildren(...lines.flat(), ...times);
  }

  #drawSeries(rows, x, y, bottom) {
    const { form } = this.spec;
    rows.forEach((values, index) => {
      const runs = unbroken(values, this.ages, this.gap_s);
      const path = form === "dots" ? "" : runs.map((run) => trace(run, x, y, form === "steps")).join("");
      attribute(this.lines[index], "d", path);
      if (form === "area") attribute(this.area, "d", runs.map((run) => under(run, x, y, bottom)).join(""));
      if (form === "dots") {
        attribute(
          this.dots,
          "d",
          runs
            .flat()
            .map(([at, value]) => dot(x(at), y(value)))
            .join(""),
        );
      }
    });
  }

  #drawCursor(samples, rows, x, y, inner) {
    const { series } = this.spec;
    const isOn = this.behind !== null && samples.length > 0;
    const index = samples.length - 1 - (this.behind ?? 0);
    const read = rows.map((values) => (samples.length ? values[index] : null));
    this.rule.classList.toggle("on", isOn);
    if (isOn) {
      for (const end of ["x1", "x2"]) attribute(this.rule, end, x(index).toFixed(1));
      attribute(this.rule, "y1", MARGIN.top);
      attribute(this.rule, "y2", MARGIN.top + inner.height);
    }
    this.marks.forEach((mark, row) => {
      const value = read[row];
      const isSeen = value !== null && (isOn || this.spec.form !== "dots");
      mark.classList.toggle("on", isSeen);
      if (!isSeen) return;
      attribute(mark, "cx", x(index).toFixed(1));
      attribute(mark, "cy", y(value).toFixed(1));
    });
    const words = this.#words(rows, read);
    const when = isOn ? ago(this.ages[index]) : "";
    say(this.value, [words, when === "now" ? "" : when].filter(Boolean).join(" · "));
    attribute(this.handle, "aria-valuemax", Math.max(0, samples.length - 1));
    attribute(this.handle, "aria-valuenow", Math.max(0, index));
    attribute(
      this.handle,
      "aria-valuetext",
      isOn ? `${words || "nothing"}, ${when}` : this.#summary(rows, series),
    );
  }

  /** What stands beside the title: the value at the cursor, or the latest one that there is. */
  #words(rows, read) {
    const { series } = this.spec;
    const known = read.map((value, row) => {
      if (value !== null || this.behind !== null) return value;
      return rows[row].findLast((other) => other !== null) ?? null;
    });
    return series
      .map(({ name, text }, row) => {
        if (known[row] === null) return "";
        return series.length > 1 ? `${text(known[row])} ${name}` : text(known[row]);
      })
      .filter(Boolean)
      .join(", ");
  }

  #summary(rows, series) {
    const parts = series.map(({ name, text }, row) => {
      const values = rows[row].filter((value) => value !== null);
      if (!values.length) return `${name}: nothing yet`;
      return `${name}: ${text(values.at(-1))}, highest ${text(Math.max(...values))} in the last five minutes`;
    });
    return parts.join("; ");
  }
}

const text = (x, y, words, anchor) => {
  const element = svg("text", { x, y, "text-anchor": anchor });
  element.textContent = words;
  return element;
};

/** Runs of [index, value] between gaps. */
function unbroken(values, ages, gap_s) {
  const runs = [];
  let run = null;
  values.forEach((value, index) => {
    if (value === null || ages[index - 1] - ages[index] > gap_s) run = null;
    if (value === null) return;
    if (run) run.push([index, value]);
    else runs.push((run = [[index, value]]));
  });
  return runs;
}

const point = (x, y) => `${x.toFixed(1)} ${y.toFixed(1)}`;

function trace(run, x, y, isStepped) {
  return run
    .map(([index, value], nth) => {
      if (nth === 0) return `M${point(x(index), y(value))}${run.length === 1 ? "h0.1" : ""}`;
      return isStepped ? `H${x(index).toFixed(1)}V${y(value).toFixed(1)}` : `L${point(x(index), y(value))}`;
    })
    .join("");
}

const under = (run, x, y, bottom) =>
  `M${point(x(run[0][0]), bottom)}${run.map(([index, value]) => `L${point(x(index), y(value))}`).join("")}` +
  `L${point(x(run.at(-1)[0]), bottom)}Z`;

const dot = (x, y) => `M${point(x - 2.5, y)}a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0 -5 0`;
