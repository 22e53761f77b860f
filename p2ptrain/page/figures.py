"""Figures of peers and runs, each in one row: its bound, and its Prometheus metric. Pure.

The fields of ``view.PeerRow`` say what each figure of a peer means.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_SHOWN = 100.0
"""Maximum of a loss in nats, and of a disagreement; larger claims are ignored. No model starts near it."""


@dataclass(frozen=True, slots=True)
class Figure:
    metric: str
    """Name of its metric, without ``p2ptrain_`` and ``peer_``."""
    help: str
    most: float = 1e18
    """Largest value that is taken from a report."""
    is_count: bool = False
    """Whether a peer's own value is an integer that only grows while it runs."""


OF_PEERS = {
    "tokens": Figure("tokens", "Tokens trained on.", is_count=True),
    "exchanges": Figure("exchanges", "Exchanges made; both partners count one.", is_count=True),
    "failed": Figure("exchanges_failed", "Exchanges that failed; both partners count one.", is_count=True),
    "sent_bytes": Figure("sent_bytes", "Bytes sent.", is_count=True),
    "received_bytes": Figure("received_bytes", "Bytes received.", is_count=True),
    "tokens_per_s": Figure("tokens_per_second", "Recent tokens per second."),
    "up": Figure("sent_bytes_per_second", "Recent bytes per second sent."),
    "down": Figure("received_bytes_per_second", "Recent bytes per second received."),
    "blocked_share": Figure("blocked_ratio", "Share of time that the trainer waited for exchanges.", 1.0),
    "disagreement": Figure("disagreement_ratio", "Distance to partners before an exchange, relative.", MOST_SHOWN),
    "loss": Figure("training_loss_nats", "Training loss in nats per token.", MOST_SHOWN),
    "held_out": Figure("held_out_loss_nats", "Held-out loss in nats per token.", MOST_SHOWN),
}
"""What a peer reports; a document's totals are of all peers that report."""

OF_RECORDS = {
    "step": Figure("outer_steps", "Outer steps done."),
    "progress": Figure("progress_tokens", "Estimate of the tokens that all peers trained on."),
    "age_s": Figure("record_age_seconds", "Age of its presence record."),
}
"""What each peer's presence record says."""

OF_RUNS = {
    "fraction": Figure("run_progress_ratio", "Completed share of the run."),
    "swarm_tokens_per_s": Figure("swarm_tokens_per_second", "Estimate of the tokens per second of all peers."),
    "remaining_s": Figure("run_remaining_seconds", "Estimated time to the run's end."),
    "shortened_s": Figure("run_shortened_seconds", "Time by which this peer shortens the run."),
}
"""What a document says of all peers."""
