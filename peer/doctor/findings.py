"""Findings of checks, and their display. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from p2ptrain.base.text import printable


class FindingState(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Works, but could work better."""
    BAD = "BAD"
    SKIPPED = "skipped"
    """Not checked; the text says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    state: FindingState
    found: str
    fix: str = ""
    """Instructions for a fix; never empty for BAD."""


def ok(check: str, found: str) -> Finding:
    return Finding(check, FindingState.OK, found)


def note(check: str, found: str, fix: str = "") -> Finding:
    return Finding(check, FindingState.NOTE, found, fix)


def bad(check: str, found: str, fix: str) -> Finding:
    return Finding(check, FindingState.BAD, found, fix)


def skipped(check: str, why: str) -> Finding:
    return Finding(check, FindingState.SKIPPED, why)


def names_of(findings: Sequence[Finding], state: FindingState) -> str:
    return ", ".join(each.check for each in findings if each.state is state)


def lines(findings: Sequence[Finding]) -> list[str]:
    """Format findings for people; other peers' text in them is made printable."""
    shown = []
    for each in findings:
        shown.append(printable(f"{each.state:8}{each.check:10} {each.found}"))
        if each.fix:
            shown.append(printable(f"{'':8}{'FIX':10} {each.fix}"))
    if wrong := names_of(findings, FindingState.BAD):
        return [*shown, "", f"To be fixed: {wrong}."]
    left = names_of(findings, FindingState.SKIPPED)
    return [*shown, "", f"All checks that ran passed; skipped: {left}." if left else "All is well."]


def document(findings: Sequence[Finding]) -> dict[str, object]:
    return {
        "ok": not names_of(findings, FindingState.BAD),
        "findings": [
            {"check": each.check, "state": each.state.lower(), "found": each.found, "fix": each.fix}
            for each in findings
        ],
    }
