"""What is wrong with a scenario or a report."""

from __future__ import annotations

from p2ptrain.base.errors import UserError


class ScenarioError(UserError):
    """A simulation's scenario or report is malformed, impossible or of another version."""
