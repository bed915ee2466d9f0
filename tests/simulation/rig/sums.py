"""Build the halves of secure sums, and the participants' keys, for simulated rounds.

Encrypted sums need the extra ``paillier``.  Their key is as short as a comparison with a paper allows, and is not
secret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from coterie.crypto.identity import Bundle, Identity, countersign
from coterie.crypto.key_record import KeyTerms
from coterie.crypto.verified import Verified
from coterie.secure_sum.clear import ClearMember, ClearServer
from coterie.secure_sum.contribution import Layout, Segment
from coterie.secure_sum.graph import GraphFields
from coterie.secure_sum.masked import MaskedMember, MaskedServer
from coterie.secure_sum.plan import Member, SumPlan
from coterie.secure_sum.protocol import Applied, Failed, Formed, MemberHalf, Running, ServerHalf, Subject
from coterie.secure_sum.repeats import MARK_BYTES
from coterie.wire.v1 import rounds_pb2 as wire

if TYPE_CHECKING:
    from gmpy2 import mpz

    from coterie.crypto.custody import HeldKey
    from coterie.crypto.paillier import HolderObfuscators
    from coterie.secure_sum.key_holder import KeyHolder

__all__ = [
    "FIRST_HOLDER",
    "HOLDERS",
    "LAYOUT",
    "SUMS",
    "added",
    "halves",
    "held_by_all",
    "identity",
    "key_holder",
    "layout_of",
    "opened",
    "pads_in",
]

SUMS = ("clear", "masked", "encrypted", "shared-key")
"""Secure sums that schedules can use."""

KEYED = ("encrypted", "shared-key")
"""Secure sums that are encrypted under a key."""

HOLDERS = 3
"""Number of key holders of an encrypted sum."""

FIRST_HOLDER = 1_000_000
"""Number of the first holder's identity; members have lower numbers."""

_KEY_BITS = 1024

LAYOUT = Layout(
    (
        Segment("rows", (2, 2), 1.0, 12, over="touch"),
        Segment.whole("touch", (2,), 1),
        Segment("dense", (3,), 0.5, 16, over="instances"),
        Segment.whole("instances", (), 100),
    )
)
"""A small contribution with a segment of each kind."""

_WIDE = Layout((*LAYOUT.segments, Segment("more", (150,), 1.0, 12)))
"""A layout that takes several ciphertexts, so that each key holder has a part to decrypt."""

_NOW = 1_000_000
"""Unix seconds in the simulated world, for the validity of keys."""


def layout_of(secure_sum: str) -> Layout:
    """Return the layout of contributions in schedules of a secure sum."""
    return _WIDE if secure_sum in KEYED else LAYOUT


@cache
def identity(number: int) -> Identity:
    """Return the keys of a simulated participant, the same for the life of the process."""
    return Identity.generate()


@cache
def _directory() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


@cache
def _bundle(number: int, device: str) -> Bundle:
    return countersign(identity(number).bundle(1, (0, 2 * _NOW)), _directory(), device)


def _graph(members: int) -> GraphFields:
    """Return a complete graph with the lowest secure threshold, ``2t > k``, so that small cohorts survive dropouts.

    ``graph_fields`` allows no dropout in cohorts of fewer than six.
    """
    if members < 2:
        raise Failed(f"a masked sum over {members} member would show its contribution")
    return GraphFields(members - 1, (members - 1) // 2 + 1)


SUBJECT = Subject(b"a version", 1, 1, (1.0,))
"""The model that every sum under a shared key changes here."""


def halves(secure_sum: str) -> tuple[Callable[[], ServerHalf], Callable[[SumPlan, int], MemberHalf]]:
    """Return two functions that make a secure sum's half: for the server, and for a member of a plan.

    Member ``n`` of every plan has the keys ``identity(n)``.

    Raises
    ------
    ValueError
        When there is no such secure sum.
    """
    if secure_sum == "clear":
        return ClearServer, lambda plan, member: ClearMember()
    if secure_sum in KEYED:
        return _encrypted(secure_sum)
    if secure_sum != "masked":
        raise ValueError(f"no secure sum {secure_sum!r}; there are {', '.join(SUMS)}")
    directory_key = _directory().public_key().public_bytes_raw()
    verified = Verified()

    def server() -> ServerHalf:
        return MaskedServer(_graph, directory_key=directory_key, clock=lambda: float(_NOW))

    def member(plan: SumPlan, number: int) -> MemberHalf:
        bundle = _bundle(number, plan.members[number].device)
        return MaskedMember(plan, number, identity(number), bundle, directory_key, _NOW, verified, _graph)

    return server, member


# --- encrypted -------------------------------------------------------------------------------------------------------


@cache
def held_by_all() -> HeldKey:
    """Return the secrets of every simulated key holder."""
    from coterie.crypto.custody import HeldKey

    return HeldKey.generate("simulated", 1, KeyTerms(bits=_KEY_BITS, comparison=True))


@cache
def obfuscators() -> HolderObfuscators:
    """Return the tables with which every simulated member encrypts."""
    from coterie.crypto.paillier import HolderObfuscators

    return HolderObfuscators(held_by_all().secret)


def _encrypted(secure_sum: str) -> tuple[Callable[[], ServerHalf], Callable[[SumPlan, int], MemberHalf]]:
    from coterie.secure_sum.encrypted import EncryptedMember, EncryptedServer, Keyring
    from coterie.secure_sum.shared_key import SharedKeyServer

    keys = Keyring()
    keys.use(
        held_by_all().public,
        [Member(identity(FIRST_HOLDER + n).participant_id, f"k{n}") for n in range(HOLDERS)],
    )

    def server() -> ServerHalf:
        if secure_sum == "encrypted":
            return EncryptedServer(keys)
        return SharedKeyServer(keys)

    def member(plan: SumPlan, number: int) -> MemberHalf:
        return EncryptedMember(plan, number, identity(number), obfuscators(), layout_of(secure_sum))

    return server, member


def key_holder(plan: SumPlan, holder: int) -> KeyHolder:
    """Return a key holder's half for a plan."""
    from coterie.secure_sum.key_holder import KeyHolder
    from coterie.secure_sum.shared_key import SharedKeyHolder

    bundles = {one.participant: _bundle(n, one.device) for n, one in enumerate(plan.members)}
    holders = [one.participant for one in plan.holders]
    own = plan, holder, identity(FIRST_HOLDER + holder), held_by_all(), holders, bundles
    return SharedKeyHolder(*own, apply=_apply) if plan.secure_sum == "shared-key" else KeyHolder(*own)


def _apply(plan: SumPlan, task: wire.ApplyTask, codes: NDArray[np.uint32], users: int) -> wire.AppliedSum:
    """Return a sum itself in place of the changed model, so that the watch can check it."""
    from coterie.crypto.sealed_model import agreement

    model = wire.SealedModel(key_id=plan.key_id, round=plan.round, sealed=codes.tobytes())
    return wire.AppliedSum(
        model=model.SerializeToString(), agreement=agreement(held_by_all(), plan.hash, codes.tobytes())
    )


def codes_in(formed: Formed, size: int) -> NDArray[np.uint32]:
    """Return the codes of a formed sum, also of one that simulated holders put in place of a model."""
    if not isinstance(formed, Applied):
        return formed
    return np.frombuffer(wire.SealedModel.FromString(formed.model).sealed, np.uint32)[:size]


def added(plan: SumPlan, layout: Layout, codes: Mapping[int, NDArray[np.uint32]]) -> NDArray[np.uint32]:
    """Return the expected sum over some members; in a sparse sum, places that too few members touch are zero."""
    total = sum(codes.values(), np.zeros(layout.size, np.uint32))
    if not plan.sparse_floor:
        return total
    from coterie.secure_sum.encrypted import packing_of

    slots = packing_of(plan, held_by_all().secret.public).slots
    users = {member: plan.members[member].users for member in codes}
    for first in range(0, layout.size, slots):
        place = slice(first, first + slots)
        there = [
            users[member]
            for member, own in codes.items()
            if not np.array_equal(own[place], layout.zeros(users[member])[place])
        ]
        if sum(there) < plan.sparse_floor or len(there) < 2:
            total[place] = layout.zeros(sum(users.values()))[place]
    return total


def opened(running: Running, plan: SumPlan, notes: Mapping[int, bytes]) -> NDArray[np.uint32]:
    """Return the codes of a running sum, decrypted if need be; ``notes`` are those on the contributions in it."""
    if isinstance(running, np.ndarray):
        return running
    from coterie.crypto.paillier import decrypt_vector

    if not running.addends:
        return np.zeros(running.count, np.uint32)
    count = running.packing.ciphertexts(running.count)
    pads = pads_in(plan, {member: note[MARK_BYTES:] for member, note in notes.items()}, count)
    return decrypt_vector(running.total(), held_by_all().secret, pads).astype(np.uint32)


def pads_in(plan: SumPlan, places: Mapping[int, bytes], count: int) -> list[mpz]:
    """Return the sums of the pads of some members, given in a sparse sum the places of each."""
    from coterie.crypto.paillier.pads import contributor_key, pad_sums
    from coterie.secure_sum.sparse import unpack_places

    held = held_by_all()
    keys = []
    for member in places:
        agreed = held.agree(identity(member).agreement_public)
        keys.append(contributor_key(agreed, plan.run_id, plan.key_id, plan.members[member].participant))
    sent = [unpack_places(own, 1, count)[0] for own in places.values()] if plan.sparse_floor else None
    return pad_sums(keys, plan.hash, held.secret.public, count, sent)
