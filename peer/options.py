"""Arguments and number types that several commands share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

HOME = click.argument("home", type=click.Path(file_okay=False, path_type=Path))


class FiniteRange(click.FloatRange):
    """A float range that rejects NaN and infinity, which click's own accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number
