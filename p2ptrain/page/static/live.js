"use strict";
// Connection to the server: polls the document, and recovers by itself.
{
  const POLL_MS = 2000;
  /** Poll interval of a hidden page, so that its title stays current. */
  const HIDDEN_MS = 30000;
  /** Longest backoff without an answer: short enough to find a restarted process soon. */
  const BACK_OFF_MS = 10000;
  /** Timeout of one request; a process that trains may be slow. */
  const PATIENCE_MS = 8000;
  /** Newest version of the document that this page can read. */
  const SCHEMA = 1;

  const REFUSED = "This page's token is no longer valid: open the complete address that the process printed.";
  const UNREADABLE = "The data from the server cannot be shown: reload the page.";
  const NEWER = "The server is newer than the page: reload the page.";
  const FAULTY = "The server answered with an error; its log may say more";
  const ENDED = "The server has ended or cannot be reached;";

  class Live {
    #timer = 0;
    #failures = 0;
    #asking = false;

    /** @param {{document: (found: object) => void, away: (why: string) => void}} hears */
    constructor(hears) {
      this.hears = hears;
    }

    start() {
      hideToken();
      document.addEventListener("visibilitychange", () => document.hidden || this.ask());
      addEventListener("online", () => this.ask());
      addEventListener("pageshow", (event) => event.persisted && this.ask());
      this.ask();
    }

    /** Requests the document now and schedules the next request. */
    async ask() {
      if (this.#asking) return;
      this.#asking = true;
      clearTimeout(this.#timer);
      try {
        const why = await this.#once();
        this.#failures = why ? this.#failures + 1 : 0;
        if (why) this.hears.away(why);
      } finally {
        this.#asking = false;
        this.#timer = setTimeout(() => this.ask(), this.#pause());
      }
    }

    /** @returns {Promise<string>} why there is no document; empty where there is one */
    async #once() {
      let found;
      try {
        const response = await fetch("status", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
        if (response.status === 401 || response.status === 403) return REFUSED;
        if (!response.ok) return `${FAULTY} (${response.status}).`;
        found = await response.json();
      } catch {
        return ENDED;
      }
      if (!(found.schema <= SCHEMA)) return NEWER;
      try {
        this.hears.document(found);
      } catch (fault) {
        console.error(fault);
        return UNREADABLE;
      }
      return "";
    }

    #pause() {
      if (this.#failures) return Math.min(POLL_MS * 2 ** (this.#failures - 1), BACK_OFF_MS);
      return document.hidden ? HIDDEN_MS : POLL_MS;
    }
  }

  /** Removes the token from the address bar: the browser has it in a cookie. */
  function hideToken() {
    const here = new URL(location.href);
    if (!here.searchParams.has("token")) return;
    here.searchParams.delete("token");
    history.replaceState(history.state, "", here);
  }

  Object.assign(ui, { Live, POLL_MS, ENDED });
}
