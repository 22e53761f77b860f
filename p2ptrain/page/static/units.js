"use strict";
// What the other scripts share: numbers and names as people read them, colours, and a few lines of DOM. No state but
// who has which colour.

globalThis.ui = {};
{
  /** Stands for whatever is not known. */
  const NONE = "–";
  const STEPS = ["", "k", "M", "G", "T", "P", "E"];
  const GAP = "\u00a0";
  const COLOURS = 8;
  /** As many as can be told apart on a thin line; with the colours, 32 looks. */
  const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3]];

  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

  /** Three significant digits, as far as a figure below 1,000 has them. */
  function three(size) {
    return size.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
  }

  /** 359600, "B" -> "360 kB". Whole numbers below 1,000 stay whole. */
  function scaled(value, unit = "") {
    if (!isNumber(value)) return NONE;
    let size = Math.abs(value);
    let step = 0;
    while (size >= 999.5 && step < STEPS.length - 1) {
      size /= 1000;
      step += 1;
    }
    const digits = step === 0 && Number.isInteger(size) ? String(size) : three(size);
    const tail = STEPS[step] + unit;
    return (value < 0 ? "−" : "") + digits + (tail && GAP + tail);
  }

  const bytes = (value) => scaled(value, "B");
  const rate = (value) => scaled(value, "B/s");
  const loss = (value) => (isNumber(value) ? value.toFixed(3) : NONE);

  /** Counts are exact while they are short. */
  function count(value) {
    if (!isNumber(value)) return NONE;
    return Math.abs(value) < 1e6 ? Math.round(value).toLocaleString("en") : scaled(value);
  }

  function percent(share) {
    if (!isNumber(share)) return NONE;
    const value = share * 100;
    const size = Math.abs(value);
    return `${value === 0 ? "0" : value.toFixed(size >= 9.95 ? 0 : size >= 0.995 ? 1 : 2)}${GAP}%`;
  }

  function duration(seconds) {
    if (!isNumber(seconds)) return NONE;
    const size = Math.max(0, seconds);
    if (size < 0.0995) return `${(size * 1000).toFixed(size > 0 && size < 0.00995 ? 1 : 0)}${GAP}ms`;
    if (size < 0.9995) return `${(size * 1000).toFixed(0)}${GAP}ms`;
    if (size < 9.95) return `${size.toFixed(1)}${GAP}s`;
    if (size < 99.5) return `${Math.round(size)}${GAP}s`;
    if (size < 5400) return `${Math.round(size / 60)}${GAP}min`;
    if (size < 36 * 3600) return `${(size / 3600).toFixed(size < 36000 ? 1 : 0)}${GAP}h`;
    return `${(size / 86400).toFixed(1)}${GAP}d`;
  }

  /** Coarser than a duration: it changes while one reads. */
  function ago(seconds) {
    if (!isNumber(seconds)) return NONE;
    if (seconds < 1.5) return "just now";
    return `${seconds < 89.5 ? `${Math.round(seconds)}${GAP}s` : duration(Math.max(seconds, 100))} ago`;
  }

  /** One line without what cannot be seen or turns its surroundings around: it may be a stranger's. */
  function line(text) {
    const seen = String(text ?? "").replace(/\p{Zl}|\p{Zp}|\p{Cc}/gu, " ").replace(/\p{C}|\p{DI}/gu, "");
    return seen.replace(/\s+/g, " ").trim();
  }

  /** As ``line``, for text of several lines. */
  const prose = (text) => String(text ?? "").replace(/[^\P{C}\n\t]/gu, "");

  /** The end of an id tells peers apart; its beginning is the same for all. */
  const short = (id) => line(id).slice(-6);

  /** @param {{id: string, nickname?: string} | undefined} row */
  const nameOf = (row, id = row?.id) => line(row?.nickname) || short(id) || NONE;

  /** @type {Map<string, {ink: string, dash: number[]}>} whoever was here last stands last */
  const looks = new Map();
  /** Peers whose looks are kept; then whoever has been away longest loses its. More than a document has rows. */
  const MOST_LOOKS = 1024;

  /** By an id's hash (FNV-1a): a dash, and the first colour from there on that is not taken, if there is one. */
  function dealt(id, taken) {
    let hash = 0x811c9dc5;
    for (const each of String(id)) hash = Math.imul(hash ^ each.codePointAt(0), 0x01000193) >>> 0;
    hash = (hash ^ (hash >>> 15)) >>> 0;
    let colour = hash % COLOURS;
    for (let step = 0; step < COLOURS && taken.has(`--peer-${colour}`); step += 1) colour = (colour + 1) % COLOURS;
    return { ink: `--peer-${colour}`, dash: DASHES[(hash >>> 8) % DASHES.length] };
  }

  /** Those who are here now keep their looks, or get one each. */
  function dress(ids) {
    for (const id of ids) {
      const known = looks.get(id) ?? dealt(id, new Set([...looks.values()].map((each) => each.ink)));
      looks.delete(id);
      looks.set(id, known);
    }
    for (const id of looks.keys()) {
      if (looks.size <= MOST_LOOKS) break;
      looks.delete(id);
    }
  }

  const NOTHING = new Set();

  /** A peer's colour and dash. Of whom no row is known, nothing is kept. No id: everybody's average. */
  function look(id) {
    if (!id) return { ink: "--ink", dash: DASHES[0] };
    return looks.get(id) ?? dealt(id, NOTHING);
  }

  /** @type {Map<string, string>} */
  const inks = new Map();
  addEventListener("themechange", () => inks.clear());

  /** A custom property's colour as a canvas takes it, for the theme in force. */
  function ink(name) {
    if (!inks.has(name)) {
      const probe = document.getElementById("probe");
      probe.style.color = `var(${name})`;
      inks.set(name, getComputedStyle(probe).color);
    }
    return inks.get(name);
  }

  const at = (id) => document.getElementById(id);

  /** An element with text or other elements in it: text is never read as markup. */
  function el(tag, className = "", ...inside) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...inside);
    return made;
  }

  /** A stranger's text, which cannot turn its surroundings around. */
  const isolated = (text, className = "") => el("bdi", className, text);

  /** Sets a text where it differs: an untouched node keeps selections, and costs no layout. */
  function set(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  /** As many children as rows: kept ones are refilled, which costs less than new ones and keeps selections. */
  function fill(parent, items, make, refill) {
    while (parent.children.length > items.length) parent.lastElementChild.remove();
    while (parent.children.length < items.length) parent.append(make());
    items.forEach((item, index) => refill(parent.children[index], item));
  }

  /** Of a tally: a swarm has five states. */
  const MOST_WORDS = 5;

  const SVG = "http://www.w3.org/2000/svg";

  /** A piece of a peer's line, as in the chart. */
  function swatch(id) {
    const { ink: name, dash } = look(id);
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("class", "swatch");
    svg.setAttribute("viewBox", "0 0 22 8");
    svg.setAttribute("aria-hidden", "true");
    const stroke = document.createElementNS(SVG, "path");
    stroke.setAttribute("d", "M1 4H21");
    stroke.setAttribute("stroke-dasharray", dash.join(" "));
    stroke.style.stroke = `var(${name})`;
    svg.append(stroke);
    return svg;
  }

  function median(values) {
    const known = values.filter(isNumber).sort((a, b) => a - b);
    const middle = known.length >> 1;
    if (!known.length) return null;
    return known.length % 2 ? known[middle] : (known[middle - 1] + known[middle]) / 2;
  }

  /** ``7 training, 1 joining``: how often each word is there, the most frequent first. */
  function tally(words) {
    const counts = new Map();
    for (const word of words.map(line).filter(Boolean)) counts.set(word, (counts.get(word) ?? 0) + 1);
    const most = [...counts].sort(([, a], [, b]) => b - a).slice(0, MOST_WORDS);
    return most.map(([word, many]) => `${count(many)} ${word}`).join(", ");
  }

  /** Null where nobody tells. */
  function sum(values) {
    const known = values.filter(isNumber);
    return known.length ? known.reduce((a, b) => a + b) : null;
  }

  Object.assign(ui, { NONE, isNumber, scaled, bytes, rate, loss, count, percent, duration, ago, line, prose, short });
  Object.assign(ui, { nameOf, dress, look, ink, at, el, isolated, set, fill, swatch, median, sum, tally });
}
