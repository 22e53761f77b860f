"use strict";
// Table of contributions: which peer trained how much of the run. Also on the public page.
{
  /** @type {[title: string, text: (row: object) => string][]} the columns after the name */
  const COLUMNS = [
    ["Tokens", (row) => ui.scaled(row.tokens)],
    ["Time", (row) => ui.duration(row.trained_s)],
    ["Share", (row) => ui.percent(row.share)],
    ["Sooner", (row) => (ui.isNumber(row.sooner_s) && !row.sooner_s ? ui.NONE : ui.duration(row.sooner_s))],
    ["Signed", signed],
  ];

  /** How much of the claimed tokens partners signed, and how many partners. */
  function signed({ tokens, signed_tokens: some, signers }) {
    if (!some || !tokens) return "only claimed";
    return `${ui.percent(Math.min(some / tokens, 1))} by ${ui.count(signers)}`;
  }

  class Contributors {
    /** @param {HTMLTableElement} table @param {HTMLElement} nothing shown instead of it @param {HTMLElement} note */
    constructor(table, nothing, note) {
      Object.assign(this, { table, nothing, note });
      this.body = table.tBodies[0];
      table.tHead.rows[0].append(title("Peer"), ...COLUMNS.map(([name]) => title(name, "number")));
    }

    /** @param {{rows?: object[], others_tokens?: number} | undefined} found @param {string} [me] */
    show(found, me = "") {
      const rows = found?.rows ?? [];
      this.nothing.hidden = rows.length > 0;
      this.table.hidden = !rows.length;
      const others = found?.others_tokens;
      ui.set(this.note, rows.length && others >= 1 ? `${ui.scaled(Math.round(others))} tokens by others` : "");
      ui.fill(this.body, rows, make, (shown, row) => refill(shown, row, me));
    }
  }

  function title(text, kind = "") {
    const cell = ui.el("th", kind, text);
    cell.scope = "col";
    cell.setAttribute("role", "columnheader");
    return cell;
  }

  function make() {
    const made = ui.el("tr");
    const name = ui.el("th", "", ui.isolated("", "name"), ui.el("code", "short"));
    name.scope = "row";
    name.setAttribute("role", "rowheader");
    const cells = COLUMNS.map(([text]) => {
      const cell = ui.el("td", "number");
      cell.setAttribute("role", "cell");
      cell.dataset.title = text;
      return cell;
    });
    made.setAttribute("role", "row");
    made.append(name, ...cells);
    return made;
  }

  function refill(shown, row, me) {
    shown.dataset.peer = ui.line(row.id);
    shown.classList.toggle("me", Boolean(me) && row.id === me);
    shown.classList.toggle("away-now", row.here === false);
    const [name, short] = shown.cells[0].children;
    ui.set(name, ui.nameOf(row));
    ui.set(short, ui.short(row.id));
    COLUMNS.forEach(([, text], index) => ui.set(shown.cells[index + 1], text(row)));
  }

  Object.assign(ui, { Contributors });
}
