// Draws the load of experts: a row is a layer, a column an expert, the colour its tokens over the layer's mean.
import { el, hideTip, shown, showTip } from "./dom.js";

const STOPS = [0, 1, 2, 4]; // tokens over the mean, at the colours --heat-0 to --heat-3

export class HeatMap {
  #canvas;
  #isSmall;
  #rows = []; // {layer, counts}
  #box = { left: 0, width: 1, height: 1 }; // where the cells are, in CSS pixels
  #at = null; // [row, column] of the cell whose card is shown

  constructor(canvas, { isSmall = false } = {}) {
    this.#canvas = canvas;
    this.#isSmall = isSmall;
    new ResizeObserver(() => this.#draw()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.#show(this.#cellAt(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerleave", () => this.#show(null));
    canvas.addEventListener("blur", () => this.#show(null));
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
  }

  show(rows) {
    this.#rows = rows;
    this.#canvas.setAttribute("aria-label", summary(rows));
    this.#draw();
  }

  #draw() {
    const canvas = this.#canvas;
    const width = canvas.parentElement.clientWidth;
    const rows = this.#rows;
    if (!rows.length || !width || canvas.hidden) return;
    const style = getComputedStyle(canvas);
    const colors = STOPS.map((_, index) => channels(style.getPropertyValue(`--heat-${index}`)));
    const columns = rows[0].counts.length;
    const left = this.#isSmall ? 0 : 30;
    const below = this.#isSmall ? 0 : 20;
    const row = this.#isSmall ? Math.max(2, Math.min(14, 150 / rows.length)) : rowHeight(rows.length);
    const inner = width - parseFloat(getComputedStyle(canvas.parentElement).paddingLeft) * 2 - left;
    const height = row * rows.length;
    const scale = window.devicePixelRatio || 1;
    this.#box = { left, width: inner, height };
    canvas.style.width = `${inner + left}px`;
    canvas.style.height = `${height + below}px`;
    canvas.width = Math.round((inner + left) * scale);
    canvas.height = Math.round((height + below) * scale);
    const paint = canvas.getContext("2d");
    paint.scale(scale, scale);
    const cell = inner / columns;
    const gap = cell > 7 && row > 7 ? 2 : cell > 3.5 && row > 3.5 ? 1 : 0;
    rows.forEach(({ counts }, y) => {
      const mean = meanOf(counts);
      counts.forEach((count, x) => {
        paint.fillStyle = mix(colors, mean ? count / mean : 0);
        paint.beginPath();
        paint.roundRect(left + x * cell, y * row, cell - gap, row - gap, gap);
        paint.fill();
      });
    });
    if (!this.#isSmall) this.#label(paint, { style, left, row, cell, columns, height });
    if (this.#at) this.#outline(paint, { style, left, row, cell });
  }

  #label(paint, { style, left, row, cell, columns, height }) {
    paint.fillStyle = style.color;
    paint.font = `11px ${style.fontFamily}`;
    paint.textBaseline = "middle";
    const everyRow = Math.ceil(14 / row);
    this.#rows.forEach(({ layer }, y) => {
      if (y % everyRow === 0) paint.fillText(String(layer), 0, y * row + row / 2);
    });
    const step = [1, 2, 4, 8, 16, 32, 64, 128].find((each) => each * cell >= 26) ?? 256;
    for (let x = 0; x < columns; x += step) paint.fillText(String(x), left + x * cell, height + 12);
  }

  #outline(paint, { style, left, row, cell }) {
    const [y, x] = this.#at;
    paint.strokeStyle = style.color;
    paint.lineWidth = 1.5;
    paint.strokeRect(left + x * cell - 0.5, y * row - 0.5, Math.max(cell, 3), Math.max(row, 3));
  }

  #cellAt(x, y) {
    const { left, width, height } = this.#box;
    const columns = this.#rows[0]?.counts.length ?? 0;
    if (!columns || x < left || x >= left + width || y < 0 || y >= height) return null;
    return [Math.floor((y / height) * this.#rows.length), Math.floor(((x - left) / width) * columns)];
  }

  #onKey(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move || !this.#rows.length) return;
    event.preventDefault();
    const [y, x] = this.#at ? [this.#at[0] + move[0], this.#at[1] + move[1]] : [0, 0];
    const within = (value, count) => Math.min(Math.max(value, 0), count - 1);
    this.#show([within(y, this.#rows.length), within(x, this.#rows[0].counts.length)]);
  }

  #show(at) {
    this.#at = at;
    this.#draw();
    if (!at) return hideTip();
    const [y, x] = at;
    const { layer, counts } = this.#rows[y];
    const mean = meanOf(counts);
    const total = mean * counts.length;
    const box = this.#canvas.getBoundingClientRect();
    const px = box.left + this.#box.left + ((x + 0.5) / counts.length) * this.#box.width;
    const py = box.top + (y / this.#rows.length) * this.#box.height;
    const share = total ? `${((100 * counts[x]) / total).toFixed(1)} % of the layer's tokens` : "no tokens";
    const ratio = mean ? `${(counts[x] / mean).toFixed(2)} × the mean` : "";
    const head = el("div", { class: "tip-head" }, el("strong", {}, `Layer ${layer}, expert ${x}`));
    showTip(px, py, head, el("div", {}, share), el("div", {}, ratio));
  }
}

export const meanOf = (counts) => counts.reduce((sum, count) => sum + count, 0) / counts.length;

export function ratioOf(counts) {
  const mean = meanOf(counts);
  return mean ? Math.max(...counts) / mean : 1;
}

/** In pixels: few layers get tall rows. */
function rowHeight(count) {
  if (count > 32) return 9;
  return count > 14 ? 14 : 30;
}

function summary(rows) {
  if (!rows.length) return "No tokens by expert";
  const worst = rows.reduce((most, row) => (ratioOf(row.counts) > ratioOf(most.counts) ? row : most));
  const size = `Tokens of ${rows[0].counts.length} experts in ${rows.length} layers`;
  return `${size}; the busiest expert, in layer ${worst.layer}, has ${shown(ratioOf(worst.counts))} times the mean`;
}

function channels(color) {
  return color.match(/[\d.]+/g).slice(0, 3).map(Number);
}

function mix(colors, ratio) {
  let index = 0;
  while (index < STOPS.length - 2 && ratio > STOPS[index + 1]) index += 1;
  const part = Math.min(1, (ratio - STOPS[index]) / (STOPS[index + 1] - STOPS[index]));
  const [r, g, b] = colors[index].map((value, channel) => Math.round(value + (colors[index + 1][channel] - value) * part));
  return `rgb(${r} ${g} ${b})`;
}
