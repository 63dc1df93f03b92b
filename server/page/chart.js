// A line over the last minutes, the newest at the right edge.

export class Chart {
  #canvas;
  #values = [];
  #most;

  /** `most`: the value at the upper edge; without it, the largest one shown. */
  constructor(canvas, { most = null } = {}) {
    this.#canvas = canvas;
    this.#most = most;
    new ResizeObserver(() => this.#draw()).observe(canvas);
  }

  show(values) {
    this.#values = values;
    this.#draw();
  }

  #draw() {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    if (!width) return;
    const scale = window.devicePixelRatio || 1;
    this.#canvas.width = Math.round(width * scale);
    this.#canvas.height = Math.round(height * scale);
    const paint = this.#canvas.getContext("2d");
    paint.scale(scale, scale);
    const shownValues = this.#values.slice(-Math.floor(width / 2));
    const most = this.#most ?? Math.max(...shownValues, 1e-9);
    const style = getComputedStyle(this.#canvas);
    const step = Math.max(2, width / 150);
    const x = (index) => width - (shownValues.length - 1 - index) * step;
    const y = (value) => height - 2 - (height - 6) * Math.min(1, value / most);
    paint.strokeStyle = style.borderBottomColor;
    paint.beginPath();
    paint.moveTo(0, height - 1.5);
    paint.lineTo(width, height - 1.5);
    paint.stroke();
    if (shownValues.length < 2) return;
    paint.beginPath();
    shownValues.forEach((value, index) => paint.lineTo(x(index), y(value)));
    paint.strokeStyle = style.color;
    paint.lineWidth = 1.75;
    paint.lineJoin = "round";
    paint.stroke();
    paint.lineTo(width, height - 2);
    paint.lineTo(x(0), height - 2);
    paint.globalAlpha = 0.12;
    paint.fillStyle = style.color;
    paint.fill();
  }
}
