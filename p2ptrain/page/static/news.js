"use strict";
// Events of the document that are new: each lights up once in the picture. The latest exchanges are listed below it.
{
  const LATEST = 5;

  class News {
    /** Serial of the newest event so far; null: unknown, so nothing counts as new. */
    #seen = null;

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
      this.#seen = null;
    }

    /** @param {object} found the document; its new events are spread over the time until the next one */
    catchUp({ exchanges = [], failures = [] }) {
      const events = [
        ...exchanges.map((event) => ({ event, show: () => this.picture.exchange(event) })),
        ...failures.map((event) => ({ event, show: () => this.picture.failure(event) })),
      ].sort((a, b) => a.event.n - b.event.n);
      const newest = events.at(-1)?.event.n ?? 0;
      const seen = this.#seen === null || newest < this.#seen ? newest : this.#seen; // lower: the process has restarted
      const fresh = events.filter(({ event }) => event.n > seen);
      fresh.forEach(({ show }, index) => setTimeout(show, (ui.POLL_MS * index) / fresh.length));
      this.#seen = newest;
      this.#list([...exchanges].sort((a, b) => (b.at ?? 0) - (a.at ?? 0) || b.n - a.n).slice(0, LATEST));
    }

    #list(latest) {
      ui.fill(this.body, latest, row, (shown, event) => {
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
