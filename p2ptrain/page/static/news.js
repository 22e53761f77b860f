"use strict";
// Events from the stream, and from the document for those that the stream has missed. Each event is shown once: it
// lights up in the picture, and an exchange is listed among the latest.
//
// A bootstrap polls its peers and receives many events at once. To spread them out, each event is shown with the same
// delay after it happened, however it arrived.
{
  const LATEST = 5;
  /** Shortest interval between updates of the latest exchanges. */
  const READ_MS = 400;
  /** How old a document may be when it arrives; the stream is ahead of it. */
  const DOCUMENT_MS = 1000;
  /** Delay of a bootstrap's events: its poll interval (POLL_S of swarm_view.py). */
  const LATER_S = 3;
  /** Maximum number of delayed events; more could not be told apart. */
  const MOST_DUE = 256;

  const newestFirst = (a, b) => (b.at ?? 0) - (a.at ?? 0) || b.n - a.n;

  class News {
    /** Highest serial of each kind of event so far; null: unknown, so nothing counts as new. */
    #seen = { exchange: null, failure: null };
    /** @type {object[]} newest first */
    #latest = [];
    #timer = 0;
    #happenedAt = -Infinity;
    #due = 0;
    /** The document's clock minus this page's, in seconds; null: events are shown at once. */
    #ahead = null;

    /**
     * @param {HTMLElement} body the body of the table of latest exchanges
     * @param {{exchange: (event: object) => void, failure: (event: object) => void}} picture
     * @param {(id: string) => string} who
     */
    constructor(body, picture, who) {
      this.body = body;
      this.picture = picture;
      this.who = who;
    }

    /** Forgets all events: serials may restart, and missed events are no longer new. */
    forget() {
      this.#seen = { exchange: null, failure: null };
      this.#latest = [];
    }

    /** Handles one event of any kind, from the stream or the document. */
    hear(event) {
      if (!this.#isNew(event)) return;
      const wait = this.#wait(event.at);
      if (!wait || this.#due >= MOST_DUE) {
        this.#happen(event);
        return;
      }
      this.#due += 1;
      setTimeout(() => {
        this.#due -= 1;
        this.#happen(event);
      }, wait);
    }

    /** @param {object} found the document */
    catchUp(found) {
      const isLate = found.kind === "bootstrap" && ui.isNumber(found.at);
      this.#ahead = isLate ? found.at - performance.now() / 1000 : null;
      for (const [kind, events] of [["exchange", found.exchanges ?? []], ["failure", found.failures ?? []]]) {
        if (this.#seen[kind] === null) this.#seen[kind] = events.at(-1)?.n ?? 0;
        else events.forEach((event) => this.hear({ ...event, kind }));
      }
      if (!this.#due && performance.now() - this.#happenedAt > DOCUMENT_MS) this.#stand(found.exchanges ?? []);
      this.#show();
    }

    #isNew({ kind, n }) {
      if (this.#seen[kind] !== null && n <= this.#seen[kind]) return false;
      this.#seen[kind] = n;
      return true;
    }

    /** Delay in milliseconds; none if the peer's clock is wrong. */
    #wait(then) {
      if (this.#ahead === null || !ui.isNumber(then)) return 0;
      const age = performance.now() / 1000 + this.#ahead - then;
      return 1000 * Math.max(0, Math.min(LATER_S - age, LATER_S));
    }

    #happen(event) {
      if (event.kind === "failure") this.picture.failure(event);
      if (event.kind !== "exchange") return;
      this.picture.exchange(event);
      this.#stand([event, ...this.#latest]);
      this.#happenedAt = performance.now();
      this.#timer ||= setTimeout(() => this.#show(), READ_MS);
    }

    #stand(exchanges) {
      this.#latest = [...exchanges].sort(newestFirst).slice(0, LATEST);
    }

    #show() {
      clearTimeout(this.#timer);
      this.#timer = 0;
      ui.fill(this.body, this.#latest, row, (shown, event) => {
        const [a, b] = shown.cells[0].children;
        ui.set(a, this.who(event.a));
        ui.set(b, this.who(event.b));
        ui.set(shown.cells[1], ui.bytes(event.bytes || null));
        ui.set(shown.cells[2], ui.duration(event.seconds || null));
        ui.set(shown.cells[3], ui.isNumber(event.distance) ? `${ui.percent(event.distance)} apart` : ui.NONE);
      });
    }
  }

  function row() {
    const numbers = Array.from({ length: 3 }, () => ui.el("td", "number"));
    return ui.el("tr", "", ui.el("td", "", ui.isolated(""), " ↔ ", ui.isolated("")), ...numbers);
  }

  Object.assign(ui, { News });
}
