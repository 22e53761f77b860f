"use strict";
// How the page stays true: it asks for the document again and again, and listens to what happens in between. Both heal
// by themselves.
{
  const POLL_MS = 2000;
  /** Nobody looks at a hidden page, but its title should not be hours old. */
  const HIDDEN_MS = 30000;
  /** The longest pause when nobody answers: short enough that a restarted process is met before patience ends. */
  const BACK_OFF_MS = 10000;
  /** On top of which a process that trains may be slow, but not forever. */
  const PATIENCE_MS = 8000;
  /** After the server has sent the stream away: it holds a bounded number of them. */
  const STREAM_AGAIN_MS = 30000;
  /** Of the document that this page can read. */
  const SCHEMA = 1;

  const REFUSED = "This page's token is no longer known: open the whole address that the process printed.";
  const UNREADABLE = "What the process that serves this page tells cannot be shown: load the page again.";
  const NEWER = "The process that serves this page is newer than the page: load it again.";
  const FAULTY = "The process that serves this page answers with an error; its log may say more";
  const ENDED = "The process that serves this page has ended or cannot be reached;";

  class Live {
    #timer = 0;
    #failures = 0;
    #asking = false;
    /** @type {EventSource | null} */
    #stream = null;
    #streamTimer = 0;
    #heard = false;

    /**
     * @param {{document: (found: object) => void, event: (event: object) => void, gap: () => void,
     *          away: (why: string) => void}} hears what arrives; ``gap``: events may have been missed
     */
    constructor(hears) {
      this.hears = hears;
    }

    start() {
      hideToken();
      document.addEventListener("visibilitychange", () => this.#turned());
      addEventListener("online", () => this.ask());
      addEventListener("pagehide", () => this.#hush());
      addEventListener("pageshow", (event) => event.persisted && this.#turned());
      this.#turned();
    }

    /** Hidden pages hold no stream: browsers allow few connections to one place, and so does the server. */
    #turned() {
      if (document.hidden) {
        this.#hush();
      } else {
        this.#listen();
        this.ask();
      }
    }

    /** Asks for the document now, and plans to ask again. */
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

    #listen() {
      if (this.#stream) return;
      clearTimeout(this.#streamTimer);
      const stream = new EventSource("events");
      this.#stream = stream;
      stream.onopen = () => {
        if (this.#heard) {
          this.hears.gap();
          this.ask();
        }
        this.#heard = true;
      };
      stream.onmessage = (message) => this.hears.event(JSON.parse(message.data));
      stream.onerror = () => {
        // The browser tries again by itself after a cut, but not after a refusal.
        if (stream.readyState !== EventSource.CLOSED) return;
        this.#hush();
        this.#streamTimer = setTimeout(() => document.hidden || this.#listen(), STREAM_AGAIN_MS);
      };
    }

    #hush() {
      clearTimeout(this.#streamTimer);
      this.#stream?.close();
      this.#stream = null;
    }
  }

  /** The browser has it in a cookie, or no script would have come: it need not stand where others read it. */
  function hideToken() {
    const here = new URL(location.href);
    if (!here.searchParams.has("token")) return;
    here.searchParams.delete("token");
    history.replaceState(history.state, "", here);
  }

  Object.assign(ui, { Live, ENDED });
}
