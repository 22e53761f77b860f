"use strict";
// Lines over tokens or time, drawn by uPlot. A chart is rebuilt when its lines or its axis change; otherwise it only
// gets new data.
{
  /** Points along the shared axis: finer than a screen resolves. */
  const CELLS = 600;
  /** Maximum number of marks; more merge into a thick line. */
  const MOST_MARKS = 48;
  const NEAR_PX = 30;
  const FONT = "11px system-ui, sans-serif";
  /** Lines are cut off at this multiple of most peers' values. Guess: the loss curves of real runs would settle it. */
  const MOST_TIMES = 2;

  /** @typedef {{name: string, ink: string, dash?: number[], width: number, alpha?: number, marks?: boolean,
   *             points: number[][], y: number, of?: string}} Line ``y``: column of its points; ``of``: the
   * peer that reported it */

  /** Maps lines with separate points to one axis of cells, as uPlot needs it. */
  function aligned(lines, x) {
    let [low, high] = [Infinity, -Infinity];
    for (const line of lines) {
      for (const point of line.points) {
        low = Math.min(low, point[x]);
        high = Math.max(high, point[x]);
      }
    }
    if (low > high) return [[], ...lines.map(() => [])];
    const step = (high - low) / (CELLS - 1) || 1;
    const axis = Array.from({ length: high > low ? CELLS : 1 }, (_, index) => low + index * step);
    const columns = lines.map((line) => {
      const cells = new Array(axis.length).fill(null);
      for (const point of line.points) cells[Math.round((point[x] - low) / step)] = point[line.y];
      return cells;
    });
    return [axis, ...columns];
  }

  const known = (cells) => cells.reduce((total, value) => total + (value === null ? 0 : 1), 0);

  /**
   * Limits of the scale, so that a few false reports do not flatten all lines: the upper quartile of the peers' maxima
   * (the lower of two), times ``MOST_TIMES``; the lower limit likewise, with more than four peers, so that a single
   * honest peer's better loss stays visible. Lines without a reporting peer are trusted.
   */
  function bounds(lines) {
    const [highest, lowest] = [new Map(), new Map()];
    for (const line of lines) {
      if (line.of === undefined) return [-Infinity, Infinity];
      for (const point of line.points) {
        highest.set(line.of, Math.max(highest.get(line.of) ?? -Infinity, point[line.y]));
        lowest.set(line.of, Math.min(lowest.get(line.of) ?? Infinity, point[line.y]));
      }
    }
    const quartile = (3 * (highest.size - 1)) / 4;
    const [up, down] = [[...highest.values()].sort((a, b) => a - b), [...lowest.values()].sort((a, b) => b - a)];
    return [down[Math.ceil(quartile)] / MOST_TIMES, up[Math.floor(quartile)] * MOST_TIMES];
  }

  function series(line) {
    const stroke = () => ui.ink(line.ink);
    const show = (plot, index) => Boolean(line.marks) && known(plot.data[index]) <= MOST_MARKS;
    return {
      label: line.name,
      stroke,
      width: line.width,
      dash: line.dash?.length ? line.dash : undefined,
      alpha: line.alpha ?? 1,
      spanGaps: true,
      points: { show, size: 5, width: 1, fill: stroke, stroke },
    };
  }

  /** Tooltip beside the pointer: the line and its value. */
  function hint(values) {
    const box = ui.el("div", "hint");
    let focused = null;
    const place = (plot) => {
      const index = focused === null ? null : plot.cursor.idxs[focused];
      const value = index === null || index === undefined ? null : plot.data[focused][index];
      box.hidden = !ui.isNumber(value);
      if (box.hidden) return;
      const where = values.x(plot.data[0][index]);
      ui.set(box, `${plot.series[focused].label}: ${values.y(value)} at ${where}`);
      const left = Math.min(plot.cursor.left + 12, plot.over.clientWidth - box.offsetWidth - 4);
      box.style.transform = `translate(${Math.max(0, left)}px, ${Math.max(0, plot.cursor.top - 30)}px)`;
    };
    return {
      hooks: {
        init: (plot) => {
          box.hidden = true;
          plot.over.append(box);
        },
        setSeries: (plot, index, options) => {
          if (options.focus !== undefined) focused = index;
          place(plot);
        },
        setCursor: place,
      },
    };
  }

  class Chart {
    /** @type {uPlot | null} */
    #plot = null;
    #made = "";
    #zoomed = false;
    #bounds = [-Infinity, Infinity];

    /**
     * @param {HTMLElement} box the container, whose height CSS sets
     * @param {{y: (value: number) => string, fromZero: boolean}} style
     */
    constructor(box, style) {
      this.box = box;
      this.style = style;
      new ResizeObserver(() => this.#plot?.setSize(this.#size())).observe(box);
      addEventListener("themechange", () => this.#plot?.redraw(false));
    }

    /**
     * @param {Line[]} lines
     * @param {{column: number, kind: "tokens" | "clock" | "elapsed"}} x the column of the points, and its meaning
     */
    show(lines, x) {
      const drawn = lines.filter((line) => line.points.length);
      this.box.classList.toggle("empty", !drawn.length);
      const wanted = JSON.stringify([x.kind, drawn.map((line) => [line.name, line.ink, line.dash, line.width])]);
      const data = aligned(drawn, x.column);
      this.#bounds = bounds(drawn);
      if (wanted !== this.#made || !this.#plot) {
        this.#made = wanted;
        this.#zoomed = false;
        this.#plot?.destroy();
        this.#plot = drawn.length ? new uPlot(this.#options(drawn, x), data, this.box) : null;
        if (this.#plot) this.#watchZoom(this.#plot);
      } else {
        this.#plot.setData(data, !this.#zoomed);
        if (this.#zoomed) this.#plot.redraw();
      }
    }

    /** Keeps the zoom (set by dragging) until a double click. */
    #watchZoom(plot) {
      plot.hooks.setSelect = [() => (this.#zoomed = plot.select.width > 0)];
      plot.over.addEventListener("dblclick", () => (this.#zoomed = false));
    }

    #size() {
      return { width: Math.max(this.box.clientWidth, 120), height: Math.max(this.box.clientHeight, 100) };
    }

    #options(lines, x) {
      const grid = { stroke: () => ui.ink("--line"), width: 1 };
      const axis = { stroke: () => ui.ink("--muted"), font: FONT, grid, ticks: { show: false } };
      const tell = x.kind === "clock" ? clock : x.kind === "tokens" ? tokens : ui.duration;
      const values = (format) => (_, splits) => splits.map(format);
      return {
        ...this.#size(),
        legend: { show: false },
        padding: [10, 10, 0, 0],
        cursor: {
          drag: { x: true, y: false },
          focus: { prox: NEAR_PX },
          hover: { skip: [undefined, null], prox: NEAR_PX },
          points: { size: 7 },
        },
        focus: { alpha: 0.25 },
        scales: { x: { time: x.kind === "clock" }, y: { range: (_, low, high) => this.#range(low, high) } },
        axes: [
          { ...axis, size: 28, space: 70, values: x.kind === "clock" ? clockTicks : values(shortly(x.kind)) },
          { ...axis, size: 58, values: values(this.style.y) },
        ],
        series: [{}, ...lines.map(series)],
        plugins: [hint({ x: tell, y: this.style.y })],
      };
    }

    #range(low, high) {
      if (!ui.isNumber(low) || !ui.isNumber(high)) return [0, 1];
      const [least, most] = this.#bounds;
      return room(Math.min(Math.max(low, least), most), Math.max(Math.min(high, most), least), this.style.fromZero);
    }
  }

  /** Adds a margin; a scale is never empty. */
  function room(low, high, fromZero) {
    const air = (high - low || Math.abs(high) || 1) * 0.06;
    return [fromZero ? 0 : low - air, high + air];
  }

  const tokens = (value) => `${ui.scaled(Math.round(value))} tokens`;
  const shortly = (kind) => (value) => (kind === "tokens" ? ui.scaled(value) : ui.duration(value));

  const DAY_S = 86400;
  const DAY = new Intl.DateTimeFormat("en", { day: "numeric", month: "short" });
  const MINUTE = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
  const SECOND = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  const clock = (seconds) => SECOND.format(seconds * 1000);

  /** The time of day, or the date where a new day begins. */
  function clockTicks(_, splits, axis, space, step) {
    const days = splits.map((seconds) => DAY.format(seconds * 1000));
    return splits.map((seconds, index) => {
      const newDay = index > 0 && days[index] !== days[index - 1];
      if (step >= DAY_S || newDay) return days[index];
      return (step < 60 ? SECOND : MINUTE).format(seconds * 1000);
    });
  }

  Object.assign(ui, { Chart });
}
