"use strict";
// Table of peers: one row each, shown as cards on a phone. Rows are kept and moved, never rebuilt, so that selections
// and the reading position survive.
{
  const numeric = (name) => (row) => (ui.isNumber(row[name]) ? row[name] : null);
  const textual = (name) => (row) => ui.line(row[name]).toLowerCase() || null;

  /**
   * @typedef {object} Column
   * @property {string} title
   * @property {(row: object) => string} text
   * @property {(row: object) => string | number | null} key the sort key; null goes last
   * @property {boolean} [falls] whether the first click sorts the largest first
   */

  /** @type {Column[]} the first is the header of each row */
  const COLUMNS = [
    { title: "Peer", text: ui.nameOf, key: (row) => ui.nameOf(row).toLowerCase() },
    { title: "State", text: (row) => ui.line(row.state) || ui.NONE, key: textual("state") },
    { title: "Device", text: (row) => ui.line(row.device) || ui.NONE, key: textual("device") },
    { title: "Tokens/s", text: (row) => ui.scaled(row.tokens_per_s), key: numeric("tokens_per_s"), falls: true },
    { title: "Loss", text: (row) => ui.loss(row.loss), key: numeric("loss") },
    { title: "Held-out", text: (row) => ui.loss(row.held_out), key: numeric("held_out") },
    { title: "Exchanges", text: exchanges, key: numeric("exchanges"), falls: true },
    { title: "Path", text: (row) => ui.line(row.path) || ui.NONE, key: textual("path") },
    { title: "Last seen", text: (row) => ui.ago(row.age_s), key: numeric("age_s") },
  ];
  const FIRST_NUMBER = 3;
  const STATES = new Set(["joining", "training", "finishing", "leaving", "gone"]);

  function exchanges(row) {
    const failed = row.failed ? ` (${ui.count(row.failed)} failed)` : "";
    return ui.count(row.exchanges) + failed;
  }

  class People {
    /** @type {Map<string, HTMLTableRowElement>} by peer id */
    #rows = new Map();
    /** @type {{column: Column, falls: boolean} | null} null: this peer first, then by name */
    #sorting = null;
    #shown = [];
    #me = "";

    /** @param {HTMLTableElement} table @param {HTMLSelectElement} choice the sort order, where headers are hidden */
    constructor(table, choice) {
      this.table = table;
      this.choice = choice;
      choice.append(new Option("default order"), ...COLUMNS.map((column) => new Option(column.title)));
      choice.addEventListener("change", () => this.#sort(COLUMNS[choice.selectedIndex - 1]));
      this.body = table.tBodies[0];
      this.titles = COLUMNS.map((column, index) => this.#title(column, index));
      table.tHead.rows[0].append(...this.titles);
    }

    #title(column, index) {
      const button = ui.el("button", "", column.title);
      button.type = "button";
      button.addEventListener("click", () => this.#sortBy(column));
      const cell = ui.el("th", isNumeric(index) ? "number" : "", button);
      cell.scope = "col";
      cell.setAttribute("role", "columnheader");
      return cell;
    }

    /** Cycles through the natural order, the reverse order and the default. */
    #sortBy(column) {
      const natural = Boolean(column.falls);
      if (this.#sorting?.column !== column) this.#sort(column);
      else if (this.#sorting.falls === natural) this.#sort(column, !natural);
      else this.#sort(undefined);
    }

    /** @param {Column | undefined} column none: the default order */
    #sort(column, falls = Boolean(column?.falls)) {
      this.#sorting = column ? { column, falls } : null;
      this.choice.selectedIndex = COLUMNS.indexOf(column) + 1;
      this.titles.forEach((cell, index) => {
        if (COLUMNS[index] !== this.#sorting?.column) cell.removeAttribute("aria-sort");
        else cell.setAttribute("aria-sort", this.#sorting.falls ? "descending" : "ascending");
      });
      this.#arrange();
    }

    /** @param {object[]} rows @param {string} me */
    show(rows, me) {
      this.#shown = rows;
      this.#me = me;
      const there = new Set(rows.map((row) => row.id));
      for (const [id, row] of this.#rows) {
        if (!there.has(id)) {
          row.remove();
          this.#rows.delete(id);
        }
      }
      for (const row of rows) this.#fill(row);
      this.#arrange();
    }

    #fill(row) {
      if (!this.#rows.has(row.id)) this.#rows.set(row.id, this.#make(row.id));
      const shown = this.#rows.get(row.id);
      const state = ui.line(row.state);
      shown.dataset.state = STATES.has(state) ? state : "other";
      shown.classList.toggle("me", row.id === this.#me);
      COLUMNS.forEach((column, index) => {
        const cell = shown.cells[index];
        ui.set(index === 0 ? cell.querySelector(".name") : cell.firstChild, column.text(row));
      });
    }

    #make(id) {
      const made = ui.el("tr");
      made.dataset.peer = id;
      made.setAttribute("role", "row");
      COLUMNS.forEach((column, index) => {
        const cell = ui.el(index === 0 ? "th" : "td", isNumeric(index) ? "number" : "");
        cell.setAttribute("role", index === 0 ? "rowheader" : "cell");
        cell.dataset.title = column.title;
        if (index === 0) {
          cell.scope = "row";
          cell.append(ui.swatch(id), ui.isolated("", "name"), ui.el("code", "short", ui.short(id)));
        } else {
          cell.append(ui.isolated(""));
        }
        made.append(cell);
      });
      return made;
    }

    #arrange() {
      const order = [...this.#shown].sort((a, b) => this.#compare(a, b));
      order.forEach((row, index) => {
        const shown = this.#rows.get(row.id);
        if (this.body.rows[index] !== shown) this.body.insertBefore(shown, this.body.rows[index] ?? null);
      });
    }

    /** Departed peers come last in every order. */
    #compare(a, b) {
      const gone = (row) => Number(row.state === "gone");
      if (gone(a) !== gone(b)) return gone(a) - gone(b);
      if (this.#sorting) {
        const { column, falls } = this.#sorting;
        const [left, right] = [column.key(a), column.key(b)];
        if ((left === null) !== (right === null)) return left === null ? 1 : -1;
        if (left !== right) return (left < right ? -1 : 1) * (falls ? -1 : 1);
      } else if ((a.id === this.#me) !== (b.id === this.#me)) {
        return a.id === this.#me ? -1 : 1;
      }
      return ui.nameOf(a).localeCompare(ui.nameOf(b)) || (a.id < b.id ? -1 : 1);
    }
  }

  function isNumeric(index) {
    return index >= FIRST_NUMBER && COLUMNS[index].title !== "Path";
  }

  Object.assign(ui, { People });
}
