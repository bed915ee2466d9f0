"""Kinds of data in chunked payloads, read by their content and not by their name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.message import Message
from numpy.typing import NDArray

from coterie.privacy.payloads import _READERS, _readings
from coterie.privacy.transcript import TranscriptWriter
from coterie.privacy.visibility import observed
from coterie.systems.visibility import matrix
from coterie.wire.chunks import split
from coterie.wire.tensor import to_wire
from coterie.wire.v1.common_pb2 import Chunk, KeyBundle, Population, RoundRef, SlotRange, Tensor, Wave, Waves
from coterie.wire.v1.orchestrator_pb2 import (
    Briefing,
    Briefings,
    Catalogue,
    CatalogueOwner,
    FetchKind,
    FetchRequest,
    FetchResponse,
    Model,
    NamedTensor,
    SubmitKind,
    SubmitRequest,
)
from coterie.wire.v1.rounds_pb2 import (
    Advert,
    Adverts,
    Confirmation,
    Confirmations,
    RevealedShare,
    RoundMember,
    SealedShare,
    ShareInbox,
    Shares,
    Submitters,
    SummedVector,
    SumPlan,
    Unmasking,
)
from coterie.wire.v1.thirdparty_pb2 import ExtendPopulationRequest

COS, HOST, OTHER = "cos/cos", "client/north", "client/south"

Call = tuple[str, str, str, Message]
"""RPC, peer, direction, message."""


def seen(folder: Path, party: str, calls: Iterable[Call]) -> set[str]:
    """Return the kinds that a party of these calls is found to have held, but for the protocol's own numbers."""
    path = folder / f"{len(list(folder.iterdir()))}.bin"
    with TranscriptWriter(path, party) as writer:
        for rpc, peer, direction, message in calls:
            side = "server" if party == COS else "client"
            writer.side(side).record(
                rpc=rpc, peer=peer, direction=direction, payload=message.SerializeToString()
            )
    return {kind for kind, held in observed({party: [path]})[party].items() if held} - {"protocol"}


def asked(kind: FetchKind.ValueType, party: str = HOST) -> Call:
    direction, peer = ("received", HOST) if party == COS else ("sent", COS)
    return "Fetch", peer, direction, FetchRequest(run_id="r", kind=kind)


def fetched(payload: Message, party: str = HOST) -> list[Call]:
    direction, peer = ("sent", HOST) if party == COS else ("received", COS)
    return [
        ("Fetch", peer, direction, FetchResponse(chunk=chunk)) for chunk in split(payload.SerializeToString())
    ]


def submitted(
    kind: SubmitKind.ValueType,
    payload: Message,
    *,
    slots: Sequence[tuple[int, int]] = ((3, 1),),
    round_: int = 7,
    party: str = COS,
    peer: str = HOST,
) -> list[Call]:
    """Return an item of Submit: only its first message says what it is."""
    direction = "received" if party == COS else "sent"
    first = SubmitRequest(
        round=RoundRef(run_id="r", round=round_),
        kind=kind,
        slots=[SlotRange(first=first, count=count) for first, count in slots],
    )
    calls: list[Call] = []
    for chunk in split(payload.SerializeToString()):
        message = SubmitRequest(chunk=chunk)
        if chunk.offset == 0:
            message.MergeFrom(first)
        calls.append(("Submit", peer if party == COS else COS, direction, message))
    return calls


def plan(purpose: str = "train", secure_sum: str = "clear", round_: int = 7) -> SumPlan:
    return SumPlan(
        version=1,
        run_id="r",
        round=round_,
        purpose=purpose,
        secure_sum=secure_sum,
        model_sha256=bytes(32),
        layout_sha256=bytes(32),
        devices=["client/north"],
        members=[RoundMember(participant=bytes(32), users=1)],
        min_sum=1,
    )


PLANNED = {"participant_id", "cohort"}
"""Kinds of data that the plan of a sum shows."""

CODES = np.arange(1, 9, dtype="<u4").tobytes()
CLEAR = SummedVector(codes=CODES)
MASKED = SummedVector(codes=CODES, signature=bytes(64))
VECTOR = SubmitKind.SUBMIT_KIND_VECTOR
ONE, MANY = ((3, 1),), ((3, 2),)


# --- contributions


@pytest.mark.parametrize(
    ("purpose", "slots", "expected"),
    [
        ("train", ONE, {"user_update", "user_metric", "round_sum"}),
        ("train", MANY, {"host_update", "metric_sum", "round_sum"}),
        ("train", ((3, 1), (9, 1)), {"host_update", "metric_sum", "round_sum"}),
        ("evaluate", ONE, {"user_metric", "round_sum"}),
        ("evaluate", MANY, {"metric_sum", "round_sum"}),
        ("supports", ONE, {"user_items", "item_support"}),
        ("supports", MANY, {"host_items", "item_support"}),
    ],
)
def test_a_contribution_in_clear_shows_what_its_purpose_and_its_users_say(
    tmp_path: Path, purpose: str, slots: Sequence[tuple[int, int]], expected: set[str]
) -> None:
    calls = [*fetched(plan(purpose), COS), *submitted(VECTOR, CLEAR, slots=slots)]
    assert seen(tmp_path, COS, calls) == expected | PLANNED | {"slot"}
    # Its host holds it, too, and forms no sum.
    calls = [*fetched(plan(purpose)), *submitted(VECTOR, CLEAR, slots=slots, party=HOST)]
    sums = {"round_sum", "item_support"}
    assert seen(tmp_path, HOST, calls) == (expected | PLANNED | {"slot"}) - sums


@pytest.mark.parametrize("purpose", ["train", "evaluate", "supports"])
@pytest.mark.parametrize("slots", [ONE, MANY], ids=["one user", "several"])
def test_a_masked_contribution_shows_nothing_but_that_it_is_one(
    tmp_path: Path, purpose: str, slots: Sequence[tuple[int, int]]
) -> None:
    calls = [*fetched(plan(purpose, "masked"), COS), *submitted(VECTOR, MASKED, slots=slots)]
    assert seen(tmp_path, COS, calls) == {"masked_vector", "round_key", "slot"} | PLANNED


def test_a_signature_alone_is_no_mask(tmp_path: Path) -> None:
    calls = [*fetched(plan(secure_sum="clear"), COS), *submitted(VECTOR, MASKED)]
    assert {"user_update", "user_metric"} <= seen(tmp_path, COS, calls)
    calls = [*fetched(plan(secure_sum="masked"), COS), *submitted(VECTOR, CLEAR)]
    found = seen(tmp_path, COS, calls)
    assert "user_update" in found
    assert "masked_vector" not in found


def test_a_contribution_whose_plan_was_not_recorded_counts_as_all_that_it_may_be(tmp_path: Path) -> None:
    for slots, one in ((ONE, True), (MANY, False)):
        found = seen(tmp_path, COS, submitted(VECTOR, CLEAR, slots=slots))
        single, several = {"user_update", "user_items"}, {"host_update", "host_items"}
        assert found >= (single if one else several) | {"round_sum", "item_support"}
        assert not found & (several if one else single)


def test_a_contribution_that_names_no_user_counts_as_one_users(tmp_path: Path) -> None:
    assert "user_update" in seen(tmp_path, COS, submitted(VECTOR, CLEAR, slots=()))


def test_each_contribution_belongs_to_the_plan_of_its_own_round(tmp_path: Path) -> None:
    calls = [
        *fetched(plan("supports", round_=1), COS),
        *submitted(VECTOR, CLEAR, slots=MANY, round_=1),
        *fetched(plan("train", "masked", round_=2), COS),
        *submitted(VECTOR, MASKED, round_=2),
    ]
    found = seen(tmp_path, COS, calls)
    assert found == {"host_items", "item_support", "masked_vector", "round_key", "slot"} | PLANNED


def test_the_plan_may_be_recorded_after_the_contribution(tmp_path: Path) -> None:
    calls = [*submitted(VECTOR, CLEAR, slots=MANY), *fetched(plan("evaluate"), COS)]
    assert seen(tmp_path, COS, calls) == {"metric_sum", "round_sum", "slot"} | PLANNED


def test_a_purpose_that_is_not_known_is_unclassified(tmp_path: Path) -> None:
    calls = [*fetched(plan("guess"), COS), *submitted(VECTOR, CLEAR)]
    assert "unclassified" in seen(tmp_path, COS, calls)


def test_long_contributions_are_put_together_also_where_calls_of_several_hosts_run_at_once(
    tmp_path: Path,
) -> None:
    long = np.random.default_rng(0).integers(0, 2**32, 600_000, dtype=np.uint32).astype("<u4").tobytes()
    one = submitted(VECTOR, SummedVector(codes=long, signature=bytes(64)))
    # A little shorter: ends that were exchanged would be noticed.
    two = submitted(VECTOR, SummedVector(codes=long[:-400]), slots=MANY, peer=OTHER)
    assert len(one) == len(two) == 3
    mixed = [one[0], two[0], two[1], one[1], two[2], one[2]]
    found = seen(tmp_path, COS, [*fetched(plan("train", "masked"), COS), *mixed])
    assert {"masked_vector", "host_update"} <= found
    assert not found & {"user_update", "unclassified"}


def test_several_items_of_one_stream_are_told_apart(tmp_path: Path) -> None:
    calls = [
        *submitted(SubmitKind.SUBMIT_KIND_ADVERT, advert(1)),
        *submitted(VECTOR, MASKED),
        *submitted(SubmitKind.SUBMIT_KIND_CONFIRMATION, Confirmation(member=1, signature=bytes(64))),
    ]
    assert seen(tmp_path, COS, calls) == {"public_key", "round_key", "masked_vector", "slot"}


# --- the steps of a masked sum


def advert(member: int) -> Advert:
    return Advert(
        member=member,
        bundle=KeyBundle(signing_public=bytes([member]) * 32, version=1),
        channel_public=bytes([1]) * 32,
        mask_public=bytes([2]) * 32,
        signature=bytes([3]) * 64,
    )


def shares(*members: int) -> list[SealedShare]:
    return [SealedShare(member=member, sealed=bytes([member]) * 81) for member in members]


def confirmations(*members: int) -> list[Confirmation]:
    return [Confirmation(member=member, signature=bytes([member]) * 64) for member in members]


REVEALED = Unmasking(
    shares=[RevealedShare(member=0, seed=bytes(33)), RevealedShare(member=1, mask=bytes(33))]
)


@pytest.mark.parametrize(
    ("kind", "payload", "expected"),
    [
        (SubmitKind.SUBMIT_KIND_ADVERT, advert(2), {"public_key", "round_key"}),
        (
            SubmitKind.SUBMIT_KIND_SHARES,
            Shares(shares=shares(0, 1), seed_hash=bytes(32)),
            {"sealed_share", "round_key"},
        ),
        (SubmitKind.SUBMIT_KIND_CONFIRMATION, confirmations(4)[0], {"round_key"}),
        (SubmitKind.SUBMIT_KIND_UNMASKING, REVEALED, {"revealed_share", "cohort"}),
        (SubmitKind.SUBMIT_KIND_DECLINED, Confirmation(), {"cohort"}),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Message) else "",
)
def test_each_step_shows_what_its_message_holds(
    tmp_path: Path, kind: SubmitKind.ValueType, payload: Message, expected: set[str]
) -> None:
    assert seen(tmp_path, HOST, submitted(kind, payload, party=HOST)) == expected | {"slot"}


def test_whoever_left_a_member_out_says_who_is_in_the_round(tmp_path: Path) -> None:
    left = SummedVector(codes=CODES, left_out=[3], signature=bytes(64))
    assert "cohort" in seen(tmp_path, COS, submitted(VECTOR, left))
    assert "cohort" not in seen(tmp_path, COS, submitted(VECTOR, MASKED))


@pytest.mark.parametrize(
    ("purpose", "sums"),
    [("train", {"round_sum"}), ("evaluate", {"round_sum"}), ("supports", {"item_support"})],
)
def test_the_cos_forms_a_masked_sum_once_shares_are_revealed_and_not_before(
    tmp_path: Path, purpose: str, sums: set[str]
) -> None:
    calls = [*fetched(plan(purpose, "masked"), COS), *submitted(VECTOR, MASKED)]
    assert not seen(tmp_path, COS, calls) & {"round_sum", "item_support"}
    calls += submitted(SubmitKind.SUBMIT_KIND_UNMASKING, REVEALED)
    assert seen(tmp_path, COS, calls) & {"round_sum", "item_support"} == sums
    held = submitted(SubmitKind.SUBMIT_KIND_UNMASKING, REVEALED, party=HOST)
    assert not seen(tmp_path, HOST, held) & {"round_sum", "item_support"}


@pytest.mark.parametrize(
    "kind",
    [
        SubmitKind.SUBMIT_KIND_ADVERT,
        SubmitKind.SUBMIT_KIND_SHARES,
        VECTOR,
        SubmitKind.SUBMIT_KIND_UNMASKING,
        SubmitKind.SUBMIT_KIND_UNSPECIFIED,
    ],
)
def test_a_payload_that_is_not_what_its_label_says_is_unclassified(
    tmp_path: Path, kind: SubmitKind.ValueType
) -> None:
    assert "unclassified" in seen(tmp_path, COS, submitted(kind, plan()))


def test_a_chunk_without_those_before_it_is_unclassified(tmp_path: Path) -> None:
    calls: list[Call] = [
        ("Submit", HOST, "received", SubmitRequest(chunk=Chunk(offset=1 << 20, data=b"x", last=True)))
    ]
    assert seen(tmp_path, COS, calls) == {"unclassified"}


# --- what is fetched


def array(values: NDArray[np.generic]) -> Tensor:
    return to_wire(values)


MODEL = Model(
    tensors=[
        NamedTensor(name="items", tensor=array(np.ones((3, 2), np.float32))),
        NamedTensor(name="network", tensor=array(np.ones(5, np.float32))),
    ]
)
KINDS: list[tuple[FetchKind.ValueType, Message, set[str]]] = [
    (FetchKind.FETCH_KIND_MODEL, MODEL, {"item_factor"}),
    (FetchKind.FETCH_KIND_SUM_PLAN, plan(), PLANNED),
    (
        FetchKind.FETCH_KIND_POPULATION,
        Population(devices=["client/a"], participants=bytes(64), device=[0, 0]),
        {"population"},
    ),
    (FetchKind.FETCH_KIND_OPEN_ITEMS, array(np.ones((4, 32), np.uint8)), {"open_items"}),
    (
        FetchKind.FETCH_KIND_WAVES,
        Waves(
            devices=["client/a"],
            participants=bytes(64),
            device=[0, 0],
            waves=[Wave(first=0, from_pass=3, beacon=bytes(32), beacon_signature=bytes(64))],
        ),
        {"population"},
    ),
    (FetchKind.FETCH_KIND_ROSTER, array(np.ones((4, 32), np.uint8)), {"participant_id", "slot"}),
    (FetchKind.FETCH_KIND_MODEL, array(np.ones((4, 3), np.float32)), {"item_factor"}),
    (FetchKind.FETCH_KIND_USER_ROWS, array(np.ones((4, 3), np.float32)), {"user_factor"}),
    (
        FetchKind.FETCH_KIND_CATALOGUE,
        Catalogue(
            version=2,
            owners=[CatalogueOwner(slot=1, name="drama")],
            items=["a", "b"],
            owner_counts=[1, 0],
            owner_positions=[0],
        ),
        {"item_key", "holding", "slot", "endpoint"},
    ),
]


def briefed(*payloads: Message, common: Message | None = None) -> Briefings:
    return Briefings(
        briefings=[
            Briefing(member=n, payload=payload.SerializeToString()) for n, payload in enumerate(payloads)
        ],
        common=common.SerializeToString() if common is not None else b"",
    )


BRIEFED: list[tuple[Message, set[str]]] = [
    (Briefings(briefings=[Briefing(member=1), Briefing(member=2)]), set()),
    (briefed(Adverts(adverts=[advert(1), advert(2)])), {"public_key", "round_key"}),
    (briefed(ShareInbox(shares=shares(0, 2))), {"sealed_share"}),
    (briefed(Confirmations(confirmations=confirmations(0, 2))), {"round_key"}),
    (briefed(Submitters(members=[0, 1, 5])), {"cohort"}),
    (briefed(Submitters(members=[8, 300, 70_000])), {"cohort"}),
    (briefed(Submitters(members=[0, 1], places=b"\x01\x02")), {"cohort", "sent_places"}),
    (briefed(Submitters(), Submitters(), common=Submitters(members=range(200))), {"cohort"}),
    (
        briefed(Adverts(adverts=[advert(7)]), common=Adverts(adverts=[advert(1)])),
        {"public_key", "round_key"},
    ),
]


def _short(value):
    """Return what a value is: the same in every process, unlike the order of a set."""
    return "+".join(sorted(value)) if isinstance(value, set) else type(value).__name__


@pytest.mark.parametrize(("kind", "payload", "expected"), KINDS, ids=_short)
def test_what_was_asked_for_is_what_the_answer_shows(
    tmp_path: Path, kind: FetchKind.ValueType, payload: Message, expected: set[str]
) -> None:
    assert seen(tmp_path, HOST, [asked(kind), *fetched(payload)]) == expected
    assert seen(tmp_path, COS, [asked(kind, COS), *fetched(payload, COS)]) == expected


@pytest.mark.parametrize(("payload", "expected"), BRIEFED, ids=_short)
def test_a_briefing_shows_what_the_step_tells_its_member(
    tmp_path: Path, payload: Message, expected: set[str]
) -> None:
    kind = FetchKind.FETCH_KIND_BRIEFINGS
    assert seen(tmp_path, HOST, [asked(kind), *fetched(payload)]) == expected
    assert seen(tmp_path, HOST, fetched(payload)) == expected


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff" * 9,
        Adverts(adverts=[Advert(member=1, channel_public=bytes(32))]).SerializeToString(),
        ShareInbox(shares=[SealedShare(member=1, sealed=bytes(80))]).SerializeToString(),
        Submitters(members=[9, 8]).SerializeToString(),
    ],
    ids=["nothing", "an advert without its keys", "a share of another length", "a list that does not ascend"],
)
def test_a_briefing_of_nothing_known_is_unclassified(tmp_path: Path, payload: bytes) -> None:
    briefings = Briefings(briefings=[Briefing(member=1, payload=payload)])
    assert "unclassified" in seen(tmp_path, HOST, fetched(briefings))


def every_payload() -> Iterator[tuple[FetchKind.ValueType, Message]]:
    yield from ((kind, payload) for kind, payload, _ in KINDS)
    yield from ((FetchKind.FETCH_KIND_BRIEFINGS, payload) for payload, _ in BRIEFED)


ALIKE = [
    {FetchKind.FETCH_KIND_MODEL, FetchKind.FETCH_KIND_USER_ROWS},
    {FetchKind.FETCH_KIND_ROSTER, FetchKind.FETCH_KIND_OPEN_ITEMS},
]
"""Arrays of one form; who asked for which is in the transcript."""


@pytest.mark.parametrize(("kind", "payload"), list(every_payload()), ids=_short)
def test_the_bytes_alone_tell_payloads_apart_but_for_arrays_of_one_form(
    kind: FetchKind.ValueType, payload: Message
) -> None:
    found = set(_readings(payload.SerializeToString(), _READERS))
    assert found == {kind} or (found in ALIKE and kind in found and isinstance(payload, Tensor))


def test_answers_to_questions_asked_at_once_are_told_apart(tmp_path: Path) -> None:
    kinds = [FetchKind.FETCH_KIND_SUM_PLAN, FetchKind.FETCH_KIND_MODEL, FetchKind.FETCH_KIND_OPEN_ITEMS]
    answers = [payload for kind, payload, _ in KINDS if kind in kinds and payload != KINDS[6][1]]
    for order in itertools.permutations(answers):
        calls = [*map(asked, kinds), *itertools.chain.from_iterable(map(fetched, order))]
        assert seen(tmp_path, HOST, calls) == PLANNED | {"item_factor", "open_items"}


def test_what_nobody_asked_for_counts_as_all_that_it_can_be(tmp_path: Path) -> None:
    table = array(np.ones((4, 32), np.uint8))
    everything = {"open_items", "participant_id", "slot"}
    assert seen(tmp_path, HOST, fetched(table)) == everything
    assert seen(tmp_path, HOST, fetched(array(np.ones((4, 31), np.uint8)))) == {"open_items"}
    other = asked(FetchKind.FETCH_KIND_MODEL)
    assert seen(tmp_path, HOST, [other, *fetched(table)]) == everything


def test_a_wave_that_the_third_party_is_told_of_shows_who_comes_later(tmp_path: Path) -> None:
    (wave,) = [payload for kind, payload, _ in KINDS if kind == FetchKind.FETCH_KIND_WAVES]
    undrawn = Waves()
    undrawn.CopyFrom(wave)
    del undrawn.waves[:]
    undrawn.waves.add(first=0, from_pass=3)
    third, path = "thirdparty/directory", tmp_path / "directory.bin"
    with TranscriptWriter(path, third) as writer:
        for chunk in split(undrawn.SerializeToString()):
            message = ExtendPopulationRequest(run_id="r", chunk=chunk)
            writer.side("server").record(
                rpc="ExtendPopulation", peer=COS, direction="received", payload=message.SerializeToString()
            )
    found = {kind for kind, held in observed({third: [path]})[third].items() if held}
    assert found == {"population", "protocol"}


def test_an_array_with_more_in_it_than_an_array_is_unclassified(tmp_path: Path) -> None:
    # Field 9 of a later release, say, or something smuggled.
    payload = Tensor.FromString(array(np.ones((2, 2), np.float32)).SerializeToString() + b"\x4a\x01x")
    assert seen(tmp_path, HOST, fetched(payload)) == {"unclassified"}


# --- a whole round, held against what is declared


@pytest.mark.parametrize("form", ["hosts", "users"])
@pytest.mark.parametrize("secure_sum", ["clear", "masked"])
@pytest.mark.parametrize("purpose", ["train", "evaluate", "supports"])
def test_nothing_that_the_messages_of_a_round_show_is_kept_from_their_parties(
    tmp_path: Path, form: str, secure_sum: str, purpose: str
) -> None:
    masked = secure_sum == "masked"
    slots = MANY if form == "hosts" else ONE

    def calls(party: str) -> list[Call]:
        made: list[Call] = []
        for kind, payload in (
            (FetchKind.FETCH_KIND_POPULATION, KINDS[2][1]),
            (FetchKind.FETCH_KIND_MODEL, MODEL),
            (FetchKind.FETCH_KIND_SUM_PLAN, plan(purpose, secure_sum)),
        ):
            made += [asked(kind, party), *fetched(payload, party)]
        made += [asked(FetchKind.FETCH_KIND_BRIEFINGS, party)]
        steps: list[tuple[SubmitKind.ValueType, Message, Message]] = [
            (SubmitKind.SUBMIT_KIND_ADVERT, BRIEFED[0][0], advert(0)),
            (SubmitKind.SUBMIT_KIND_SHARES, BRIEFED[1][0], Shares(shares=shares(1), seed_hash=bytes(32))),
            (VECTOR, BRIEFED[2][0], MASKED),
            (SubmitKind.SUBMIT_KIND_CONFIRMATION, BRIEFED[4][0], confirmations(0)[0]),
            (SubmitKind.SUBMIT_KIND_UNMASKING, BRIEFED[3][0], REVEALED),
        ]
        for step, briefing, message in steps if masked else [(VECTOR, BRIEFED[0][0], CLEAR)]:
            made += [*fetched(briefing, party), *submitted(step, message, slots=slots, party=party)]
        return made

    declared = matrix("fedncf", form, secure_sum)
    for party, role in ((COS, "cos"), (HOST, "client")):
        found = seen(tmp_path, party, calls(party))
        assert {kind for kind in found if not declared[role][kind].allowed} == set(), party
        assert ("masked_vector" in found) == masked
