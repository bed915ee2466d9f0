"""Words for runs whose floors count users, the same on every page that shows such a run."""

from __future__ import annotations

__all__ = ["EXPERIMENT"]

EXPERIMENT = "floors count users, not devices"
