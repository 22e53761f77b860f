"use strict";
// Shared by the other scripts: formatting of numbers and names, colours, and DOM helpers. The only state is the
// assignment of colours.

globalThis.ui = {};
{
  /** Placeholder for unknown values. */
  const NONE = "–";
  const STEPS = ["", "k", "M", "G", "T", "P", "E"];
  const GAP = "\u00a0";
  const COLOURS = 8;
  /** Dash patterns that can be told apart on a thin line; with the colours, 32 looks. */
  const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3]];

  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

  /** Formats a value below 1,000 with three significant digits. */
  function three(size) {
    return size.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
  }

  /** Formats with a unit prefix: 359600, "B" -> "360 kB". Integers below 1,000 stay integers. */
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

  /** Formats a count: exact below a million. */
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

  /** Formats a time in the past, coarser than a duration because it changes while it is read. */
  function ago(seconds) {
    if (!isNumber(seconds)) return NONE;
    if (seconds < 1.5) return "just now";
    return `${seconds < 89.5 ? `${Math.round(seconds)}${GAP}s` : duration(Math.max(seconds, 100))} ago`;
  }

  /** One line without invisible characters and direction controls: it may come from a stranger. */
  function line(text) {
    const seen = String(text ?? "").replace(/\p{Zl}|\p{Zp}|\p{Cc}/gu, " ").replace(/\p{C}|\p{DI}/gu, "");
    return seen.replace(/\s+/g, " ").trim();
  }

  /** Like ``line``, for text of several lines. */
  const prose = (text) => String(text ?? "").replace(/[^\P{C}\n\t]/gu, "");

  /** The end of an id, because all ids begin alike. */
  const short = (id) => line(id).slice(-6);

  /** @param {{id: string, nickname?: string} | undefined} row */
  const nameOf = (row, id = row?.id) => line(row?.nickname) || short(id) || NONE;

  /** @type {Map<string, {ink: string, dash: number[]}>} most recently seen last */
  const looks = new Map();
  /** Looks that are kept, more than a document has rows; the longest unseen are dropped first. */
  const MOST_LOOKS = 1024;

  /** A dash pattern and the first free colour by the id's hash (FNV-1a). */
  function dealt(id, taken) {
    let hash = 0x811c9dc5;
    for (const each of String(id)) hash = Math.imul(hash ^ each.codePointAt(0), 0x01000193) >>> 0;
    hash = (hash ^ (hash >>> 15)) >>> 0;
    let colour = hash % COLOURS;
    for (let step = 0; step < COLOURS && taken.has(`--peer-${colour}`); step += 1) colour = (colour + 1) % COLOURS;
    return { ink: `--peer-${colour}`, dash: DASHES[(hash >>> 8) % DASHES.length] };
  }

  /** Keeps or assigns the looks of the present peers. */
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

  /** A peer's colour and dash; not stored for unknown peers. Without an id: the average of all. */
  function look(id) {
    if (!id) return { ink: "--ink", dash: DASHES[0] };
    return looks.get(id) ?? dealt(id, NOTHING);
  }

  /** @type {Map<string, string>} */
  const inks = new Map();
  addEventListener("themechange", () => inks.clear());

  /** The current theme's colour of a custom property, as a canvas accepts it. */
  function ink(name) {
    if (!inks.has(name)) {
      const probe = document.getElementById("probe");
      probe.style.color = `var(${name})`;
      inks.set(name, getComputedStyle(probe).color);
    }
    return inks.get(name);
  }

  const at = (id) => document.getElementById(id);

  /** Makes an element with text or other elements; text is never parsed as markup. */
  function el(tag, className = "", ...inside) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...inside);
    return made;
  }

  /** A stranger's text, isolated so that it cannot change the direction of the text around it. */
  const isolated = (text, className = "") => el("bdi", className, text);

  /** Sets a text if it differs: an unchanged node keeps selections and needs no layout. */
  function set(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  /** Makes one child per item; existing ones are reused, which is cheaper and keeps selections. */
  function fill(parent, items, make, refill) {
    while (parent.children.length > items.length) parent.lastElementChild.remove();
    while (parent.children.length < items.length) parent.append(make());
    items.forEach((item, index) => refill(parent.children[index], item));
  }

  /** Maximum words of a tally; a swarm has five states. */
  const MOST_WORDS = 5;

  const SVG = "http://www.w3.org/2000/svg";

  /** A sample of a peer's line in the chart. */
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

  /** ``7 training, 1 joining``: counts of each word, the most frequent first. */
  function tally(words) {
    const counts = new Map();
    for (const word of words.map(line).filter(Boolean)) counts.set(word, (counts.get(word) ?? 0) + 1);
    const most = [...counts].sort(([, a], [, b]) => b - a).slice(0, MOST_WORDS);
    return most.map(([word, many]) => `${count(many)} ${word}`).join(", ");
  }

  /** Sum of the known values; null if there are none. */
  function sum(values) {
    const known = values.filter(isNumber);
    return known.length ? known.reduce((a, b) => a + b) : null;
  }

  const COPIED_MS = 4000;

  /** Lets a button copy a field. Browsers allow that only with https or on localhost; else the text is selected. */
  function copies(field, button, told) {
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(field.value);
        set(told, "Copied.");
      } catch {
        field.focus();
        field.select();
        set(told, "Selected: copy it with your keyboard or menu.");
      }
      setTimeout(() => set(told, ""), COPIED_MS);
    });
  }

  Object.assign(ui, { NONE, isNumber, scaled, bytes, rate, loss, count, percent, duration, ago, line, prose, short });
  Object.assign(ui, { nameOf, dress, look, ink, at, el, isolated, set, fill, swatch, median, sum, tally, copies });
}
