// Numbers as people read them.

export function bytes(count) {
  if (!count) return "0 GB";
  if (count >= 99.95e9) return `${Math.round(count / 1e9)} GB`;
  if (count >= 1e9) return `${(count / 1e9).toFixed(1)} GB`;
  if (count >= 1e6) return `${Math.round(count / 1e6)} MB`;
  return `${Math.max(1, Math.round(count / 1e3))} kB`;
}

/** Three figures, no more: 0.42, 7.3, 128. */
export function figure(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 100 || size === 0) return String(Math.round(value));
  if (size >= 10) return value.toFixed(1);
  return value.toFixed(size >= 1 ? 1 : 2);
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  return ms >= 1000 ? `${figure(ms / 1000)} s` : `${figure(ms)} ms`;
}

export function ago(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 2) return "now";
  if (whole < 60) return `${whole} s ago`;
  const minutes = Math.floor(whole / 60);
  return whole % 60 && minutes < 10 ? `${minutes} min ${whole % 60} s ago` : `${minutes} min ago`;
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}\u202f%`;

/** For style sheets: exact. */
export const length = (share) => `${(100 * share).toFixed(3)}%`;

export const grouped = (count) => String(count).replace(/\B(?=(\d{3})+$)/g, "\u202f");

export const several = (count, one, many = `${one}s`) => `${grouped(count)} ${count === 1 ? one : many}`;

const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

export const clock = (unix_s) => CLOCK.format(new Date(1000 * unix_s));
export const day = (unix_s) => DAY.format(new Date(1000 * unix_s));

/** The last layer is part of the stage: people count 0–9, programs [0, 10). */
export const layers = (stage) =>
  stage.last - stage.first === 1 ? `layer ${stage.first}` : `layers ${stage.first}–${stage.last - 1}`;
