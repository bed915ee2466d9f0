"""Compare FedMF's sparse contributions (PartText) with whole ones (FullText) at 3,072 bits: cost and leakage."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bench.rows import Ask, Row, in_turn, lower
from coterie.config.run import RunSettings
from coterie.crypto.custody import HeldKey
from coterie.crypto.identity import Identity
from coterie.crypto.key_record import KeyTerms
from coterie.crypto.paillier import Mode, PublicObfuscators
from coterie.privacy.attacks import intersect
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.encrypted import EncryptedMember, EncryptedServer, Keyring, packing_of
from coterie.secure_sum.plan import Member, SumPlan, layout_hash
from coterie.secure_sum.protocol import Step
from coterie.studies.run_data import load
from coterie.systems.fedmf.mathematics import layout
from coterie.systems.fedmf.settings import FedMfSettings

_BITS = 3072


def rows(ask: Ask) -> Iterator[Row]:
    """Measure the contribution of the user with the median number of ciphertexts, in CPU time (mode B)."""
    few = {"synthetic": ask.size({}, {"users": 12, "items": 20, "interactions": 100})}
    given = {"data": few if ask.data is None else {"path": str(ask.data)}}
    dataset = load(RunSettings.model_validate({"system": "fedmf", "split": {"kind": "random"}, **given}))
    users, items = len(dataset.users), len(dataset.items)
    rated = np.zeros((users, items), np.bool_)
    rated[dataset.user, dataset.item] = True
    shape = layout(FedMfSettings(biases=False), items)
    width = shape["items"].size // items

    key, identity = (
        HeldKey.generate("bench", 1, KeyTerms(bits=ask.size(_BITS, 1024), comparison=ask.smallest)),
        Identity.generate(),
    )
    keys = Keyring()
    keys.use(key.public, [Member(identity.participant_id, "holder")])
    # The other members count in the plan, and send nothing here.
    others = (hashlib.sha256(b"%d" % user).digest() for user in range(1, users))
    members = tuple(Member(one, "host") for one in (identity.participant_id, *others))
    plans = [
        SumPlan(
            "bench",
            1,
            "train",
            "encrypted",
            bytes(32),
            layout_hash(shape),
            members,
            sparse_floor=floor,
            **EncryptedServer(keys).plan_fields(users, shape)._asdict(),
        )
        for floor in (20, 0)
    ]
    packing = packing_of(plans[0], key.public)
    begins = shape.places["items"].start + width * np.arange(items)
    first, last = begins // packing.slots, (begins + width - 1) // packing.slots
    sent = np.zeros((users, packing.ciphertexts(shape.size)), np.bool_)
    for user, item in zip(*np.nonzero(rated), strict=True):
        sent[user, first[item] : last[item] + 1] = True
    each = sent.sum(axis=1)
    middle = int(np.argsort(each, kind="stable")[users // 2])

    source = PublicObfuscators(key.public, Mode.PUBLIC)
    codes = _codes(shape, rated[middle])
    sparse, whole = (
        lambda plan=plan: EncryptedMember(plan, 0, identity, source, shape).answer(Step.SUBMIT, b"", codes)
        for plan in plans
    )
    ours, theirs = in_turn(sparse, whole, rounds=ask.size(3, 1))
    told = intersect.report([sent[:, first] & sent[:, last]], rated, rated.sum(axis=0))[-1]
    yield lower(
        "sparse.encrypt",
        ours * 1e3,
        theirs * 1e3,
        "ms",
        f"{dataset.name}: {users} users, {items} items; against the whole form of the same user; the places alone tell "
        f"items with AUC {told['auc']:.3f}, popularity {told['popularity_auc']:.3f}",
    )
    yield lower(
        "sparse.ciphertexts",
        float(each.mean()),
        float(sent.shape[1]),
        "a user",
        f"mean over users, median {np.median(each):.0f}; one for each value of a rated item would be "
        f"{width * rated.sum() / users:.0f}",
    )


def _codes(shape: Layout, rated: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Return the codes of a contribution with random values in the rows of rated items and zeros elsewhere."""
    codes = shape.zeros(1).copy()
    rows = codes[shape.places["items"]].reshape(shape["items"].shape)
    drawn = np.random.default_rng(0).integers(1, 2**15, (int(rated.sum()), rows.shape[1]))
    rows[rated] = drawn.astype(np.uint32)
    return codes
