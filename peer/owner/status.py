"""Status of a peer: its state in one word, and a screen for people."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.base.text import printable
from p2ptrain.net.throttle import MBIT
from peer.home import Home
from peer.messages import duration, here, partly, size

if TYPE_CHECKING:
    from peer.participation import Participation
    from peer.session_recorder import SessionRecorder

NOT_RUNNING = "not running"
FINISHED = "finished"
"""State of a peer that reached the run's end and does not run."""
SILENT = "does not answer"
WAITING, WAITED_FOR = frozenset({"waiting for ranks"}), frozenset({"started", "trainer returned"})
"""Kinds of notes between which a peer waits for its other computers."""
EARLY = "looking for the run's manifest, or building the model"


def state_of(
    record: SessionRecorder | None, participation: Participation | None, mode: str, leaving: bool
) -> tuple[str, str]:
    """Return one word for what the peer does, and why, if known; ``mode`` is the name of a ``Mode``."""
    if record is not None and record.losses.is_reading:
        return "finishing", "reading the held-out text for the final loss"
    if leaving:
        return "finishing", "saving, then leaving"
    if record is None:
        return ("paused" if mode == "PAUSED" else "starting"), EARLY
    if mode == "PAUSED":
        is_held = record.is_held or record.learner.ended or not record.has_stepped
        return ("paused", "") if is_held else ("pausing", "finishing the current inner step")
    if participation is None:
        return "training", "this run's recipe has no exchanges"
    if record.learner.ended and participation.state == "leaving":
        return "finishing", "leaving once newcomers have their weights"
    if record.learner.ended:
        is_alone = not participation.live_peers
        return "final gossip", "no other peer is here" if is_alone else "exchanging weights until the swarm agrees"
    if participation.state in ("joining", "away"):
        return "joining", "looking for the swarm, or downloading newer weights"
    if record.keeps is not None:
        return "keeping", "" if participation.live_peers else "no other peer is here; still searching"
    if record.learner.is_waiting:
        return "training", "waiting for the partners planned for this outer step"
    return "training", "" if participation.live_peers else "no other peer is here; still searching"


def last_known(home: Home, is_running: bool) -> dict[str, Any]:
    """Return the status of a peer that does not answer, from its home: newest checkpoint and last summary."""
    states = sorted(home.checkpoints.glob("step-*/state.json"), key=lambda path: path.parent.name)
    checkpoint = _read(states[-1], "step", "progress", "tokens", "ended") if states else None
    summary = _read(
        home.summary,
        *("nickname", "val_loss_last", "val_loss_last_tokens", "val_loss_of_tokens"),
        *("tokens", "outer_steps", "exchanges_ok", "finished", "ended_at", "why"),
    )
    has_finished = summary is not None and summary["finished"] is True
    return {
        "state": SILENT if is_running else FINISHED if has_finished else NOT_RUNNING,
        "home": str(home.path),
        "checkpoint": checkpoint,
        "saved_s_ago": _age_s(states[-1]) if states else None,
        "summary": summary,
        "finished_s_ago": _age_s(home.summary, summary["ended_at"]) if summary and has_finished else None,
        "export": home.export_command if has_finished else None,
    }


def _age_s(path: Path, at: object = None) -> int | None:
    """Return the seconds since ``at``, or else the age of a file; None if it is gone, as a peer rotates checkpoints."""
    try:
        since = at if isinstance(at, float) else path.stat().st_mtime
        return max(round(time.time() - since), 0)  # the clock may have been set back
    except OSError:
        return None


def screen(status: Mapping[str, Any]) -> str:
    """Format a status for people, one printable line per entry, as lines may contain other peers' text."""
    rows = [("state", ": ".join(filter(None, (status["state"], status.get("why")))))]
    if status["state"] in (NOT_RUNNING, SILENT, FINISHED):
        rows += _saved_rows(status)
    else:
        rows += _running_rows(status)
    text = [f"{name:<9} {printable(value)}" for name, value in rows]
    text += [
        f"{'' if i else 'lately':<9} {printable(_ago(e['age_s']))}: {printable(e['line'])}"
        for i, e in enumerate(status.get("lines", []))
    ]
    return "\n".join(text)


def _running_rows(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    training, settings, month = status["training"], status["settings"], status["month"]
    rows = []
    if training is not None:
        loss = f", loss {training['loss']:.3f}" if training["loss"] is not None else ""
        others = status["peers"]
        skipped = f", {training['skipped_steps']:,} steps skipped" if training.get("skipped_steps") else ""
        rows += [
            *([("device", device)] if (device := training.get("device")) else []),
            ("progress", f"{100 * training['fraction']:.1f} % of the run, outer step {training['step']:,}{loss}"),
            (
                "tokens",
                f"{training['progress']:,.0f} of {training['run_tokens']:,} by all peers, "
                f"{training['tokens']:,} of them here{skipped}",
            ),
            *_time_rows(training),
            *([("compiler", said)] if (said := training.get("compiler")) else []),
            (
                "swarm",
                f"{others:,} other peer{'' if others == 1 else 's'}, {training['exchanges_ok']:,} exchanges, "
                f"{status['exchanges_under_way']} under way, {training['exchanges_failed']:,} failed",
            ),
        ]
        if (unsaved_s := training.get("unsaved_s")) is not None:
            rows.append(("saving", f"FAILS; last saved {_ago(unsaved_s)}; the terminal of the peer says why"))
    if where := status.get("duplicate"):
        rows.append(("identity", f"NOT UNIQUE: also used at {where}; run p2ptrain identity --new with the copied home"))
    if status["admission"]:
        rows.append(("admission", status["admission"]))
    up, down = status["rates"]["sent_bytes_per_s"], status["rates"]["received_bytes_per_s"]
    allowed = f" of {size(month['allowed_bytes'])}" if month["allowed_bytes"] is not None else ", no limit"
    rows += [
        ("up", f"{up / MBIT:.2f} Mbit/s in the last minute, {_cap(settings['upload_mbit'])}"),
        ("down", f"{down / MBIT:.2f} Mbit/s, {_cap(settings['download_mbit'])}"),
        ("month", f"{size(month['sent_bytes'])} sent, {size(month['received_bytes'])} received{allowed}"),
        ("", f"of these {size(month['given_bytes'])} to serve others"),
    ]
    if settings["hours"]:
        rows.append(("hours", settings["hours"]))
    if status["settings_fault"]:
        rows.append(("settings", f"settings.toml is faulty and ignored: {status['settings_fault']}"))
    rows += [("settings", f"{option} has no effect: {why}") for option, why in status["not_in_effect"].items()]
    return rows


def _time_rows(training: Mapping[str, Any]) -> list[tuple[str, str]]:
    if (speed := training.get("swarm_tokens_per_s")) is None:
        return []
    shortened_s = training["shortened_s"]
    left = duration(training["remaining_s"])
    if shortened_s is not None:
        left += f"; this computer shortens it by {duration(shortened_s)}"
    return [("speed", f"{speed:,.0f} tokens/s{here(training['tokens_per_s'], shortened_s)}"), ("time left", left)]


def _saved_rows(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if status["state"] == FINISHED and (ended_s_ago := status["finished_s_ago"]) is not None:
        rows.append(("ended", f"{_ago(ended_s_ago)}, at the run's end; nothing is left to train"))
    if (saved := status["checkpoint"]) is not None:
        ended = ", the run's end" if saved.get("ended") else ""
        ago = "" if status["saved_s_ago"] is None else f", {_ago(status['saved_s_ago'])}"
        rows.append(("saved", f"outer step {saved.get('step')}{ended}{ago}"))
    if (last := status["summary"]) is not None:
        value = last.get("val_loss_last")
        loss = f"{value:.4f}" if isinstance(value, float) else "unknown"
        loss += partly(last.get("val_loss_last_tokens") or 0, last.get("val_loss_of_tokens") or 0)
        rows.append(("last time", f"held-out loss {loss}, {last.get('exchanges_ok')} exchanges; {last.get('why')}"))
    if status["export"] is not None:
        rows.append(("model", f"to use it with transformers: {status['export']}"))
    return rows


def _cap(mbit: float) -> str:
    return f"at most {mbit:g}" if mbit else "no cap"


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _read(path: Any, *names: str) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return {name: document.get(name) for name in names}
    except (OSError, ValueError, AttributeError):
        return None
