"""What options of several commands take: names on the Hugging Face hub, and finite numbers."""

from __future__ import annotations

import math
from typing import Any

import click

HUB = "hf:"
"""Beginning of a name on the Hugging Face hub, where an option takes one."""


class FiniteRange(click.FloatRange):
    """A float range that rejects NaN and infinity, which click's own accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number
