"""What members sent to a sum in clear, from the bytes of the COS's transcript back to the ratings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coterie.learning import mvmf
from coterie.learning.mvmf import MvmfSettings
from coterie.learning.mvmf_local import UserData, contribute, local_step
from coterie.privacy.attacks.reconstruction import Marginals
from coterie.privacy.attacks.summed_vectors import SentVector, read_vectors, reconstruct_senders
from coterie.privacy.transcript import TranscriptWriter
from coterie.wire.layout import Contribution
from coterie.wire.v1.common_pb2 import Chunk
from coterie.wire.v1.orchestrator_pb2 import SubmitKind, SubmitRequest
from coterie.wire.v1.rounds_pb2 import SummedVector

VECTOR = SubmitKind.SUBMIT_KIND_VECTOR


def submission(
    round_: int, first: int, count: int, message: bytes, *, kind: int = VECTOR, run: str = "r"
) -> list[bytes]:
    """Return the two requests in which a member submits a message."""
    half = len(message) // 2
    head = SubmitRequest(kind=kind, chunk=Chunk(offset=0, data=message[:half]))
    head.round.run_id, head.round.round = run, round_
    head.slots.add(first=first, count=count)
    rest = SubmitRequest(chunk=Chunk(offset=half, data=message[half:], last=True))
    return [head.SerializeToString(), rest.SerializeToString()]


def recorded(path: Path, *submissions: list[bytes], direction: str = "received") -> Path:
    with TranscriptWriter(path, "cos/cos") as writer:
        for at, requests in enumerate(submissions):
            for payload in requests:
                writer.side("server").record(
                    rpc="Submit", peer=f"client/{at}", direction=direction, payload=payload
                )
    return path


def message(*codes: int) -> bytes:
    return SummedVector(codes=np.array(codes, "<u4").tobytes()).SerializeToString()


def test_vectors_are_read_once_each_with_their_round_and_slots(tmp_path: Path) -> None:
    one, two = message(1, 2, 3), message(4, 5, 6)
    path = recorded(
        tmp_path / "t",
        submission(3, 7, 1, one),
        submission(3, 8, 2, two),
        submission(3, 7, 1, two),
        submission(4, 7, 1, two),
    )
    assert list(read_vectors([path], "r")) == [
        SentVector(3, (7,), one),
        SentVector(3, (8, 9), two),
        SentVector(4, (7,), two),
    ]


def test_other_runs_kinds_and_broken_requests_are_passed_over(tmp_path: Path) -> None:
    path = recorded(
        tmp_path / "t",
        submission(1, 0, 1, message(1), run="another"),
        submission(1, 0, 1, message(1), kind=SubmitKind.SUBMIT_KIND_ADVERT),
        submission(1, 0, 1, message(1))[1:],
        [b"\xff\xff"],
        submission(1, 0, 1, message(2)),
    )
    assert list(read_vectors([path], "r")) == [SentVector(1, (0,), message(2))]
    assert not list(
        read_vectors([recorded(tmp_path / "s", submission(1, 0, 1, message(2)), direction="sent")], "r")
    )


@pytest.mark.parametrize(
    ("update", "weights"), [(u, w) for u in mvmf.UPDATES for w in ("obs-only", "incl-unc")]
)
def test_a_transcript_gives_a_member_of_one_user_away(tmp_path: Path, update: str, weights: str) -> None:
    rng = np.random.default_rng(1)
    settings = MvmfSettings(factors=4, ridge=2.0, weights=weights, update=update, private_rate=1e-3)
    users = [
        UserData(
            np.sort(rng.choice(50, 20, replace=False)),
            rng.integers(1, 6, 20).astype(float),
            rng.integers(0, 2, 6).astype(float),
        )
        for _ in range(3)
    ]
    layout = mvmf.layout(settings, 50, 6)
    kept = mvmf.initial_factors(settings, [5, 6, 7])
    sent, versions = [], {}
    for round_ in (2, 3, 4):
        items = rng.normal(0.7, 0.3, (50, 4)).astype(np.float32)
        attributes = rng.normal(0.3, 0.3, (6, 4)).astype(np.float32)
        versions[round_] = items, attributes
        model = {"items": items, "attributes": attributes}
        for step in list(local_step(model, users, settings, [5, 6, 7], seed=0, round_=round_, factors=kept)):
            contribution = Contribution(layout)
            contribute(step, contribution)
            contribution.count()
            codes = contribution.codes().astype("<u4").tobytes()
            kept[step.index] = step.kept
            if round_ < 4:
                sent.append(submission(round_, step.index, 1, SummedVector(codes=codes).SerializeToString()))
    # A host's sum over several, a round whose version is not known, a vector that is none.
    sent += [submission(3, 7, 2, b""), submission(9, 0, 1, message(1)), submission(4, 0, 1, message(1))]
    path = recorded(tmp_path / "t", *sent)

    found = reconstruct_senders(
        read_vectors([path], "r"), layout, versions, settings, Marginals.unknown((1, 2, 3, 4, 5), 50, 6)
    )
    assert sorted(found) == [0, 1, 2]
    for slot, user in enumerate(users):
        expected = np.zeros(50)
        expected[user.items] = user.ratings
        assert np.mean(found[slot].ratings == expected) >= 0.98
        assert np.array_equal(found[slot].attributes, user.attributes)
