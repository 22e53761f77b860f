"""Notes as lines for people: ``[exchange] exchanged with Kx41ab: 0.8 s, 1.1 MB``. docs/ERRORS.md lists them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from p2ptrain.base.documents import document
from p2ptrain.base.ids import short
from p2ptrain.base.text import UserPath, command_line, first_sentence, printable
from p2ptrain.net.p2pd.error_text import short_reason
from p2ptrain.page.view import PUNCHED

PARTS = " · "
"""Separator of the parts of a progress line."""
_PLACES = re.compile(
    r"'[/~][^']*'"  # quoted, since it has spaces
    r"|(?<![\w.])[/~][^\s,;)\]}'\"]+"  # /home/me, ~/me, /ip4/192.168.1.2/tcp/4001
    r"|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?"
    r"|(?<![\w.])[\w-]+(?:\.[\w-]+)*\.[a-zA-Z]{2,}(?::\d+)?(?!\w|\.\w)"  # laptop.fritz.box, but neither 1.2.3 nor e.g.
    r"|\[?[0-9a-fA-F]{0,4}:[0-9a-fA-F]{0,4}:[0-9a-fA-F:.]*(?:%\w+)?\]?(?::\d+)?"
)


def line(kind: str, fields: Mapping[str, Any]) -> str | None:
    """Return the line for a note; None if the note is only for the event log."""
    maker = _LINES.get(kind)
    return printable(maker(fields)) if maker else None


def without_places(text: str) -> str:
    """Replace addresses and paths, which reveal the owner's network and computer, by "…"."""
    return _PLACES.sub("…", text)


def size(size_bytes: float) -> str:
    """Format a size in decimal units: ``1.1 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def duration(seconds: float) -> str:
    """Format a duration: ``0.8 s``, ``12 ms``, ``5 min``, ``1.5 h``, ``2.5 d``."""
    if seconds >= 48 * 3600:
        return f"{seconds / 86_400:.1f} d"
    if seconds >= 120:
        return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"


def _peer(fields: Mapping[str, Any]) -> str:
    return short(str(fields["peer"])) if fields.get("peer") else "a peer"


def _why(fields: Mapping[str, Any]) -> str:
    return short_reason(str(fields.get("why") or "no reason given"))


def _reason_at(fields: Mapping[str, Any]) -> str:
    """Return the reason with the address, which a failed dial names itself."""
    place = str(fields["where"])
    return _why(fields) if place in _why(fields) else f"{_why(fields)} ({place})"


def _exchanged(fields: Mapping[str, Any]) -> str:
    moved = size(fields.get("sent_bytes", 0) + fields.get("received_bytes", 0))
    distance = 100 * float(fields.get("distance", 0.0))
    apart = f"{distance:,.0f}" if distance >= 10 else f"{distance:.2g}"
    took = duration(fields.get("seconds", 0.0))
    return f"[exchange] exchanged with {_peer(fields)}: {took}, {moved}, {apart} % apart{_path(fields)}"


def _path(fields: Mapping[str, Any]) -> str:
    """Name the relay that carried the bytes, or say that both routers let them through; empty for other links."""
    if fields.get("relay"):
        return f" (relayed by {short(str(fields['relay']))})"
    return f" ({PUNCHED})" if fields.get("punched") else ""


def _network_change(fields: Mapping[str, Any]) -> str:
    seconds = duration(fields["seconds"])
    match fields["cause"]:
        case "slept":
            return f"this machine slept or hung for {seconds}"
        case "absent":
            return f"this machine had no network for {seconds}"
    return "this machine has another address"


def _forward(fields: Mapping[str, Any]) -> str:
    target = f" to {fields['own']}" if fields.get("own") else ""
    return (
        f"forward TCP port {fields['port']} of your router{target}"
        if fields.get("port")
        else "restart with --listen /ip4/0.0.0.0/tcp/31337 --listen /ip6/::/tcp/31337"
    )


def _progress(fields: Mapping[str, Any]) -> str:
    """Describe progress, the most important first, as a narrow terminal leaves out the rest."""
    parts = [f"{100 * fields['fraction']:.0f} %"]
    if remaining_s := fields.get("remaining_s"):
        parts.append(f"{duration(remaining_s)} left")
    if "loss" in fields:  # none before the first outer step
        parts.append(f"loss {fields['loss']:.3f}")
    shortened_s = None
    if (speed := fields.get("swarm_tokens_per_s")) is not None:  # unknown before two inner steps
        shortened_s = fields["shortened_s"]
        share = "" if shortened_s is None else f", {100 * fields['tokens_per_s'] / speed:.0f} % here"
        parts.append(f"{speed:,.0f} tokens/s{share}")
    peers = fields["peers"]
    parts += [f"{fields['exchanges_ok']:,} exchanges", f"{peers:,} other peer{'s' if peers != 1 else ''}"]
    if shortened_s is not None:
        parts.append(f"this computer shortens the run by {duration(shortened_s)}")
    parts.append(f"step {fields['step']:,}")
    parts.append(f"{fields['progress']:,.0f} of {fields['run_tokens']:,} tokens")
    if "unsaved_s" in fields:
        parts.insert(0, f"NOT saved for {duration(fields['unsaved_s'])}")
    return "[train] " + PARTS.join(parts)


def here(tokens_per_s: float, shortened_s: float | None) -> str:
    """Return this computer's part of the swarm's throughput; empty if no other peer trains."""
    return "" if shortened_s is None else f", {tokens_per_s:,.0f} of them here"


def _started(fields: Mapping[str, Any]) -> str:
    if not fields.get("ended"):
        return f"[train] training on {fields['device']}, {fields['parameters']:,} parameters, {_loss(fields)}"
    said = f"[train] this run is over on this peer: {_loss(fields)}"
    if not fields["seconds"]:
        return said
    return (
        f"{said}; it looks for others, exchanges with them, gives its weights to newcomers, and ends within "
        f"{duration(fields['seconds'])}"
    )


def _loss(fields: Mapping[str, Any], digits: int = 3) -> str:
    """Return the held-out loss; if less than usual was read, also how much."""
    return f"held-out loss {fields['loss']:.{digits}f}{partly(fields.get('read', 0), fields.get('of', 0))}"


def partly(read: int, of: int) -> str:
    """Return how much of the usual held-out text was read; empty for all of it."""
    return f" (from {read:,} of {of:,} tokens)" if read < of else ""


def _took_weights(fields: Mapping[str, Any]) -> str:
    took, donors = size(fields["size_bytes"]), fields["donors"]
    said = (
        f"[join] got {took} of weights from {donors} peer{'s' if donors != 1 else ''} in {duration(fields['seconds'])}"
    )
    if fields.get("broke_off"):
        said += (
            f"; lost donors: {fields['broke_off']}, repeated requests: {fields['asked_again']} of {fields['pieces']}"
        )
    return said


def _same_identity(fields: Mapping[str, Any]) -> str:
    """Return the line about another process with this peer's key, and what to do."""
    said = (
        f"[peers] another process uses this peer's identity {fields['name']}, at {fields['where']} (outer step "
        f"{fields['step']:,}); only one can take part"
    )
    if fields["yields"]:
        return f"{said}, so this one saves and stops. If this home was copied: {fields['command']}"
    return (
        f"{said}, and this one goes on. If its home is a copy, run p2ptrain identity --new with it there. If it is not "
        f"yours, somebody has your key: stop this peer, then {fields['command']}"
    )


def _narrow_path(fields: Mapping[str, Any]) -> str:
    return (
        f"[peers] the path to {fields['where']} loses large packets in silence, because its MTU is smaller than this "
        "machine's and ICMP is blocked on it; "
        + (
            "routers on it may now fragment what this peer sends"
            if fields["fragments"]
            else "exchanges by it fail, and this peer cannot help it"
        )
        + f". To cure it: {' or '.join(fields['remedies'])}"
    )


def _trainer_died(fields: Mapping[str, Any]) -> str:
    smaller = "" if fields["micro_batch"] is None else f", with micro-batches of {fields['micro_batch']} at most"
    again = f"another one starts in {duration(fields['seconds'])}{smaller}"
    return f"[train] the trainer died ({_why(fields)}); {again}, and this peer stays in the swarm"


_LINES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "exchanged": _exchanged,
    "progress": _progress,
    "skipped": lambda f: f"[exchange] skipped {_peer(f)}: {_why(f)}",
    "failed": lambda f: f"[exchange] exchange with {_peer(f)} failed: {_why(f)}",
    "broke protocol": lambda f: f"[exchange] {_peer(f)} broke the protocol and is avoided for a while: {_why(f)}",
    "clipped": lambda f: f"[exchange] limited the effect of {_peer(f)} on our weights: {_why(f)}",
    "found": lambda f: f"[peers] found {_peer(f)}",
    "lost": lambda f: f"[peers] lost {_peer(f)}: {_why(f)}",
    "catching up": lambda f: f"[join] downloading the weights of {_peer(f)}: {_why(f)}",
    "caught up": lambda f: f"[join] in step with the swarm, with the weights of {_peer(f)}{_path(f)}",
    "run ended": lambda f: (
        f"[join] the run is over: this peer has the final weights of {_peer(f)}, and nothing is left to train"
    ),
    "ended before": lambda f: (
        f"[join] this run seems to be over: {_why(f)}, and nobody is left to give its weights. This peer begins anew, "
        "alone or with other latecomers. For the trained model, ask those who took part; Ctrl+C stops this peer"
    ),
    "took weights": _took_weights,
    "unconfirmed": lambda f: f"[join] no other peer confirmed the weights of {_peer(f)}: {_why(f)}",
    "gave weights": lambda f: f"[join] sent our weights to {_peer(f)}{_path(f)}",
    "out of step": lambda f: f"[join] out of step with the swarm: {_why(f)}; downloading its weights",
    "slept": lambda f: (
        f"[join] this machine was suspended for {_why(f)}; if the swarm is far ahead, its weights are downloaded"
    ),
    "alone": lambda f: f"[peers] training alone: {_why(f)}",
    "no manifest": lambda f: f"[join] no manifest from {_peer(f)}: {_reason_at(f)}",
    "waiting": lambda f: f"[join] {_why(f)}; retrying in {f['seconds']:.0f} s. {f['remedy']}",
    "no certificate": lambda f: (
        f"[join] {_why(f)}; retrying in {f['seconds']:.0f} s. Check that the bootstrap named in the link is running"
    ),
    "let in": lambda f: (
        f"[join] admitted by {_peer(f)}; the membership certificate is valid until the run's author revokes it"
    ),
    "not admitted": lambda f: f"[join] {_peer(f)} does not admit this peer: {_why(f)}. {f['remedy']}",
    "put out": lambda f: f"[join] others no longer exchange with this peer: {_why(f)}. {f['remedy']}",
    "listening": lambda f: f"[peers] this peer is {f['name']}, listening on {f['where']}",
    "reachable": lambda f: (
        f"[peers] others can dial this peer at {f['where']}"
        + ("" if f.get("relays") else "; with --relay it would also relay for peers that nobody can dial")
    ),
    "unreachable": lambda f: (
        f"[peers] nobody can dial this peer{' at ' + f['where'] if f['where'] else ''} ({_why(f)}), so others reach it "
        f"through a relay. For direct exchanges, {_forward(f)} (for IPv6 see {document('ERRORS.md')})"
    ),
    "punching": lambda f: (
        "[peers] this peer now connects directly to others through both routers where these allow it; such partners "
        "learn its public IP address (punch = false in settings.toml turns this off)"
    ),
    "relayed": lambda f: f"[peers] others reach this peer through the relay {_peer(f)}",
    "relay lost": lambda f: f"[peers] lost the relay {_peer(f)}: {_why(f)}; looking for another one",
    "no relay": lambda f: (
        f"[peers] no relay accepts this peer, so only exchanges that it starts work. To be reachable, {_forward(f)}"
    ),
    "wrong clock": lambda f: (
        f"[peers] this machine's clock is {duration(abs(f['off_s']))} {'fast' if f['off_s'] > 0 else 'slow'} by the "
        f"median of {f['nodes']} other node{'s' if f['nodes'] != 1 else ''}, so others ignore this peer's presence "
        "records. Set the clock (on Linux: timedatectl set-ntp true); no restart is needed"
    ),
    "same identity": _same_identity,
    "narrow path": _narrow_path,
    "right clock": lambda f: "[peers] this machine's clock is correct again",
    "clock jumped": lambda f: (
        f"[peers] this machine's clock jumped by {duration(abs(f['by_s']))} {'ahead' if f['by_s'] > 0 else 'back'}; by "
        f"the median of {f['nodes']} other node{'s' if f['nodes'] != 1 else ''} "
        + ("it is right now" if f["is_right"] else "it is wrong now, so this peer goes on by the time before. Set it")
    ),
    "network changed": lambda f: f"[peers] {_network_change(f)}; connecting again",
    "no text": lambda f: (
        f"[data] training waits for text, {f['shards']} shard{'s' if f['shards'] != 1 else ''}: {_why(f)}; asking "
        f"again every {duration(f['seconds'])} or later"
    ),
    "text again": lambda f: "[data] the text that training waited for is here",
    "text not stored": lambda f: f"[data] {f['why']} {f['remedy']} Trying again in {duration(f['seconds'])}",
    "shard refused": lambda f: f"[data] refused shard {f['shard']} of {f['source']}: {_why(f)}",
    "got file": lambda f: f"[data] got the run's {f['what']} from {_peer(f)}: {size(f['size_bytes'])}",
    "no file": lambda f: f"[data] no {f['what']} from {_peer(f) if f['peer'] else 'a mirror'}: {_why(f)}",
    "remembered": lambda f: f"[owner] options of earlier starts: {f['options']} (--forget drops them)",
    "text repeats": lambda f: f"[data] warning: {first_sentence(_why(f))}",
    "resumed": lambda f: f"[train] resumed at step {f['step']:,}, {f['progress']:,.0f} tokens of all peers",
    "no checkpoint": lambda f: (
        "[train] earlier starts saved no checkpoint, so this peer begins anew; the first one is saved after "
        f"{duration(f['seconds'])} of training"
    ),
    "torn checkpoint": lambda f: f"[train] skipped the damaged checkpoint {UserPath(f['path'])}: {_why(f)}",
    "started": _started,
    "compiling": lambda f: "[train] compiling the training step in the background",
    "trainer died": _trainer_died,
    "trainer returned": lambda f: f"[train] training goes on after {duration(f['seconds'])} without a trainer",
    "compiled": lambda f: "[train] training continues with compiled code",
    "not compiled": lambda f: f"[train] training continues without compiled code: {_why(f)}",
    "held out": lambda f: f"[train] {_loss(f)}",
    "keeping": lambda f: (
        f"[keep] keeping fragments {f['fragments']} of {f['of']} for others, {size(f['size_bytes'])}; not training"
    ),
    "keeper waits": lambda f: f"[keep] no weights to keep yet: {_why(f)}; still searching",
    "not held": lambda f: f"[peers] no other peer holds fragments {_why(f)} of the model",
    "page": lambda f: f"[page] {f['url']}",
    "trained": lambda f: "[train] reached the run's end; the final gossip begins",
    "finished": lambda f: f"[train] finished: {_why(f)}",
    "final loss": lambda f: (
        f"[train] the saved model, which export writes: {_loss(f, 4)}"
        if f["of"]
        else "[train] the saved model's held-out loss was not read: there was no trainer to read it"
    ),
    "share": lambda f: (
        f"[train] this computer trained {f['tokens']:,} tokens, about "
        f"{100 * f['tokens'] / f['progress']:.0f} % of those of all peers, in {f['exchanges_ok']:,} exchanges"
    ),
    "to export": lambda f: f"[train] to use the model with transformers: {f['command']}",
    "reading": lambda f: f"[train] reading the held-out text: {f['read']:,} of {f['wanted']:,} tokens",
    "saved": lambda f: f"[save] saved {UserPath(f['path'])}",
    "little space": lambda f: f"[save] warning: {f['why']}",
    "not tracked": lambda f: f"[track] TensorBoard gets no figures, or not all: {_why(f)}; training continues",
    "not saved": lambda f: f"[save] NOT saved, {f['what']}: {_why(f)}",
    "save waits": lambda f: (
        f"[save] NOT saved yet, {f['what']}: {_why(f)}; retrying every {duration(f['every_s'])} for "
        f"{duration(f['seconds'])}. {f['remedy']} A second Ctrl+C stops at once without saving"
    ),
    "discarded": lambda f: f"[train] inner phase {f['step']:,} discarded: {_why(f)}",
    "stopping": lambda f: (
        "[stop] saving, leaving the swarm; repeat to stop at once"
        if f["training"]
        else "[stop] stopped before training began"
    ),
    "to resume": lambda f: f"[stop] to resume: {f['command']}",
    "settings": lambda f: f"[owner] settings.toml applied: {f['what']}",
    "settings refused": lambda f: (
        f"[owner] settings.toml is faulty and ignored: {_why(f)}; the previous settings stay in force"
    ),
    "paused": lambda f: (
        f"[owner] paused: {_why(f)}; the weights stay in memory, and the swarm trains without this peer"
    ),
    "still paused": lambda f: (
        f"[owner] still paused by its owner{f.get('until', '')}, since before this start; to continue: "
        + command_line("p2ptrain", "resume", f["home"])
    ),
    "pause not kept": lambda f: f"[owner] the pause is NOT kept for the next start: {_why(f)}",
    "not in effect": lambda f: f"[owner] {f['option']} in settings.toml has no effect: {_why(f)}",
    "share given": lambda f: (
        f"[owner] other peers have used today's share of monthly_gb ({f['percent']} % of it in a month); sending "
        "weights to newcomers and relaying resume tomorrow; exchanges continue"
    ),
    "called back": lambda f: "[owner] participating again: looking for the swarm",
    "finishing": lambda f: "[owner] finishing this outer step, saving, leaving the swarm",
    "not counted": lambda f: f"[owner] the month's traffic is NOT counted in full: {_why(f)}",
    "no control socket": lambda f: (
        f"[owner] no control socket, so p2ptrain status, pause, resume and finish cannot reach this peer: {_why(f)}"
    ),
    "waiting for ranks": lambda f: (
        f"[team] waiting for {f['ranks']} more; on each of the other computers: p2ptrain rank --leader {f['leader']}"
        f"{' --number N, from 1' if f['ranks'] > 1 else ''}; nothing between them is encrypted: use a network that "
        "you trust, or a tunnel"
    ),
    "waiting for the leader": lambda f: f"[team] waiting for the leader at {f['leader']}",
    "team ended": lambda f: "[team] the run has ended; the leader has the model",
    "p2pd died": lambda f: f"[peers] the network daemon died ({_why(f)}) and is restarted; training continues",
    "p2pd is back": lambda f: "[peers] the network daemon is running again",
}
