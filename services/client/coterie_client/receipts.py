"""Translate what a host's members sent in sums, and why they sat out, into entries of the disclosure receipt."""

from __future__ import annotations

import re

from coterie.parties.sum_party import Leaving, SatOut
from coterie.rounds.training import Purpose
from coterie.secure_sum.protocol import Step
from coterie.store import client as store
from coterie_client.host import now_ms

__all__ = ["CONTRIBUTIONS", "refused_entry", "sent_entry"]

_SENT = {
    Step.ADVERTISE: "round keys",
    Step.SHARE: "sealed shares",
    Step.CONFIRM: "confirmation",
    Step.UNMASK: "revealed shares",
}
"""Name on receipts of the message of each step but SUBMIT."""

CONTRIBUTIONS = {
    Purpose.TRAIN: "model update",
    Purpose.EVALUATE: "metrics",
    Purpose.SUPPORTS: "items of the history",
}
"""Name on receipts of the message of SUBMIT, by purpose; the secure sum follows in parentheses."""


def sent_entry(leaving: Leaving, secure_sum: str, user: int) -> store.Sent:
    """Return the entry for a message of a sum; user 0 is the host as a whole."""
    kind = _SENT.get(leaving.step) or f"{CONTRIBUTIONS[Purpose(leaving.purpose)]} ({secure_sum})"
    return store.Sent(user, "cos", kind, 1, leaving.size, now_ms())


def refused_entry(sat_out: SatOut, user: int) -> store.Refused:
    """Return the entry for a refusal to take part in a sum; user 0 is the host as a whole."""
    # Receipts count equal reasons: leave out round numbers, which would make each one different.
    reason = re.sub(r"\bround \d+( is not above \d+)?", "a round", sat_out.reason)
    return store.Refused(user, "cos", reason, now_ms())
