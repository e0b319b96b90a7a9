// QR codes: byte mode, error correction level L, any of the forty versions (ISO/IEC 18004).

import { svg } from "./dom.js";

// Per version: check bytes of each block, and the number of blocks.
const CHECKS = [
  7, 10, 15, 20, 26, 18, 20, 24, 30, 18, 20, 24, 26, 30, 22, 24, 28, 30, 28, 28, 28, 28, 30, 30, 26, 28, 30,
  30, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30,
];
const BLOCKS = [
  1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4, 4, 6, 6, 6, 6, 7, 8, 8, 9, 9, 10, 12, 12, 12, 13, 14, 15, 16, 17, 18,
  19, 19, 20, 21, 22, 24, 25,
];
const QUIET = 4;

// -- the field of 256 elements -----------------------------------------------------------------------

const EXP = new Uint8Array(512);
const LOG = new Uint8Array(256);
for (let power = 0, value = 1; power < 255; power++) {
  EXP[power] = EXP[power + 255] = value;
  LOG[value] = power;
  value = (value << 1) ^ (value & 128 ? 0x11d : 0);
}

const times = (a, b) => (a && b ? EXP[LOG[a] + LOG[b]] : 0);

/** The generator polynomial without its leading one. */
function generator(degree) {
  let made = [1];
  for (let power = 0; power < degree; power++) {
    const next = [...made, 0];
    made.forEach((factor, index) => (next[index + 1] ^= times(factor, EXP[power])));
    made = next;
  }
  return made.slice(1);
}

function remainder(data, divisor) {
  const rest = new Uint8Array(divisor.length);
  for (const byte of data) {
    const factor = byte ^ rest[0];
    rest.copyWithin(0, 1);
    rest[rest.length - 1] = 0;
    divisor.forEach((value, index) => (rest[index] ^= times(value, factor)));
  }
  return rest;
}

// -- how much goes where -----------------------------------------------------------------------------

const sizeOf = (version) => 17 + 4 * version;

function alignments(version) {
  if (version === 1) return [];
  const count = Math.floor(version / 7) + 2;
  const step = version === 32 ? 26 : Math.ceil((4 * version + 4) / (2 * count - 2)) * 2;
  const places = [6];
  for (let at = sizeOf(version) - 7; places.length < count; at -= step) places.splice(1, 0, at);
  return places;
}

/** Modules that carry data, before the last incomplete byte is taken off. */
function dataModules(version) {
  let count = (16 * version + 128) * version + 64;
  if (version >= 2) {
    const lines = Math.floor(version / 7) + 2;
    count -= (25 * lines - 10) * lines - 55;
    if (version >= 7) count -= 36;
  }
  return count;
}

const totalBytes = (version) => dataModules(version) >> 3;
const capacity = (version) => totalBytes(version) - CHECKS[version - 1] * BLOCKS[version - 1];
const countBits = (version) => (version < 10 ? 8 : 16);

function versionFor(length) {
  for (let version = 1; version <= 40; version++) {
    if (4 + countBits(version) + 8 * length <= 8 * capacity(version)) return version;
  }
  throw new RangeError("too long for a QR code");
}

// -- the bytes ---------------------------------------------------------------------------------------

function payload(bytes, version) {
  const bits = [];
  const put = (value, count) => {
    for (let bit = count - 1; bit >= 0; bit--) bits.push((value >> bit) & 1);
  };
  put(0b0100, 4);
  put(bytes.length, countBits(version));
  for (const byte of bytes) put(byte, 8);
  const room = 8 * capacity(version);
  put(0, Math.min(4, room - bits.length));
  put(0, (8 - (bits.length % 8)) % 8);
  const data = [];
  for (let at = 0; at < bits.length; at += 8) data.push(parseInt(bits.slice(at, at + 8).join(""), 2));
  for (let pad = 0xec; data.length < capacity(version); pad ^= 0xec ^ 0x11) data.push(pad);
  return data;
}

/** In blocks, each with its check bytes, and then one byte of each block in turn. */
function interleaved(data, version) {
  const count = BLOCKS[version - 1];
  const checks = CHECKS[version - 1];
  const short = Math.floor(totalBytes(version) / count) - checks;
  const shortBlocks = count - (totalBytes(version) % count);
  const divisor = generator(checks);
  const blocks = [];
  for (let index = 0, at = 0; index < count; index++) {
    const part = data.slice(at, (at += short + (index < shortBlocks ? 0 : 1)));
    blocks.push({ part, check: remainder(part, divisor) });
  }
  const made = [];
  for (let at = 0; at <= short; at++)
    for (const { part } of blocks) if (at < part.length) made.push(part[at]);
  for (let at = 0; at < checks; at++) for (const { check } of blocks) made.push(check[at]);
  return made;
}

// -- the picture -------------------------------------------------------------------------------------

const MASKS = [
  (x, y) => (x + y) % 2,
  (x, y) => y % 2,
  (x) => x % 3,
  (x, y) => (x + y) % 3,
  (x, y) => (Math.floor(x / 3) + Math.floor(y / 2)) % 2,
  (x, y) => ((x * y) % 2) + ((x * y) % 3),
  (x, y) => (((x * y) % 2) + ((x * y) % 3)) % 2,
  (x, y) => (((x + y) % 2) + ((x * y) % 3)) % 2,
];

class Grid {
  constructor(version) {
    this.version = version;
    this.size = sizeOf(version);
    this.dark = Array.from({ length: this.size }, () => new Uint8Array(this.size));
    this.fixed = Array.from({ length: this.size }, () => new Uint8Array(this.size));
  }

  set(x, y, isDark) {
    if (x < 0 || y < 0 || x >= this.size || y >= this.size) return;
    this.dark[y][x] = isDark ? 1 : 0;
    this.fixed[y][x] = 1;
  }

  square(x, y, reach, isDark) {
    for (let dy = -reach; dy <= reach; dy++) {
      for (let dx = -reach; dx <= reach; dx++)
        this.set(x + dx, y + dy, isDark(Math.max(Math.abs(dx), Math.abs(dy))));
    }
  }

  drawPatterns() {
    const { size, version } = this;
    for (let at = 0; at < size; at++) {
      this.set(6, at, at % 2 === 0);
      this.set(at, 6, at % 2 === 0);
    }
    for (const [x, y] of [
      [3, 3],
      [size - 4, 3],
      [3, size - 4],
    ])
      this.square(x, y, 4, (ring) => ring !== 2 && ring !== 4);
    const places = alignments(version);
    const last = places.at(-1);
    for (const x of places) {
      for (const y of places) {
        const isCorner = (x === 6 && y === 6) || (x === 6 && y === last) || (x === last && y === 6);
        if (!isCorner) this.square(x, y, 2, (ring) => ring !== 1);
      }
    }
    this.drawFormat(0);
    if (version >= 7) this.#drawVersion();
  }

  /** Level L and the mask, with ten check bits, twice. */
  drawFormat(mask) {
    const { size } = this;
    const data = (0b01 << 3) | mask;
    let rest = data;
    for (let bit = 0; bit < 10; bit++) rest = (rest << 1) ^ ((rest >> 9) * 0x537);
    const bits = ((data << 10) | rest) ^ 0x5412;
    const bit = (index) => (bits >> index) & 1;
    for (let index = 0; index < 15; index++) {
      const near = index < 6 ? index : index < 8 ? index + 1 : 0;
      if (index < 8) this.set(8, near, bit(index));
      else this.set(index === 8 ? 7 : 14 - index, 8, bit(index));
      if (index < 8) this.set(size - 1 - index, 8, bit(index));
      else this.set(8, size - 15 + index, bit(index));
    }
    this.set(8, size - 8, 1);
  }

  #drawVersion() {
    let rest = this.version;
    for (let bit = 0; bit < 12; bit++) rest = (rest << 1) ^ ((rest >> 11) * 0x1f25);
    const bits = (this.version << 12) | rest;
    for (let index = 0; index < 18; index++) {
      const far = this.size - 11 + (index % 3);
      const near = Math.floor(index / 3);
      this.set(far, near, (bits >> index) & 1);
      this.set(near, far, (bits >> index) & 1);
    }
  }

  /** Two columns at a time, from the right, up and down in turn. */
  drawData(bytes) {
    let at = 0;
    for (let right = this.size - 1; right >= 1; right -= 2) {
      if (right === 6) right = 5;
      const isUpward = ((right + 1) & 2) === 0;
      for (let step = 0; step < this.size; step++) {
        const y = isUpward ? this.size - 1 - step : step;
        for (const x of [right, right - 1]) {
          if (this.fixed[y][x]) continue;
          this.dark[y][x] = at < 8 * bytes.length ? (bytes[at >> 3] >> (7 - (at & 7))) & 1 : 0;
          at++;
        }
      }
    }
  }

  flip(mask) {
    const rule = MASKS[mask];
    for (let y = 0; y < this.size; y++) {
      for (let x = 0; x < this.size; x++) if (!this.fixed[y][x] && rule(x, y) === 0) this.dark[y][x] ^= 1;
    }
  }

  /** What makes a picture hard to read: long runs, squares, false finders, too much of one colour. */
  penalty() {
    const { size, dark } = this;
    const columns = Array.from({ length: size }, (_, x) => Uint8Array.from(dark, (row) => row[x]));
    let sum = 0;
    for (const line of [...dark, ...columns]) {
      const text = line.join("");
      for (const run of text.match(/0{5,}|1{5,}/g) ?? []) sum += run.length - 2;
      sum += 40 * (text.match(/(?=00001011101|10111010000)/g) ?? []).length;
    }
    let count = 0;
    for (let y = 0; y < size; y++) {
      for (let x = 0; x < size; x++) {
        count += dark[y][x];
        if (
          x &&
          y &&
          dark[y][x] === dark[y - 1][x] &&
          dark[y][x] === dark[y][x - 1] &&
          dark[y][x] === dark[y - 1][x - 1]
        ) {
          sum += 3;
        }
      }
    }
    return sum + 10 * Math.floor(Math.abs((20 * count) / (size * size) - 10));
  }
}

/** Rows of 0 and 1, without the quiet zone. */
export function encode(text) {
  const bytes = new TextEncoder().encode(text);
  const version = versionFor(bytes.length);
  const grid = new Grid(version);
  grid.drawPatterns();
  grid.drawData(interleaved(payload(bytes, version), version));
  const tried = MASKS.map((_, mask) => {
    grid.flip(mask);
    grid.drawFormat(mask);
    const penalty = grid.penalty();
    grid.flip(mask);
    return penalty;
  });
  const best = tried.indexOf(Math.min(...tried));
  grid.flip(best);
  grid.drawFormat(best);
  return grid.dark;
}

/** A picture of one path; its colours are its own, as scanners want dark on light. */
export function picture(text, label) {
  const rows = encode(text);
  const side = rows.length + 2 * QUIET;
  let path = "";
  rows.forEach((row, y) => {
    for (let x = 0; x < row.length; x++) {
      if (!row[x]) continue;
      let end = x;
      while (row[end]) end++;
      path += `M${x + QUIET} ${y + QUIET}h${end - x}v1h${x - end}z`;
      x = end;
    }
  });
  return svg(
    "svg",
    {
      class: "qr",
      viewBox: `0 0 ${side} ${side}`,
      role: "img",
      "aria-label": label,
      "shape-rendering": "crispEdges",
    },
    svg("rect", { width: side, height: side, fill: "#fff" }),
    svg("path", { d: path, fill: "#000" }),
  );
}
