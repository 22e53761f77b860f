"""Public page of a run: what everybody may see of a bootstrap's document, and tags for previews in chats. Pure.

It has sums and medians, texts of the model, and the nicknames and contributions of peers whose owners share their
figures. It has no addresses, devices, exchanges or failures. The join command, which names the bootstrap's addresses,
is in it if the run admits everybody; ``SwarmView.join`` leaves it empty otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from p2ptrain.page.untrusted import words

PATH = "run"
"""Path of the public page, which stays the same, so that a link to it does."""
MOST_ROWS = 100
"""Maximum contributions that strangers load, those with most tokens: 25 kB. The owner's page has all."""
FIGURES = ("fraction", "tokens_per_s", "swarm_tokens_per_s", "remaining_s", "held_out")
PLACE = b"<!-- about this run -->"
"""Mark in ``run.html`` that ``head_tags`` replace."""
_SHARED = re.compile(rb"(<!-- shared: \w+ -->)\n(.*?)\n *<!-- end -->", re.DOTALL)
"""Part of ``index.html`` that replaces the same mark in ``run.html``."""


def public_document(document: Mapping[str, Any], hidden: Sequence[str] = ()) -> dict[str, Any]:
    """Return the public part of a document (docs/PAGE.md).

    Args:
        hidden: words, or ids of peers, whose texts and nicknames the author hides; small and capital letters are alike.
    """

    def shown(words: str, peer: str) -> bool:
        seen = " ".join(words.split()).casefold()
        return not any(each == peer or " ".join(each.split()).casefold() in seen for each in hidden if each.strip())

    def public(sample: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return a text without the peer that generated it; None if it is hidden."""
        if sample is None or not shown(sample["prompt"] + sample["text"], sample["peer"]):
            return None
        return {name: value for name, value in sample.items() if name != "peer"}

    contributions = document["contributions"]
    rows = contributions["rows"]
    rest = sum(row["tokens"] for row in rows[MOST_ROWS:])
    return {
        **{name: document[name] for name in ("schema", "at", "run", "join", "total_peers")},
        "figures": {name: document["figures"][name] for name in FIGURES if name in document["figures"]},
        "contributions": {
            "rows": [
                {**row, "id": row["id"][-6:]} | ({} if shown(row["nickname"], row["id"]) else {"nickname": ""})
                for row in rows[:MOST_ROWS]
            ],
            "others_tokens": contributions["others_tokens"] + rest,
        },
        "sample": public(document["sample"]),
        "samples": [each for each in map(public, document["samples"]) if each is not None],
    }


def public_page(run: bytes, index: bytes, public: Mapping[str, Any]) -> bytes:
    """Return the page of ``run.html`` with the parts of ``index.html`` that both pages share, for a public document."""
    for mark, part in _SHARED.findall(index):
        run = run.replace(mark, part)
    return run.replace(PLACE, head_tags(public))


def head_tags(public: Mapping[str, Any]) -> bytes:
    """Return title, description and Open Graph tags (ogp.me) of a public document, escaped."""
    run, figures = public["run"], public["figures"]
    name = words(run["name"]) or "p2ptrain"
    fraction, loss, peers = figures.get("fraction"), figures.get("held_out"), public["total_peers"]
    facts = [
        "A language model that volunteers train together",
        "" if fraction is None else f"{100 * fraction:.0f} % of {run['run_tokens']:,} tokens done",
        f"{peers:,} computer{'s' if peers != 1 else ''} here now",
        "" if loss is None or not math.isfinite(loss) else f"held-out loss {loss:.3f}",
    ]
    description = f"{'; '.join(filter(None, facts))}."
    tags = {"og:type": "website", "og:site_name": "p2ptrain", "og:title": name, "og:description": description}
    lines = [f"<title>{escape(name)}</title>", f'<meta name="description" content="{escape(description)}">']
    lines += [f'<meta property="{key}" content="{escape(value)}">' for key, value in tags.items()]
    return "\n  ".join(lines).encode()
