"""Encrypted sums in a transcript: replay gives those that were formed, whichever holder was gone or lied."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.crypto.key_record import KeyFields
from coterie.privacy.transcript import TranscriptWriter
from coterie.rounds.conductor import model_to_bytes
from coterie.secure_sum.contribution import Layout, Segment
from coterie.secure_sum.encrypted import packing_of
from coterie.secure_sum.plan import Member, SumPlan, layout_hash
from coterie.secure_sum.protocol import Step
from coterie.secure_sum.steps import KIND_OF
from coterie.studies.local_rounds import Holder, Members, run_round
from coterie.studies.replay import Replay
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.rounds_pb2 import SummedVector
from coterie.wire.v1.thirdparty_pb2 import PaillierKey, PaillierPublicKeyResponse, PaillierRecord
from tests.simulation.rig.intruder import false
from tests.simulation.rig.sums import FIRST_HOLDER, halves, held_by_all, identity, key_holder

LAYOUT = Layout((Segment.whole("counts", (40,), 7),))
SERVER, MEMBER = halves("encrypted")
MODEL = {"items": np.full((3, 2), 0.5, np.float32)}
USERS = (1, 2, 1, 3)
SLOTS = ((5,), (6, 7), (0,), (1, 2, 3))
HOLDER_SLOT = 20


def plan_of(number: int = 1, sparse_floor: int = 0) -> SumPlan:
    members = tuple(Member(identity(n).participant_id, "client/h", count) for n, count in enumerate(USERS))
    return SumPlan(
        "run",
        number,
        "train",
        "encrypted",
        hashlib.sha256(model_to_bytes(MODEL)).digest(),
        layout_hash(LAYOUT),
        members,
        min_sum=1,
        sparse_floor=sparse_floor,
        **SERVER().plan_fields(len(USERS), LAYOUT)._asdict(),
    )


class Recorder:
    """The transcript of a server."""

    def __init__(self, writer: TranscriptWriter) -> None:
        self._server, self._client = writer.side("server"), writer.side("client")

    def served(self, rpc: str, peer: str, received: bool, message) -> None:
        direction = "received" if received else "sent"
        self._server.record(rpc=rpc, peer=peer, direction=direction, payload=message.SerializeToString())

    def registered(self, peer: str, signers, slots: Collection[int]) -> None:
        request = wire.RegisterRequest(run_id="run")
        for one in signers:
            request.participants.add().bundle.signing_public = one.signing_public
        self.served("Register", peer, True, request)
        response = wire.RegisterResponse()
        for slot in slots:
            response.slots.add(first=slot, count=1)
        self.served("Register", peer, False, response)

    def sent(self, payload: bytes) -> None:
        half = len(payload) // 2
        for offset, part in ((0, payload[:half]), (half, payload[half:])):
            message = wire.FetchResponse()
            message.chunk.offset, message.chunk.data, message.chunk.last = offset, part, offset > 0
            self.served("Fetch", "client/h", False, message)

    def submitted(self, plan: SumPlan, step: Step, respondent: int, payload: bytes) -> None:
        message = wire.SubmitRequest(kind=KIND_OF[step])
        message.round.run_id, message.round.round = plan.run_id, plan.round
        if respondent < len(plan.members):
            slots = SLOTS[respondent]
        else:
            slots = (HOLDER_SLOT + plan.asked_of(respondent)[0],)
        message.slots.add(first=slots[0], count=len(slots))
        message.chunk.data, message.chunk.last = payload, True
        self.served("Submit", plan.device_of(respondent), True, message)

    def key(self) -> None:
        fields = KeyFields.of(held_by_all().secret.public)
        key = PaillierKey(
            run_id=fields.run,
            bits=fields.bits,
            modulus=fields.modulus,
            set_public=fields.set_public,
            created=fields.created,
            base=fields.base,
        )
        response = PaillierPublicKeyResponse(record=PaillierRecord(key=key, epoch=1))
        self._client.record(
            rpc="PaillierPublicKey",
            peer="thirdparty/thirdparty",
            direction="received",
            payload=response.SerializeToString(),
        )


class Unreachable:
    def answer(self, plan, step, briefings):
        return ()


class Recorded:
    """A connection whose messages are in the transcript, each of them twice."""

    def __init__(self, inner, recorder: Recorder, *, lies: bool = False, leaves: bool = False) -> None:
        self._inner, self._recorder, self._lies, self._leaves = inner, recorder, lies, leaves

    def answer(
        self, plan: SumPlan, step: Step, briefings: Mapping[int, bytes]
    ) -> Iterator[tuple[int, bytes]]:
        if self._leaves and step is Step.DECRYPT:
            return
        for respondent, message in self._inner.answer(plan, step, briefings):
            said = false(message) if self._lies and step is Step.DECRYPT else message
            for _ in range(2):
                self._recorder.submitted(plan, step, respondent, said)
            yield respondent, said


def replayed(tmp_path: Path, there=(0, 1, 2, 3), absent=(), leave=(), lie=(), *, key: bool = True):
    """Run a round that is recorded; return its outcome, what was submitted, and the replay."""
    plan = plan_of()
    rng = np.random.default_rng(0)
    codes = [rng.integers(0, 2 * count, LAYOUT.size).astype(np.uint32) for count in USERS]
    path = tmp_path / "transcript.bin"
    with TranscriptWriter(path, "cos/cos") as writer:
        recorder = Recorder(writer)
        if key:
            recorder.key()
        recorder.registered("client/h", map(identity, range(len(USERS))), [slots[0] for slots in SLOTS])
        for n, holder in enumerate(plan.holders):
            recorder.registered(holder.device, [identity(FIRST_HOLDER + n)], [HOLDER_SLOT + n])
        recorder.sent(plan.to_wire().SerializeToString())
        recorder.sent(model_to_bytes(MODEL))
        members = Members(MEMBER, lambda plan, asked: [(n, codes[n]) for n in asked if n in there])
        hosts: dict[str, Any] = {"client/h": Recorded(members, recorder)}
        for n, holder in enumerate(plan.holders):
            inner = Unreachable() if n in absent else Holder(lambda plan, n=n: key_holder(plan, n))
            hosts[holder.device] = Recorded(inner, recorder, lies=n in lie, leaves=n in leave)
        outcome = run_round(plan, LAYOUT, SERVER(), hosts)
    run = wire.RunPlan(run_id="run", secure_sum="encrypted")
    return outcome, codes, Replay([path], run, models=True)


@pytest.mark.parametrize(
    ("there", "faults"),
    [
        ((0, 1, 2, 3), {}),
        ((1, 3), {}),
        ((0, 1, 2, 3), {"absent": [0]}),
        ((0, 1, 3), {"leave": [1]}),
        ((0, 1, 2, 3), {"lie": [2]}),
        ((0, 2), {"absent": [2], "lie": [0]}),
        ((0, 1, 2, 3), {"leave": [2], "lie": [1]}),
    ],
)
def test_an_encrypted_sum_is_that_of_whoever_submitted_whatever_holders_did(tmp_path, there, faults):
    outcome, codes, replay = replayed(tmp_path, there, **faults)
    assert outcome.submitters == there
    (found,) = replay.received(lambda purpose: LAYOUT)
    assert found.slots == tuple(slot for n in there for slot in SLOTS[n])
    assert np.array_equal(found.codes, sum(codes[n] for n in there))
    assert np.array_equal(found.codes, outcome.total)
    assert found.version == 0
    model = replay.model(found.plan)
    assert model.keys() == {"items"}
    assert np.array_equal(model["items"], MODEL["items"])


@pytest.mark.parametrize("faults", [{"absent": [0, 1]}, {"lie": [0, 1, 2]}, {"leave": [0, 1, 2]}])
def test_an_encrypted_sum_that_was_not_formed_is_not_known(tmp_path, faults):
    outcome, _, replay = replayed(tmp_path, **faults)
    assert outcome.total is None
    assert not list(replay.received(lambda purpose: LAYOUT))


def test_without_the_public_key_ciphertexts_say_nothing(tmp_path):
    outcome, _, replay = replayed(tmp_path, key=False)
    assert outcome.total is not None
    assert not list(replay.received(lambda purpose: LAYOUT))


@pytest.mark.parametrize("secure_sum", ["encrypted", "shared-key"])
def test_what_members_of_a_sparse_sum_said_that_they_sent_is_known_and_what_cannot_be_is_left_out(
    tmp_path, secure_sum
):
    plan, path = plan_of(sparse_floor=1), tmp_path / "transcript.bin"
    packing = packing_of(plan, held_by_all().secret.public)
    wide = Layout((Segment.whole("counts", (3 * packing.slots,), 7),))
    said = {0: b"\x05", 1: b"", 2: b"\xff", 3: b"\x02"}
    with TranscriptWriter(path, "cos/cos") as writer:
        recorder = Recorder(writer)
        recorder.key()
        recorder.sent(plan.to_wire().SerializeToString())
        for member, places in said.items():
            vector = SummedVector(ciphertexts=b"not looked at", places=places)
            recorder.submitted(plan, Step.SUBMIT, member, vector.SerializeToString())
        recorder.submitted(plan, Step.SUBMIT, 0, SummedVector(places=b"\x07").SerializeToString())
    run = wire.RunPlan(run_id="run", secure_sum=secure_sum)
    found = [(slots, sent.tolist(), each) for slots, sent, each in Replay([path], run).places(wide)]
    assert found == [
        (SLOTS[0], [True, False, True], packing.slots),
        (SLOTS[3], [False, True, False], packing.slots),
    ]
