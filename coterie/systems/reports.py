"""Reading of stored reports by the model of their system."""

from __future__ import annotations

from collections.abc import Mapping

from coterie.systems.registry import systems
from coterie.telemetry.report import Report

__all__ = ["read_report"]


def read_report(stored: object) -> Report:
    """Return a report from parsed JSON of any version, with the keys of its system typed.

    Parameters
    ----------
    stored : object
        Content of ``report.json``.  Keys of a system that is not installed are kept as they are; values that this
        version cannot read are left out (`Report.read`).
    """
    name = stored.get("system") if isinstance(stored, Mapping) else None
    system = systems().get(name) if isinstance(name, str) else None
    return (Report if system is None else system.report).read(stored)
