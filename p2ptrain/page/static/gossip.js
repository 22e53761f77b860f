"use strict";
// Live picture of the gossip: peers on rings, a fading edge for each exchange, a cross for each failure.
//
// Events are queued and drawn in one animation frame; there are no frames while nothing moves. The number of live edges
// is limited, so a thousand exchanges per second cost no more than a hundred.
{
  const LIFE_MS = 1800;
  /** With reduced motion, an edge is static and stays long enough to be read. */
  const STILL_LIFE_MS = 4000;
  const MOST_EDGES = 120;
  const MOST_STILL_EDGES = 24;
  /** Maximum number of labels; more overlap. */
  const MOST_LABELS = 4;
  /** Maximum number of peers with visible names; with more, names show under the pointer. */
  const MOST_NAMES = 24;
  /** Peers on the outer ring before a second one begins. */
  const ONE_RING = 48;
  const RINGS = [1, 0.76, 0.52];
  /** Largest ratio of width to height of the rings. */
  const WIDEST = 1.8;
  const SETTLE_MS = 220;
  const NAME_MARGIN = 64;
  const NAMELESS_MARGIN = 14;
  const FONT = "11px system-ui, sans-serif";
  const FINGER_PX = 16;
  /** The height of a label. */
  const PLATE = 18;
  const TURN = 2 * Math.PI;

  /** @typedef {{id: string, row: object, x: number, y: number, toX: number, toY: number, angle: number}} Node */
  /** @typedef {{a: string, b: string, label: string, failed: boolean, relayed: boolean, born: number}} Edge */

  const still = matchMedia("(prefers-reduced-motion: reduce)");

  /** Places on rings, in units of the radius, in proportion to each ring's length. */
  function places(total) {
    const rings = total <= ONE_RING ? [1] : total <= 2 * ONE_RING ? RINGS.slice(0, 2) : RINGS;
    const length = rings.reduce((a, b) => a + b);
    const found = [];
    rings.forEach((radius, ring) => {
      const here = ring === rings.length - 1 ? total - found.length : Math.round((total * radius) / length);
      for (let index = 0; index < here; index += 1) {
        const angle = ((index + ring / 2) / here) * TURN - TURN / 4;
        found.push({ angle, x: radius * Math.cos(angle), y: radius * Math.sin(angle) });
      }
    });
    return found;
  }

  class Gossip {
    /** @type {Map<string, Node>} */
    #nodes = new Map();
    /** @type {Edge[]} */
    #edges = [];
    /** @type {Edge[]} */
    #waiting = [];
    #me = "";
    #lit = 0;
    #frame = 0;
    #before = 0;
    #width = 0;
    #height = 0;
    /** @type {{x: number, y: number} | null} */
    #pointer = null;
    /** @type {number[][]} left, top and width of the labels already drawn */
    #plates = [];

    /** @param {HTMLCanvasElement} canvas */
    constructor(canvas) {
      this.canvas = canvas;
      this.pen = canvas.getContext("2d");
      new ResizeObserver(() => this.#resize()).observe(canvas);
      addEventListener("themechange", () => this.#wake());
      canvas.addEventListener("pointermove", (event) => this.#point({ x: event.offsetX, y: event.offsetY }));
      canvas.addEventListener("pointerleave", () => this.#point(null));
      this.#tell();
    }

    /** Sets the peers. Positions follow the order of ids, so that a change moves the others least. */
    place(rows, me) {
      this.#me = me;
      const sorted = [...rows].sort((a, b) => (a.id < b.id ? -1 : 1));
      const nodes = new Map();
      places(sorted.length).forEach((place, index) => {
        const row = sorted[index];
        const known = this.#nodes.get(row.id);
        const { x, y } = known ?? place;
        nodes.set(row.id, { id: row.id, row, x, y, toX: place.x, toY: place.y, angle: place.angle });
      });
      this.#nodes = nodes;
      this.#wake();
    }

    exchange(event) {
      // A simulation may not know the size.
      const label = [event.bytes && ui.bytes(event.bytes), event.seconds && ui.duration(event.seconds)];
      this.#add({
        a: event.a,
        b: event.b,
        label: label.filter(Boolean).join(" · "),
        failed: false,
        relayed: event.path === "relayed",
        born: 0,
      });
    }

    failure(event) {
      this.#add({ a: event.peer, b: event.peer, label: "failed", failed: true, relayed: false, born: 0 });
    }

    #add(edge) {
      this.#waiting.push(edge);
      if (this.#waiting.length > MOST_EDGES) this.#waiting.shift();
      this.#wake();
    }

    #wake() {
      if (!this.#frame) this.#frame = requestAnimationFrame((now) => this.#step(now));
    }

    #point(where) {
      this.#pointer = where;
      this.#wake();
    }

    #resize() {
      const { clientWidth, clientHeight } = this.canvas;
      const ratio = Math.min(devicePixelRatio || 1, 2);
      this.canvas.width = Math.round(clientWidth * ratio);
      this.canvas.height = Math.round(clientHeight * ratio);
      this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      this.#width = clientWidth;
      this.#height = clientHeight;
      this.#wake();
    }

    /** Describes the picture in data attributes, for tests. (The list below it serves people.) */
    #tell() {
      Object.assign(this.canvas.dataset, { lit: this.#lit, live: this.#edges.length, peers: this.#nodes.size });
    }

    #step(now) {
      this.#frame = 0;
      const most = still.matches ? MOST_STILL_EDGES : MOST_EDGES;
      const life = still.matches ? STILL_LIFE_MS : LIFE_MS;
      this.#lit += this.#waiting.length;
      this.#edges.push(...this.#waiting.map((edge) => ({ ...edge, born: now })));
      this.#waiting = [];
      this.#edges = this.#edges.filter((edge) => now - edge.born < life).slice(-most);
      const moves = this.#settle(now);
      this.#draw(now, life);
      this.#tell();
      if (moves || this.#edges.length) this.#wake();
    }

    /** Moves nodes towards their places; returns whether any still moves. */
    #settle(now) {
      const share = still.matches ? 1 : 1 - Math.exp(-Math.min(now - this.#before, 50) / SETTLE_MS);
      this.#before = now;
      let moves = false;
      for (const node of this.#nodes.values()) {
        const [dx, dy] = [node.toX - node.x, node.toY - node.y];
        const near = Math.abs(dx) + Math.abs(dy) < 0.002;
        node.x = near ? node.toX : node.x + dx * share;
        node.y = near ? node.toY : node.y + dy * share;
        moves ||= !near && share < 1;
      }
      return moves;
    }

    /** Position of a node in pixels; the centre for peers beyond the limit. */
    #where(id) {
      const node = this.#nodes.get(id);
      const margin = this.#nodes.size <= MOST_NAMES ? NAME_MARGIN : NAMELESS_MARGIN;
      const up = this.#height / 2 - Math.min(margin, 26);
      const across = Math.min(this.#width / 2 - margin - 8, up * WIDEST);
      return { x: this.#width / 2 + (node?.x ?? 0) * across, y: this.#height / 2 + (node?.y ?? 0) * up };
    }

    #draw(now, life) {
      const { pen } = this;
      pen.clearRect(0, 0, this.#width, this.#height);
      pen.font = FONT;
      pen.textBaseline = "middle";
      for (const edge of this.#edges) this.#drawEdge(edge, (now - edge.born) / life);
      for (const node of this.#nodes.values()) this.#drawNode(node);
      const young = this.#edges.filter((edge) => edge.label && now - edge.born < life * 0.8);
      this.#plates = [];
      for (const edge of young.slice(-MOST_LABELS).reverse()) this.#drawLabel(edge, 1 - (now - edge.born) / life);
      this.#drawPointed();
      pen.globalAlpha = 1;
    }

    /** Control point of an edge, bent towards the centre so that neighbours' edges stay visible. */
    #bend(from, to) {
      const [midX, midY] = [(from.x + to.x) / 2, (from.y + to.y) / 2];
      return { x: midX + (this.#width / 2 - midX) * 0.45, y: midY + (this.#height / 2 - midY) * 0.45 };
    }

    #drawEdge(edge, age) {
      const { pen } = this;
      const [from, to] = [this.#where(edge.a), this.#where(edge.b)];
      const glow = still.matches ? 0.6 : (1 - age) ** 1.5;
      pen.globalAlpha = glow;
      if (edge.failed) {
        this.#drawCross(from, 9 + (still.matches ? 0 : 6 * age));
        return;
      }
      const bend = this.#bend(from, to);
      const blend = pen.createLinearGradient(from.x, from.y, to.x, to.y);
      blend.addColorStop(0, ui.ink(ui.look(edge.a).ink));
      blend.addColorStop(1, ui.ink(ui.look(edge.b).ink));
      pen.strokeStyle = blend;
      pen.lineWidth = 1 + 1.5 * glow;
      pen.setLineDash(edge.relayed ? [4, 4] : []);
      pen.beginPath();
      pen.moveTo(from.x, from.y);
      pen.quadraticCurveTo(bend.x, bend.y, to.x, to.y);
      pen.stroke();
      pen.setLineDash([]);
      if (!still.matches) this.#drawPulses(from, bend, to, age, blend);
    }

    /** Two dots in opposite directions: weights go both ways. */
    #drawPulses(from, bend, to, age, fill) {
      const way = Math.min(age / 0.6, 1);
      if (way === 1) return;
      this.pen.fillStyle = fill;
      for (const t of [way, 1 - way]) {
        const [p, q, r] = [(1 - t) ** 2, 2 * t * (1 - t), t ** 2];
        this.#disc(p * from.x + q * bend.x + r * to.x, p * from.y + q * bend.y + r * to.y, 2.6);
      }
    }

    #drawCross({ x, y }, size) {
      const { pen } = this;
      pen.strokeStyle = ui.ink("--bad");
      pen.lineWidth = 2;
      pen.beginPath();
      pen.arc(x, y, size, 0, TURN);
      pen.moveTo(x - 4, y - 4);
      pen.lineTo(x + 4, y + 4);
      pen.moveTo(x + 4, y - 4);
      pen.lineTo(x - 4, y + 4);
      pen.stroke();
    }

    #disc(x, y, radius) {
      this.pen.beginPath();
      this.pen.arc(x, y, radius, 0, TURN);
      this.pen.fill();
    }

    /** A disc; a square if reached through a relay; hollow if gone; ringed if it is this peer. */
    #drawNode(node) {
      const { pen } = this;
      const { x, y } = this.#where(node.id);
      const size = this.#nodes.size <= MOST_NAMES ? 5.5 : this.#nodes.size <= ONE_RING ? 4.5 : 3.2;
      const gone = node.row.state === "gone";
      pen.globalAlpha = gone ? 0.8 : 1;
      pen.fillStyle = pen.strokeStyle = ui.ink(ui.look(node.id).ink);
      pen.lineWidth = 1.5;
      pen.beginPath();
      if (node.row.path === "relayed") pen.rect(x - size + 0.5, y - size + 0.5, 2 * size - 1, 2 * size - 1);
      else pen.arc(x, y, size, 0, TURN);
      if (gone) pen.stroke();
      else pen.fill();
      if (node.id === this.#me) {
        pen.beginPath();
        pen.arc(x, y, size + 3.5, 0, TURN);
        pen.stroke();
      }
      if (this.#nodes.size <= MOST_NAMES) this.#drawName(node, x, y);
    }

    #drawName(node, x, y) {
      const { pen } = this;
      const [cos, sin] = [Math.cos(node.angle), Math.sin(node.angle)];
      pen.fillStyle = ui.ink("--muted");
      pen.textAlign = Math.abs(cos) < 0.3 ? "center" : cos > 0 ? "left" : "right";
      const room = Math.abs(cos) < 0.3 ? 2 * NAME_MARGIN : NAME_MARGIN - 4;
      pen.fillText(this.#fitted(ui.nameOf(node.row), room), x + 11 * cos, y + 15 * sin);
    }

    /** The name, shortened to fit. */
    #fitted(name, room) {
      const letters = [...name];
      let shown = name;
      while (letters.length > 1 && this.pen.measureText(shown).width > room) {
        letters.pop();
        shown = `${letters.join("")}…`;
      }
      return shown;
    }

    #drawLabel(edge, glow) {
      const [from, to] = [this.#where(edge.a), this.#where(edge.b)];
      const bend = this.#bend(from, to);
      const x = edge.failed ? from.x : (from.x + 2 * bend.x + to.x) / 4;
      const y = edge.failed ? from.y - 18 : (from.y + 2 * bend.y + to.y) / 4;
      this.#plate(edge.label, x, y, edge.failed ? "--bad" : "--ink", Math.min(1, glow * 2));
    }

    /** Draws a label within the picture unless it would cover another one. */
    #plate(text, x, y, name, alpha) {
      const { pen } = this;
      const width = pen.measureText(text).width + 12;
      const left = Math.max(2, Math.min(x - width / 2, this.#width - width - 2));
      const top = Math.max(2, Math.min(y - 9, this.#height - PLATE - 2));
      const covers = ([l, t, w]) => left < l + w && l < left + width && Math.abs(t - top) < PLATE;
      if (this.#plates.some(covers)) return;
      this.#plates.push([left, top, width]);
      pen.globalAlpha = alpha;
      pen.fillStyle = ui.ink("--card");
      pen.strokeStyle = ui.ink("--line");
      pen.lineWidth = 1;
      pen.beginPath();
      pen.roundRect(left, top, width, PLATE, 5);
      pen.fill();
      pen.stroke();
      pen.fillStyle = ui.ink(name);
      pen.textAlign = "left";
      pen.fillText(text, left + 6, top + 9.5);
    }

    #drawPointed() {
      if (!this.#pointer) return;
      const { x, y } = this.#pointer;
      let [best, least] = [null, FINGER_PX];
      for (const node of this.#nodes.values()) {
        const where = this.#where(node.id);
        const far = Math.hypot(where.x - x, where.y - y);
        if (far < least) [best, least] = [node, far];
      }
      if (!best) return;
      const text = `${ui.nameOf(best.row)} · ${ui.short(best.id)} · ${ui.line(best.row.state) || ui.NONE}`;
      const where = this.#where(best.id);
      this.#plates = [];
      this.#plate(text, where.x, where.y - 20, "--ink", 1);
    }
  }

  Object.assign(ui, { Gossip });
}
