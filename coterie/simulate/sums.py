"""The secure sums as schedules use them, and the people of a simulated cohort."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.identity import Bundle, Identity, countersign
from coterie.crypto.verified import Verified
from coterie.secure_sum.clear import ClearMember, ClearServer
from coterie.secure_sum.graph import GraphFields
from coterie.secure_sum.masked import MaskedMember, MaskedServer
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Failed, MemberHalf, ServerHalf
from coterie.wire.layout import Layout, Segment

__all__ = ["LAYOUT", "halves", "identity"]

LAYOUT = Layout(
    (
        Segment("rows", (2, 2), 1.0, 12, over="touch"),
        Segment.whole("touch", (2,), 1),
        Segment("dense", (3,), 0.5, 16, over="instances"),
        Segment.whole("instances", (), 100),
    )
)
"""A small contribution with a segment of each kind."""

_NOW = 1_000_000
"""Unix seconds in the simulated world, for the validity of keys."""


@cache
def identity(number: int) -> Identity:
    """Return the keys of a simulated participant; the same for as long as the process lives."""
    return Identity.generate()


@cache
def _directory() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


@cache
def _bundle(number: int) -> Bundle:
    return countersign(identity(number).bundle(1, (0, 2 * _NOW)), _directory())


def _graph(members: int) -> GraphFields:
    """Return a complete graph with the lowest threshold that hides, ``2t > k``: small cohorts survive dropouts, too.

    ``graph_fields`` leaves cohorts of fewer than six no dropout at all.
    """
    if members < 2:
        raise Failed(f"a masked sum over {members} member would show its contribution")
    return GraphFields(members - 1, (members - 1) // 2 + 1)


def halves(secure_sum: str) -> tuple[Callable[[], ServerHalf], Callable[[SumPlan, int], MemberHalf]]:
    """Return what makes a secure sum's half for the server, and for a member of a plan.

    Member ``n`` of every plan has the keys ``identity(n)``.

    Raises
    ------
    ValueError
        When there is no such sum.
    """
    if secure_sum == "clear":
        return ClearServer, lambda plan, member: ClearMember()
    if secure_sum != "masked":
        raise ValueError(f"no secure sum {secure_sum!r}; there are clear and masked")
    directory_key = _directory().public_key().public_bytes_raw()
    verified = Verified()

    def server() -> ServerHalf:
        return MaskedServer(_graph, directory_key=directory_key, clock=lambda: float(_NOW))

    def member(plan: SumPlan, number: int) -> MemberHalf:
        return MaskedMember(
            plan, number, identity(number), _bundle(number), directory_key, _NOW, verified, _graph
        )

    return server, member
