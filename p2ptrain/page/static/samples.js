"use strict";
// What the model writes now, beside what it wrote before. Also on the public page.
{
  const { at, set } = ui;

  const when = (sample) => (ui.isNumber(sample.tokens) ? `at ${ui.scaled(Math.round(sample.tokens))} tokens` : "");

  class Samples {
    /** @type {object[]} earlier texts, the first one first */
    #earlier = [];

    constructor() {
      at("sample-choice").addEventListener("change", () => this.#showEarlier());
    }

    /**
     * @param {object | null} newest @param {object[]} all the kept texts, the newest last
     * @param {string} note who wrote the newest one
     */
    show(newest, all, note) {
      at("sample").hidden = !newest;
      at("sample-nothing").hidden = Boolean(newest);
      set(at("sample-note"), note);
      set(at("sample-prompt"), ui.prose(newest?.prompt));
      set(at("sample-text"), ui.prose(newest?.text));
      set(at("sample-now"), newest ? ["Now", when(newest)].filter(Boolean).join(", ") : "");
      this.#earlier = newest ? all.filter((each) => each.text !== newest.text) : [];
      at("sample-before").hidden = !this.#earlier.length;
      at("texts").classList.toggle("two", this.#earlier.length > 0);
      this.#offer();
      this.#showEarlier();
    }

    /** Renews the choice if the texts have changed; the chosen one stays if it is still there, else the first. */
    #offer() {
      const choice = at("sample-choice");
      const wanted = this.#earlier.map((each) => [when(each) || "unknown", String(each.at)]);
      const key = JSON.stringify(wanted);
      if (choice.dataset.of === key) return;
      choice.dataset.of = key;
      const before = choice.value;
      choice.replaceChildren(...wanted.map(([text, value]) => new Option(text, value)));
      choice.selectedIndex = Math.max(wanted.findIndex(([, value]) => value === before), 0);
    }

    #showEarlier() {
      const shown = this.#earlier[at("sample-choice").selectedIndex];
      set(at("before-prompt"), ui.prose(shown?.prompt));
      set(at("before-text"), ui.prose(shown?.text));
    }
  }

  Object.assign(ui, { Samples });
}
