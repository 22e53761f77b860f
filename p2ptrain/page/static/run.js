"use strict";
// The public page of a run: who contributes, what the model writes, how to join.
{
  const { at, set } = ui;
  const POLL_MS = 10000;
  const PATIENCE_MS = 8000;
  const AWAY = "The server has ended or cannot be reached; these are the last figures.";

  const contributors = new ui.Contributors(at("contributors"), at("contributors-nothing"), at("contributors-note"));
  const samples = new ui.Samples();

  function show(found) {
    const { run = {}, figures = {} } = found;
    const { fraction } = figures;
    const name = ui.line(run.name) || "p2ptrain";
    set(at("run-name"), name);
    set(at("what"), run.parameters ? `A language model of ${ui.scaled(run.parameters)} parameters` : "");
    document.title = `${name}: ${ui.percent(fraction)}`;
    set(at("fraction"), ui.percent(fraction));
    const left = figures.remaining_s > 0 ? `about ${ui.duration(figures.remaining_s)} left` : "";
    set(at("progress-tokens"), [run.run_tokens && `${ui.scaled(run.run_tokens)} tokens`, left].filter(Boolean).join(", "));
    at("progress").value = ui.isNumber(fraction) ? Math.min(1, Math.max(0, fraction)) : 0;
    set(at("peers"), ui.count(found.total_peers));
    set(at("speed"), ui.scaled(figures.swarm_tokens_per_s ?? figures.tokens_per_s));
    set(at("held-out"), ui.loss(figures.held_out));
    at("join").hidden = !found.join;
    const command = ui.line(found.join);
    if (at("join-command").value !== command) at("join-command").value = command;
    contributors.show(found.contributions);
    samples.show(found.sample ?? null, found.samples ?? [], "");
    document.documentElement.dataset.shown = String(found.at);
  }

  async function ask() {
    try {
      const response = await fetch("run/status", { signal: AbortSignal.timeout(PATIENCE_MS) });
      if (!response.ok) throw new Error(String(response.status));
      show(await response.json());
      set(at("away"), "");
    } catch {
      set(at("away"), AWAY);
    }
    setTimeout(ask, POLL_MS);
  }

  at("share").hidden = false;
  at("link").value = `${location.origin}${location.pathname}`;
  ui.copies(at("link"), at("link-copy"), at("link-told"));
  ui.copies(at("join-command"), at("join-copy"), at("join-told"));
  ask();
}
