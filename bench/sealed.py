"""Compare sealing of records with AES-GCM over one JSON message per record; time key agreement."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bench.rows import Ask, Row, cpu_seconds, higher, in_turn, lower
from coterie.crypto.identity import Identity, Prekey
from coterie.crypto.sealed import (
    RECORD_DTYPE,
    Agreement,
    Direction,
    OpeningSession,
    SealingSession,
    SenderProcess,
)

_RECORDS = 65_536


def _pair() -> tuple[Identity, Identity, Prekey]:
    user, owner = Identity.generate(), Identity.generate()
    return user, owner, Prekey.generate(owner, "bench", int(time.time()) + 3600)


def _records(count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    records = np.zeros(count, RECORD_DTYPE)
    records["item"] = rng.integers(0, 4000, count)
    records["positive"] = rng.random(count) < 0.7
    return records


def rows(ask: Ask) -> Iterator[Row]:
    """Measure sealing, opening and key agreement."""
    again = ask.size(5, 1)
    user, owner, prekey = _pair()
    agreement = Agreement.of_user(user, owner.participant_id, prekey.public)
    process = SenderProcess()
    plain = AESGCM(AESGCM.generate_key(256))
    sample = _records(ask.size(8192, 64))
    as_json = [(int(item), bool(flag)) for item, flag in sample.tolist()]

    def json_each() -> None:
        for item, flag in as_json:
            nonce = os.urandom(12)
            plain.encrypt(nonce, json.dumps({"user": 7, "item": item, "positive": flag}).encode(), None)

    for per, name, target in ((1, "single", 5), (128, "batched", 250), (1024, "batched_1024", 250)):
        count = len(sample) if per == 1 else ask.size(16 * _RECORDS, 2 * per)
        records = _records(count)

        session = SealingSession(agreement, Direction.TO_OWNER, process)

        def seal(records: np.ndarray = records, per: int = per, session: SealingSession = session) -> None:
            for first in range(0, len(records), 1024 * per):
                session.seal_many(first + 1, records[first : first + 1024 * per], per)

        ours, theirs = in_turn(seal, json_each, again)
        yield higher(
            f"sealed.seal.{name}",
            count / ours / 1e6,
            len(as_json) / theirs / 1e6,
            "M records/s",
            f"{per} records a message; target {target}x",
        )

    records = _records(ask.size(_RECORDS, 256))
    sealed = SealingSession(agreement, Direction.TO_OWNER, process).seal_many(1, records, 128)
    opening = OpeningSession(
        Agreement.of_owner(prekey, owner.participant_id, _bundle(user)), Direction.TO_OWNER
    )
    boxes = [
        (nonce := os.urandom(12), plain.encrypt(nonce, b'{"user": 7, "item": 1234, "positive": true}', None))
        for _ in as_json
    ]

    def open_all() -> None:
        for header, ciphertext in zip(sealed.headers, sealed.ciphertexts, strict=True):
            opening.open(header, ciphertext)

    def open_json() -> None:
        for nonce, box in boxes:
            json.loads(plain.decrypt(nonce, box, None))

    ours, theirs = in_turn(open_all, open_json, again)
    yield higher(
        "sealed.open.batched",
        len(records) / ours / 1e6,
        len(as_json) / theirs / 1e6,
        "M records/s",
        "128 records a message",
    )

    users = [Identity.generate() for _ in range(ask.size(300, 3))]
    bundles = [_bundle(one) for one in users]

    def user_side() -> None:
        for one in users:
            SealingSession(
                Agreement.of_user(one, owner.participant_id, prekey.public), Direction.TO_OWNER, process
            )

    def owner_side() -> None:
        for bundle in bundles:
            OpeningSession(Agreement.of_owner(prekey, owner.participant_id, bundle), Direction.TO_OWNER)

    sides: tuple[tuple[str, Callable[[], None]], ...] = (("user", user_side), ("owner", owner_side))
    for side, work in sides:
        work()
        spent = min(cpu_seconds(work) for _ in range(again)) / len(users)
        yield lower(
            f"sealed.agreement.{side}",
            spent * 1e6,
            80.0,
            "us/pair",
            "against the target of 80 us a pair and side",
        )


def _bundle(identity: Identity):  # type: ignore[no-untyped-def]
    now = int(time.time())
    return identity.bundle(1, (now - 60, now + 3600))
