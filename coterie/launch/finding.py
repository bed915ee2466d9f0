"""The result of one preflight check, as ``coterie preflight`` and joining report it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coterie.errors import CoterieError

__all__ = ["Finding", "FindingStatus", "failed", "passed"]

FindingStatus = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one preflight check.

    Attributes
    ----------
    check : str
        Name of the check.
    status : str
        ``"ok"``, ``"warn"`` (the run or service can start all the same) or ``"fail"``.
    problem : str
        The fault that was found; empty when ok.
    fix : str
        Advice on how to put it right; empty when ok.
    note : str
        The fact that was found, when ok.
    """

    check: str
    status: FindingStatus
    problem: str = ""
    fix: str = ""
    note: str = ""


def passed(check: str, note: str) -> Finding:
    """Return the finding of a check that passed, with a note of what it found."""
    return Finding(check, "ok", note=note)


def failed(check: str, error: CoterieError, fix: str) -> Finding:
    """Return the finding of a check that failed by an error; ``fix`` is used when the error has no hint."""
    return Finding(check, "fail", error.message, error.hint or fix)
