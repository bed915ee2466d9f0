from __future__ import annotations

import hashlib
import struct
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from coterie.rounds.plan_hash import holding_of, keys_hash, plan_hash
from coterie.rounds.plan_versions import LATER, check_whole, plan_version, unknown_fields
from coterie.wire.v1.orchestrator_pb2 import (
    Aggregation,
    CohortKind,
    Holding,
    OptimiserPlan,
    PrivacyPlan,
    RoundsPlan,
    RunPlan,
)
from coterie.wire.versions import NEWEST, UnsupportedVersionError

ROUNDS: dict[str, Any] = {
    "cohorts": CohortKind.COHORT_KIND_RANDOM,
    "cohort": 50,
    "group": 100,
    "beacon": bytes(range(32)),
    "party_per_user": True,
    "min_cohort": 20,
    "min_sum": 34,
    "experiment": True,
    "passes": 200,
    "evaluate_every": 5,
    "patience": 3,
    "choose_by": "hit_ratio@10",
    "step_timeout_ms": 60_000,
    "redraw": 50,
    "beacon_signature": bytes(range(64)),
    "sparse": True,
    "server_optimiser": {"name": "fedadam", "rate": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
}
PLAN: dict[str, Any] = {
    "run_id": "spring",
    "system": "drift",
    "form": "published",
    "secure_sum": "clear",
    "dim": 16,
    "rate": 0.2,
    "ridge": 1e-3,
    "theta": 2,
    "item_bias": True,
    "seed": 2**64 - 1,
    "max_staleness": 2000,
    "epochs": 10,
    "min_users": 20,
    "settings": '{"model":"neumf","touch":"once"}',
    "rounds": ROUNDS,
    "holdings": [
        {"owner": "films", "items": 3, "items_sha256": bytes(range(32)), "party": "films"},
        {"owner": "books", "items": 1, "items_sha256": bytes(range(1, 33)), "party": "shop"},
    ],
}
SINCE = {path: version for version, path in LATER}
FIELDS = [
    field
    for field in RunPlan.DESCRIPTOR.fields
    if field.name not in ("rounds", "holdings", "oldest_protocol")
]
OF_ROUNDS = [
    field
    for field in RoundsPlan.DESCRIPTOR.fields
    if field.message_type is None and f"rounds.{field.name}" not in SINCE
]
"""Fields of ``rounds``, which follow those of the plan one after the other; its messages are at the end."""
OF_OPTIMISER = list(OptimiserPlan.DESCRIPTOR.fields)
TERMS = {"rule": "krum", "byzantine": 0.25, "norm_bound": 3.0}
"""A message ``Aggregation``, whose fields come last where it is there."""


def other(field: FieldDescriptor, value: Any) -> Any:
    """Return another value of a field's type."""
    if field.type == FieldDescriptor.TYPE_STRING:
        return value + "x"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes([value[0] ^ 1]) + value[1:]
    if field.type == FieldDescriptor.TYPE_BOOL:
        return not value
    fraction = field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)
    return value / 2 if fraction else value // 2


@pytest.mark.parametrize(
    ("later", "ending"),
    [
        ({}, []),
        ({"oldest_protocol": 2}, [b"oldest_protocol", struct.pack(">Q", 2)]),
        (
            {"oldest_protocol": 2, "rounds": {**ROUNDS, "most_users": 9, "channel_rounds": 7}},
            [
                *(b"oldest_protocol", struct.pack(">Q", 2)),
                *(b"rounds.most_users", struct.pack(">Q", 9)),
                *(b"rounds.channel_rounds", struct.pack(">Q", 7)),
            ],
        ),
    ],
    ids=["of version 1", "with later fields", "with later fields of the rounds"],
)
def test_the_hash_is_over_the_explicit_bytes_that_the_protocol_describes(
    later: dict[str, Any], ending: list[bytes]
) -> None:
    """Each field in the contract's order, 4 bytes of length before its content."""
    contents = []
    for field, value in [
        *((field, PLAN[field.name]) for field in FIELDS),
        *((field, ROUNDS[field.name]) for field in OF_ROUNDS),
    ]:
        if field.type == FieldDescriptor.TYPE_STRING:
            contents.append(value.encode())
        elif field.type == FieldDescriptor.TYPE_BYTES:
            contents.append(value)
        elif field.type == FieldDescriptor.TYPE_FLOAT:
            contents.append(struct.pack(">f", value))
        else:
            contents.append(struct.pack(">Q", int(value)))
    contents.append(struct.pack(">Q", 2))
    for one in PLAN["holdings"]:
        contents += [one["owner"].encode(), struct.pack(">Q", one["items"]), one["items_sha256"]]
        contents.append(one["party"].encode())
    optimiser = ROUNDS["server_optimiser"]
    contents += [b"server_optimiser", optimiser["name"].encode()]
    contents += [struct.pack(">d", optimiser[name]) for name in ("rate", "beta1", "beta2", "tau")]
    contents += ending
    packed = b"coterie/v1/plan" + b"".join(struct.pack(">I", len(one)) + one for one in contents)
    assert plan_hash(RunPlan(**{**PLAN, **later})) == hashlib.sha256(packed).digest()


def test_the_plan_of_this_test_names_every_field() -> None:
    assert {field.name for field in RunPlan.DESCRIPTOR.fields} == {*PLAN, "oldest_protocol"}
    assert {field.name for field in OF_ROUNDS} == ROUNDS.keys() - {"server_optimiser"}
    assert [field.name for field in OF_OPTIMISER] == list(ROUNDS["server_optimiser"])
    assert {field.name for field in RoundsPlan.DESCRIPTOR.fields} == {
        *ROUNDS,
        "aggregation",
        "privacy",
        "most_users",
        "channel_rounds",
    }
    # The explicit bytes above end with the fields of ``rounds``, of each holding and of the optimiser.
    assert [field.name for field in RunPlan.DESCRIPTOR.fields[14:16]] == ["rounds", "holdings"]
    assert {field.name for field in Holding.DESCRIPTOR.fields} == PLAN["holdings"][0].keys()


OF_VERSION_1 = {
    "RunPlan": 16,
    "Holding": 4,
    "RoundsPlan": 19,
    "PrivacyPlan": 10,
    "OptimiserPlan": 5,
    "Aggregation": 3,
}
"""How many fields each message of a plan had in version 1: fields are numbered without gaps."""


def test_every_field_of_a_plan_since_version_1_has_a_version() -> None:
    """A field that is added without one would be in no hash, or change the hash that older parties compute."""
    later = set()
    for kind, prefixes in {
        RunPlan: [""],
        RoundsPlan: ["rounds."],
        Holding: ["holdings."],
        PrivacyPlan: ["rounds.privacy."],
        OptimiserPlan: ["rounds.server_optimiser."],
        Aggregation: ["rounds.aggregation."],
    }.items():
        for field in kind.DESCRIPTOR.fields:
            if field.number > OF_VERSION_1[kind.DESCRIPTOR.name]:
                assert field.message_type is None, "hashed by hand: say so here"
                later |= {f"{prefix}{field.name}" for prefix in prefixes}
    assert later == SINCE.keys()
    versions = [version for version, _ in LATER]
    assert versions == sorted(versions)
    assert not versions or (versions[0] > 1 and versions[-1] <= NEWEST)


def test_a_later_field_with_its_default_leaves_the_hash_as_older_parties_compute_it() -> None:
    plan = RunPlan(**PLAN)
    before = plan_hash(plan)
    plan.oldest_protocol = 0
    assert plan_hash(plan) == before
    assert plan_version(plan) == 1
    plan.oldest_protocol = 1
    assert plan_hash(plan) != before
    plan.oldest_protocol = 2
    assert plan_version(plan) == 2


def test_a_plan_whose_population_is_open_asks_for_the_version_that_brought_it() -> None:
    plan = RunPlan(**PLAN)
    plan.rounds.most_users = 100
    assert plan_version(plan) == 2


@pytest.mark.parametrize(
    ("secure_sum", "version"), [("clear", 1), ("masked", 1), ("encrypted", 2), ("shared-key", 2)]
)
def test_a_plan_of_sums_with_pads_asks_for_the_version_that_has_them(secure_sum, version) -> None:
    plan = RunPlan(**PLAN)
    plan.secure_sum = secure_sum
    assert plan_version(plan) == version


def test_a_plan_with_a_field_of_a_later_release_is_refused_with_where_it_is() -> None:
    plan = RunPlan(**PLAN)
    assert unknown_fields(plan) == []
    check_whole(plan, "cos/main", "this party")
    plan.rounds.MergeFromString(b"\x98\x06\x05")
    plan.holdings[1].MergeFromString(b"\x9a\x06\x01x")
    assert unknown_fields(plan) == ["plan.rounds: field 99", "plan.holdings: field 99"]
    with pytest.raises(
        UnsupportedVersionError, match=r"cos/main sent a plan .*field 99.*upgrade of this party"
    ):
        check_whole(plan, "cos/main", "this party")


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_field_of_the_plan_is_in_its_hash(field: FieldDescriptor) -> None:
    changed = {**PLAN, field.name: other(field, PLAN[field.name])}
    assert plan_hash(RunPlan(**changed)) != plan_hash(RunPlan(**PLAN))


@pytest.mark.parametrize("field", OF_ROUNDS, ids=lambda field: field.name)
def test_every_field_of_the_rounds_is_in_its_hash(field: FieldDescriptor) -> None:
    rounds = {**ROUNDS, field.name: other(field, ROUNDS[field.name])}
    assert plan_hash(RunPlan(**{**PLAN, "rounds": rounds})) != plan_hash(RunPlan(**PLAN))


@pytest.mark.parametrize("field", OF_OPTIMISER, ids=lambda field: field.name)
def test_every_field_of_the_optimiser_is_in_the_hash(field: FieldDescriptor) -> None:
    own = ROUNDS["server_optimiser"]
    rounds = {**ROUNDS, "server_optimiser": {**own, field.name: other(field, own[field.name])}}
    assert plan_hash(RunPlan(**{**PLAN, "rounds": rounds})) != plan_hash(RunPlan(**PLAN))


def test_a_plan_without_an_optimiser_hashes_to_what_it_did_before_there_were_any() -> None:
    rounds = {name: value for name, value in ROUNDS.items() if name != "server_optimiser"}
    found = plan_hash(RunPlan(**{**PLAN, "rounds": rounds}))
    earlier = "174c6af8ddffe3dd3e5aab04fa990fb1c02f9456ecb28f47ef33603ce352fdf6"  # pragma: allowlist secret
    assert found.hex() == earlier
    assert found != plan_hash(RunPlan(**PLAN))


@pytest.mark.parametrize("field", list(Holding.DESCRIPTOR.fields), ids=lambda field: field.name)
@pytest.mark.parametrize("position", range(2))
def test_every_field_of_every_holding_is_in_the_hash(field: FieldDescriptor, position: int) -> None:
    holdings = [dict(one) for one in PLAN["holdings"]]
    holdings[position][field.name] = other(field, holdings[position][field.name] or 2)
    assert plan_hash(RunPlan(**{**PLAN, "holdings": holdings})) != plan_hash(RunPlan(**PLAN))
    fewer = {**PLAN, "holdings": PLAN["holdings"][:1]}
    assert plan_hash(RunPlan(**fewer)) != plan_hash(RunPlan(**PLAN))


def test_terms_of_aggregation_are_in_the_hash_where_they_are_there_and_nothing_is_where_they_are_not() -> (
    None
):
    def hashed(**terms: Any) -> bytes:
        return plan_hash(RunPlan(**{**PLAN, "rounds": {**ROUNDS, "aggregation": terms}}))

    plain = plan_hash(RunPlan(**PLAN))
    changes = [{"rule": "median"}, {"byzantine": 0.5}, {"norm_bound": 1.0}]
    found = {plain, hashed(), hashed(**TERMS), *(hashed(**{**TERMS, **one}) for one in changes)}
    assert len(found) == 3 + len(changes)
    assert {field.name for field in Aggregation.DESCRIPTOR.fields} == TERMS.keys()
    # What a plan without them was hashed to before there were any: nothing is left of a message that is cleared.
    cleared = RunPlan(**{**PLAN, "rounds": {**ROUNDS, "aggregation": TERMS}})
    cleared.rounds.ClearField("aggregation")
    assert plan_hash(cleared) == plain


NOISE = {
    "place": "local",
    "mechanism": "laplace",
    "noise": 4.0,
    "clip": 0.5,
    "most_items": 100,
    "most_metrics": 10.0,
    "delta": 1e-5,
    "colluders": 3,
    "per_value": True,
    "epsilon": 8.0,
}
"""A message ``PrivacyPlan``, whose fields come last where it is there."""


def test_every_term_of_privacy_is_in_the_hash_where_there_is_noise_and_nothing_is_where_there_is_none() -> (
    None
):
    def hashed(**terms: Any) -> bytes:
        return plan_hash(RunPlan(**{**PLAN, "rounds": {**ROUNDS, "privacy": terms}}))

    fields = list(PrivacyPlan.DESCRIPTOR.fields)
    assert {field.name for field in fields} == NOISE.keys()
    changed = [hashed(**{**NOISE, one.name: other(one, NOISE[one.name])}) for one in fields]
    assert len({plan_hash(RunPlan(**PLAN)), hashed(**NOISE), *changed}) == 2 + len(fields)
    cleared = RunPlan(**{**PLAN, "rounds": {**ROUNDS, "privacy": NOISE}})
    cleared.rounds.ClearField("privacy")
    assert plan_hash(cleared) == plan_hash(RunPlan(**PLAN))


@given(st.lists(st.text(max_size=4), max_size=5), st.randoms())
def test_a_holding_is_the_same_in_whatever_order_and_the_catalogue_is_not(keys: list[str], rng: Any) -> None:
    shuffled = list(keys)
    rng.shuffle(shuffled)
    assert holding_of("films", keys, "films") == holding_of("films", [*shuffled, *keys], "films")
    assert (keys_hash(keys) == keys_hash(shuffled)) == (keys == shuffled)


def test_a_plan_without_rounds_is_one_with_empty_rounds_and_another_than_one_with_them() -> None:
    without = {name: value for name, value in PLAN.items() if name != "rounds"}
    assert plan_hash(RunPlan(**without)) == plan_hash(RunPlan(**without, rounds=RoundsPlan()))
    assert plan_hash(RunPlan(**without)) != plan_hash(RunPlan(**PLAN))


@given(st.text(max_size=6), st.text(max_size=6), st.integers(0, 6))
def test_text_that_moves_from_one_field_into_the_next_is_another_plan(left: str, right: str, at: int) -> None:
    joined = left + right
    moved = {"run_id": joined[:at], "system": joined[at:]}
    same = (joined[:at], joined[at:]) == (left, right)
    first = plan_hash(RunPlan(**{**PLAN, "run_id": left, "system": right}))
    assert (plan_hash(RunPlan(**{**PLAN, **moved})) == first) == same


@given(st.binary(max_size=8))
def test_the_hash_survives_the_wire_whatever_the_serialisation_says(unknown: bytes) -> None:
    """Serialised messages are not canonical; the hash does not depend on them."""
    plan = RunPlan(**PLAN)
    # An unknown field (number 1000, bytes), as a later release may send it.
    sent = plan.SerializeToString() + b"\xc2\x3e" + bytes([len(unknown)]) + unknown
    assert plan_hash(RunPlan.FromString(sent)) == plan_hash(plan)


def test_rates_count_as_the_single_precision_that_travels() -> None:
    assert plan_hash(RunPlan(**{**PLAN, "rate": 0.2 + 1e-12})) == plan_hash(RunPlan(**PLAN))
