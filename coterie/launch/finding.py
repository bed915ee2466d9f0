"""What one check before a start found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coterie.errors import CoterieError

__all__ = ["Finding", "Status", "failed", "passed"]

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes
    ----------
    check : str
        Its name.
    status : str
        ``"ok"``, ``"warn"`` (can start; read it) or ``"fail"``.
    problem : str
        What is wrong; empty when ok.
    fix : str
        How to put it right; empty when ok.
    note : str
        What was found, when ok.
    """

    check: str
    status: Status
    problem: str = ""
    fix: str = ""
    note: str = ""


def passed(check: str, note: str) -> Finding:
    """Return that a check found what it wants."""
    return Finding(check, "ok", note=note)


def failed(check: str, error: CoterieError, fix: str) -> Finding:
    """Return that a check met an error; ``fix`` stands where the error itself has no hint."""
    return Finding(check, "fail", error.message, error.hint or fix)
