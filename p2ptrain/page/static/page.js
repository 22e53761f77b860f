"use strict";
// The page: shows the document (docs/PAGE.md), and passes data to the charts, the table and the picture. Everything
// from the document is set as text.
{
  const { at, set } = ui;

  /** Maximum lines of the legend; the table has all peers. */
  const MOST_LEGEND = 12;
  /** Progress from which a run counts as finished: shown as 100 %. */
  const OVER = 0.995;
  const TOKENS = 0;
  const TIME = 1;
  const LOSS = 2;

  const WHAT = {
    bootstrap: () => "The bootstrap's view of the swarm",
    peer: (me) => (me ? `What ${ui.nameOf(me)} sees of the swarm` : "A peer's view of the swarm"),
    simulation: () => "A simulation of a swarm; its time is simulated too",
  };

  const lossChart = new ui.Chart(at("loss-chart"), { y: (value) => value.toFixed(2), fromZero: false });
  const disagreementChart = new ui.Chart(at("disagreement-chart"), { y: ui.percent, fromZero: true });
  const trafficChart = new ui.Chart(at("traffic-chart"), { y: ui.rate, fromZero: true });
  const gossip = new ui.Gossip(at("gossip"));
  const people = new ui.People(at("people"), at("people-sort"));
  const contributors = new ui.Contributors(at("contributors"), at("contributors-nothing"), at("contributors-note"));
  const samples = new ui.Samples();

  /** @type {object | null} the newest document */
  let shown = null;
  /** @type {Map<string, object>} peers' rows by id */
  let rows = new Map();
  let against = TOKENS;
  let away = false;
  let lastSeen = "";

  /** The bootstrap is not a peer, and reports about itself without an id. */
  const who = (id) => (id || shown?.kind !== "bootstrap" ? ui.nameOf(rows.get(id), id) : "bootstrap");
  const timeKind = () => (shown.kind === "simulation" ? "elapsed" : "clock");
  /** Time elapsed by the document's clock, which may differ from this computer's. */
  const since = (then) => ui.ago(ui.isNumber(then) && ui.isNumber(shown.at) ? shown.at - then : null);
  const here = () => [...rows.values()].filter((row) => row.state !== "gone");
  const values = (name) => here().map((row) => row[name]);
  /** A bootstrap's totals exclude departed peers. */
  const inAll = (found) => (found.kind === "bootstrap" ? "by those here" : "in all");
  const reporters = (found) => (found.kind === "peer" ? "by this one" : "by those that report");
  const news = new ui.News(at("latest"), gossip, who);

  // --- the head ----------------------------------------------------------------------------------------------------

  function showHead(found) {
    const run = found.run ?? {};
    const name = ui.line(run.name) || "p2ptrain";
    set(at("run-name"), name);
    set(at("what"), (WHAT[found.kind] ?? WHAT.bootstrap)(rows.get(found.me)));
    set(at("state"), doing(found));
    set(at("why"), ui.line(found.why));
    showProgress(found, run.run_tokens);
    showJoin(ui.line(found.join), ui.line(found.join_note));
    showLink(found.public);
    set(at("facts"), facts(run).join(" · "));
    document.title = `${ui.loss(heldOut(found))} · ${ui.percent(found.figures?.fraction)} · ${name}`;
  }

  /** A bootstrap does not train: its peers' states are shown instead of its own. */
  function doing(found) {
    const states = found.kind === "bootstrap" ? ui.tally(values("state")) : "";
    return states || ui.line(found.state) || ui.NONE;
  }

  /** How long the run takes from now on, and by how much the peer whose page this is shortens that. */
  function timeLeft({ remaining_s: left, shortened_s: less }) {
    if (!(left > 0)) return "";
    return `about ${ui.duration(left)} left${less > 0 ? `; this computer shortens it by ${ui.duration(less)}` : ""}`;
  }

  function showProgress(found, end) {
    const figures = found.figures ?? {};
    const { fraction, tokens } = figures;
    set(at("fraction"), ui.percent(fraction));
    const done = ui.isNumber(fraction) && end ? `${ui.scaled(Math.round(fraction * end))} of ` : "";
    const share = end ? `${done}${ui.scaled(end)} tokens of all peers` : "";
    const all = `${ui.scaled(Math.round(tokens))} ${found.kind === "peer" ? "by this one" : inAll(found)}`;
    set(at("progress-tokens"), [share, ui.isNumber(tokens) && all, timeLeft(figures)].filter(Boolean).join(", "));
    at("progress").value = ui.isNumber(fraction) ? Math.min(1, Math.max(0, fraction)) : 0;
  }

  function facts(run) {
    const found = [];
    if (run.parameters) found.push(`${ui.scaled(run.parameters)} parameters`);
    if (run.recipe) found.push(`recipe ${ui.line(run.recipe)}`);
    if (run.codec) found.push(`codec ${ui.line(run.codec)}`);
    if (run.id) found.push(`run ${ui.line(run.id).slice(0, 12)}`);
    return found;
  }

  function showJoin(command, note) {
    at("join").hidden = !command;
    set(at("join-note"), note);
    if (at("join-command").value !== command) at("join-command").value = command;
  }

  /** The address of the public page, as this browser reaches it. */
  function showLink(path) {
    at("share").hidden = !path;
    const address = path ? new URL(String(path), location.origin + location.pathname).href : "";
    if (at("link").value !== address) at("link").value = address;
  }

  // --- figures -----------------------------------------------------------------------------------------------------

  const heldOut = (found) => found.figures?.held_out ?? ui.median(values("held_out"));

  function showFigures(found) {
    const figures = found.figures ?? {};
    const loss = heldOut(found);
    set(at("held-out"), ui.loss(loss));
    set(at("held-out-note"), ui.isNumber(loss) ? `guess among ${ui.scaled(Math.exp(loss))}` : "");
    showPeersHere(found);
    const all = figures.swarm_tokens_per_s;
    const reported = figures.tokens_per_s ?? ui.sum(values("tokens_per_s"));
    set(at("speed"), ui.scaled(all ?? reported));
    const part = all > reported && `${ui.scaled(reported)} ${reporters(found)}`;
    const waited = ui.isNumber(figures.blocked_share) && `waits ${ui.percent(figures.blocked_share)} of the time`;
    set(at("speed-note"), [part, waited].filter(Boolean).join(", "));
    showExchangeFigures(figures);
    set(at("disagreement"), ui.percent(figures.disagreement ?? ui.median(values("disagreement"))));
    set(at("up"), ui.rate(figures.up));
    set(at("down"), ui.rate(figures.down));
    set(at("up-note"), ui.isNumber(figures.sent_bytes) ? `${ui.bytes(figures.sent_bytes)} ${inAll(found)}` : "");
    set(at("down-note"), ui.isNumber(figures.received_bytes) ? `${ui.bytes(figures.received_bytes)} ${inAll(found)}` : "");
  }

  function showPeersHere(found) {
    set(at("peers"), ui.count(found.total_peers));
    const relayed = here().filter((row) => row.path === "relayed").length;
    const gone = rows.size - here().length;
    const notes = [relayed && `${relayed} relayed`, gone && `${gone} gone`].filter(Boolean);
    set(at("peers-note"), notes.join(", "));
    const sampled = found.total_peers > here().length;
    set(at("people-note"), sampled ? `${here().length} of ${ui.count(found.total_peers)} are shown` : "");
    at("people-nothing").hidden = rows.size > 0;
  }

  function showExchangeFigures(figures) {
    const made = figures.exchanges ?? ui.sum(values("exchanges"));
    const failed = figures.failed ?? ui.sum(values("failed"));
    set(at("exchanges"), ui.count(made));
    const share = ui.isNumber(made) && made + failed > 0 ? ` (${ui.percent(failed / (made + failed))})` : "";
    set(at("exchanges-note"), ui.isNumber(failed) ? `${ui.count(failed)} failed${share}` : "");
  }

  // --- charts ------------------------------------------------------------------------------------------------------

  function showCharts(found) {
    const curves = [...(found.curves ?? [])].sort(byName);
    const column = against;
    lossChart.show(lossLines(curves, found.kind === "bootstrap"), { column, kind: against === TOKENS ? "tokens" : timeKind() });
    showLegend(curves);
    const ends = curves.map((curve) => curve.held_out?.at(-1)?.[LOSS]).filter(ui.isNumber);
    const told = ends.length ? `, held out now ${ui.loss(Math.min(...ends))} to ${ui.loss(Math.max(...ends))}` : "";
    at("loss-chart").setAttribute("aria-label", `Loss of ${curves.length} peers${told}`);
    const apart = { name: "disagreement", ink: "--accent", width: 1.75, points: found.disagreement ?? [], y: 2 };
    disagreementChart.show([apart], { column: TIME, kind: timeKind() });
    const points = found.traffic ?? [];
    const sent = { name: "sent", ink: "--accent", width: 1.5, points, y: 1 };
    const received = { name: "received", ink: "--second", width: 1.5, dash: [5, 3], points, y: 2 };
    trafficChart.show([sent, received], { column: 0, kind: timeKind() });
  }

  /** Training first, so that the held-out lines are on top. In a bootstrap's view each peer reports its own. */
  function lossLines(curves, areWords) {
    const lines = (pick, style) =>
      curves.map((curve) => {
        const name = `${curveName(curve)}, ${style.kind}`;
        const of = areWords ? curve.peer : undefined;
        return { name, ...ui.look(curve.peer), ...style, points: curve[pick] ?? [], y: LOSS, of };
      });
    return [
      ...lines("train", { kind: "training", width: 1, alpha: 0.8 }),
      ...lines("held_out", { kind: "held out", width: 2.25, marks: true }),
    ];
  }

  const curveName = (curve) => ui.line(curve.name) || who(curve.peer);
  const byName = (a, b) => Boolean(a.peer) - Boolean(b.peer) || curveName(a).localeCompare(curveName(b));

  function showLegend(curves) {
    const list = at("legend");
    const few = curves.slice(0, MOST_LEGEND);
    const more = curves.length - few.length;
    const wanted = JSON.stringify([few.map((curve) => [curve.peer, curveName(curve)]), more]);
    if (list.dataset.of === wanted) return;
    list.dataset.of = wanted;
    const items = few.map((curve) => ui.el("li", "", ui.swatch(curve.peer), ui.isolated(curveName(curve), "name")));
    if (more > 0) items.push(ui.el("li", "muted", `and ${more} more: see the table`));
    list.replaceChildren(...items);
  }

  function drawAgainst(column) {
    against = column;
    at("by-tokens").setAttribute("aria-pressed", String(column === TOKENS));
    at("by-time").setAttribute("aria-pressed", String(column === TIME));
    if (shown) showCharts(shown);
  }

  // --- lists -------------------------------------------------------------------------------------------------------

  /** Newest first, each with its age, its peer and a line. */
  function showLines(name, events, lineOf) {
    at(name).hidden = !events.length;
    at(`${name}-nothing`).hidden = events.length > 0;
    const make = () => ui.el("li", "", ui.el("span", "muted when"), ui.isolated("", "name"), ui.isolated("", "line"));
    ui.fill(at(name), [...events].reverse(), make, (item, event) => {
      const [when, peer, text] = item.children;
      set(when, since(event.at));
      set(peer, who(event.peer));
      set(text, lineOf(event));
    });
  }

  function showSamples(found) {
    const { sample } = found;
    const note = sample ? `${who(sample.peer)}, step ${ui.count(sample.step)}, ${since(sample.at)}` : "";
    samples.show(sample, found.samples ?? [], note);
  }

  // --- all of it ---------------------------------------------------------------------------------------------------

  function show(found) {
    lastSeen = new Date().toLocaleString();
    if (away) news.forget();
    away = false;
    set(at("away"), "");
    document.documentElement.classList.remove("stale");
    shown = found;
    const peers = found.peers ?? [];
    rows = new Map(peers.map((row) => [row.id, row]));
    ui.dress(rows.keys());
    people.show(peers, found.me);
    gossip.place(peers, found.me);
    showHead(found);
    showFigures(found);
    showCharts(found);
    news.catchUp(found);
    showLines("failures", found.failures ?? [], (event) => ui.line(event.line));
    showLines("checkpoints", found.checkpoints ?? [], (event) => `step ${ui.count(event.step)}`);
    showSamples(found);
    at("contributions-card").hidden = found.kind === "simulation";
    contributors.show(found.contributions, found.me);
    document.documentElement.dataset.shown = String(found.at);
  }

  /** Shows that the server is unreachable; after a finished run that is normal and nothing is stale. */
  function showAway(why) {
    away = true;
    const isOver = why === ui.ENDED && shown?.figures?.fraction >= OVER;
    const tail = why.endsWith(";") ? ` last seen ${lastSeen || "never"}.` : "";
    set(at("away"), isOver ? `The run has ended. These are its last figures, of ${lastSeen}.` : why + tail);
    at("away").classList.toggle("over", isOver);
    document.documentElement.classList.toggle("stale", !isOver);
    if (!isOver) return;
    set(at("state"), "ended");
    set(at("why"), "");
    at("join").hidden = true;
  }

  /** Closes explanations on Escape and on a click elsewhere. */
  function closeWhats(except) {
    for (const each of document.querySelectorAll("details.what[open]")) if (each !== except) each.open = false;
  }

  addEventListener("click", (event) => closeWhats(event.target.closest?.("details.what")));
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    document.activeElement?.closest("details.what")?.querySelector("summary").focus();
    closeWhats(null);
  });
  ui.copies(at("join-command"), at("join-copy"), at("join-told"));
  ui.copies(at("link"), at("link-copy"), at("link-told"));
  at("by-tokens").addEventListener("click", () => drawAgainst(TOKENS));
  at("by-time").addEventListener("click", () => drawAgainst(TIME));
  new ui.Live({ document: show, away: showAway }).start();
}
