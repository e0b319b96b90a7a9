// Axes that people can read: 1, 2 or 5 times a power of ten.

/** The top of an axis that holds `highest`, and where its ticks stand. */
export function ticks(highest, wanted) {
  const rough = (highest || 1) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((nice) => nice * power).find((nice) => nice >= rough * 0.999);
  const count = Math.max(1, Math.ceil(highest / step - 1e-9));
  const at = Array.from({ length: count + 1 }, (_, index) => Number((index * step).toPrecision(6)));
  return { top: at.at(-1), at };
}

/** An axis that grows at once and shrinks only when most of it is empty: it does not breathe with the noise. */
export class Axis {
  constructor({ least, wanted = 3, most = Infinity }) {
    Object.assign(this, { least, wanted, most, top: 0, at: [] });
  }

  fit(highest) {
    const needed = Math.min(this.most, Math.max(this.least, highest));
    if (this.top && needed <= this.top && needed > 0.35 * this.top) return;
    Object.assign(this, ticks(needed, this.wanted));
  }
}
