"""Declared visibility of data, and its audit on bytes."""

from __future__ import annotations

import base64
import sqlite3

import numpy as np
import pytest
from google.protobuf import message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.privacy.canaries import Canary, CanaryKit, PatternSearch, pack_records
from coterie.privacy.fields import FIELD_KINDS, PROTOCOL_MESSAGES, kinds_in, reachable_kinds
from coterie.privacy.transcript import TranscriptWriter
from coterie.privacy.visibility import KINDS, ROLES, Audit, audit, observed
from coterie.systems.visibility import matrix, rows_of
from coterie.wire.chunks import split
from coterie.wire.tensor import to_wire
from coterie.wire.v1 import (
    client_pb2,
    common_pb2,
    data_owner_pb2,
    expansion_pb2,
    intakes_pb2,
    latency_pb2,
    latents_pb2,
    log_pb2,
    operator_pb2,
    orchestrator_pb2,
    rounds_pb2,
    thirdparty_pb2,
)
from coterie.wire.v1.client_pb2 import RecordInteractionRequest
from coterie.wire.v1.common_pb2 import KeyBundle
from coterie.wire.v1.data_owner_pb2 import SealedBatch, SubmitInteractionsRequest
from coterie.wire.v1.orchestrator_pb2 import (
    Catalogue,
    ExchangeRequest,
    ExchangeResponse,
    FetchResponse,
    Gradient,
    RegisterRequest,
    SubmitKind,
    SubmitRequest,
)
from coterie.wire.v1.thirdparty_pb2 import EnrolRequest

DRIFT = ("drift", "published", "clear")
PUBLISHED = rows_of(*DRIFT)
COS, OWNER, CLIENT, THIRD = "cos/cos", "data-owner/drama", "client/host-0", "thirdparty/directory"


def recorded(path, party, calls):
    """Write (side, rpc, peer, direction, message) of one party."""
    with TranscriptWriter(path, party) as writer:
        for side, rpc, peer, direction, message in calls:
            writer.side(side).record(
                rpc=rpc, peer=peer, direction=direction, payload=message.SerializeToString()
            )
    return [path]


def slots(*values):
    return to_wire(np.array(values, np.uint32))


def fetched(payload: bytes):
    return [FetchResponse(chunk=chunk) for chunk in split(payload)]


# --- the matrix


SHIELDED = [("drift", "shielded", sum_) for sum_ in ("clear", "masked")]
FEDNCF = [("fedncf", form, sum_) for form in ("hosts", "users") for sum_ in ("clear", "masked")]


@pytest.mark.parametrize("combination", [DRIFT, *SHIELDED, *FEDNCF], ids=" ".join)
def test_every_role_and_kind_has_an_entry_with_a_reason(combination):
    declared = matrix(*combination)
    assert set(declared) == set(ROLES)
    for kinds in declared.values():
        assert set(kinds) == set(KINDS)
        assert all(access.why for access in kinds.values())


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        ("cos", {"user_factor", "item_factor", "item_gradient", "requested_rows", "metric_sum", "item_key"}),
        ("data-owner", {"interaction", "sealed_record", "user_factor", "item_factor", "requested_rows"}),
        ("client", {"interaction", "history", "user_name", "item_factor", "user_factor", "metric_sum"}),
        ("thirdparty", {"public_key", "enrolment_token", "participant_id"}),
        ("operator", {"metric_mean", "run_state", "plan"}),
    ],
)
def test_each_role_may_see_what_its_part_needs(role, allowed):
    kinds = matrix(*DRIFT)[role]
    assert {kind for kind in allowed if not kinds[kind].allowed} == set()


@pytest.mark.parametrize(
    ("role", "denied"),
    [
        ("cos", {"interaction", "history", "user_name", "user_metric", "sealed_record"}),
        ("data-owner", {"history", "user_name", "user_metric", "metric_sum", "recommendation"}),
        ("client", {"user_gradient", "item_gradient", "requested_rows"}),
        (
            "thirdparty",
            set(KINDS)
            - {"public_key", "secret_key", "enrolment_token", "participant_id", "endpoint"}
            - {"protocol", "sealed_key"}
            # What users publish to it without their names, and in runs with a graph key only.
            - {"sealed_expansion", "upload_id", "item_tag", "sealed_embedding", "graph_counts"}
            - {"latent_ciphertext", "pseudo_latent", "latent_counts"},
        ),
        ("operator", {"interaction", "history", "user_name", "user_factor", "item_factor"}),
    ],
)
def test_no_role_may_see_more(role, denied):
    kinds = matrix(*DRIFT)[role]
    assert {kind for kind in denied if kinds[kind].allowed} == set()


def test_what_is_a_users_or_owners_is_only_its_own():
    declared = matrix(*DRIFT)
    assert declared["data-owner"]["interaction"].own_only
    assert declared["client"]["history"].own_only
    assert not declared["cos"]["user_factor"].own_only


NEVER = {"interaction", "history", "user_name", "private_state", "recommendation"}
OF_ONE_USER = {"user_update", "user_metric", "user_items"}
OF_A_HOST = {"host_update", "metric_sum", "host_items"}
MASKED = {"masked_vector", "round_key", "sealed_share", "revealed_share"}
OF_ROUNDS = {"private_state", "user_update", "host_update", "user_items", "host_items", "round_sum"}
OF_ROUNDS |= {"item_support", "open_items", "cohort"} | MASKED


def allowed(role, combination):
    return {kind for kind, access in matrix(*combination)[role].items() if access.allowed}


@pytest.mark.parametrize("role", ROLES)
def test_nothing_of_rounds_is_carried_where_there_are_none(role):
    assert allowed(role, DRIFT) & OF_ROUNDS == set()


@pytest.mark.parametrize("combination", FEDNCF, ids=" ".join)
def test_in_fedncf_what_a_user_has_stays_at_its_host(combination):
    declared = matrix(*combination)
    for role in set(ROLES) - {"client", "operator"}:
        assert allowed(role, combination) & NEVER == set(), role
    # The operator stands in for the user's application.
    assert allowed("operator", combination) & NEVER == {"recommendation"}
    assert all(declared["client"][kind].own_only for kind in NEVER)


@pytest.mark.parametrize(
    ("combination", "of_contributions"),
    [
        (("fedncf", "users", "clear"), OF_ONE_USER),
        (("fedncf", "hosts", "clear"), OF_A_HOST | OF_ONE_USER),
        (("fedncf", "users", "masked"), MASKED),
        (("fedncf", "hosts", "masked"), MASKED),
    ],
    ids=lambda value: "of " + (" ".join(value) if isinstance(value, tuple) else str(len(value))),
)
def test_of_contributions_the_cos_sees_what_the_form_of_the_sum_leaves_it(combination, of_contributions):
    seen = allowed("cos", combination)
    assert seen & (OF_ONE_USER | OF_A_HOST | MASKED) == of_contributions
    assert {"round_sum", "item_support", "metric_mean", "cohort", "item_factor"} <= seen


def test_where_hosts_add_up_the_cos_sees_a_single_users_contribution_only_of_a_user_who_is_alone():
    declared = matrix("fedncf", "hosts", "clear")["cos"]
    assert all(declared[kind].own_only for kind in OF_ONE_USER)
    assert not any(declared[kind].own_only for kind in OF_A_HOST)
    kit = CanaryKit(3)
    kit.plant("user_update", b"the update of one of many", holders=[CLIENT])
    kit.plant("user_update", b"the update of a user alone", holders=["client/phone", COS])
    search = Audit(kit, rows_of("fedncf", "hosts", "clear"))
    search.audit_bytes(COS, "Submit received", b"the update of a user alone")
    assert search.result().violations == ()
    search.audit_bytes(COS, "Submit received", b"the update of one of many")
    (violation,) = search.result().violations
    assert "the only one of its host" in violation.why


@pytest.mark.parametrize("combination", FEDNCF, ids=" ".join)
def test_in_fedncf_owners_third_party_and_operator_see_nothing_of_contributions_and_sums(combination):
    private = OF_ONE_USER | OF_A_HOST | MASKED | {"round_sum", "item_support", "cohort"}
    for role in ("data-owner", "thirdparty", "operator"):
        assert allowed(role, combination) & private == set(), role
    assert {"item_key", "holding", "item_factor"} <= allowed("data-owner", combination)


def test_what_does_not_depend_on_the_system_is_declared_once_for_all():
    tables = [matrix(*combination) for combination in (DRIFT, *FEDNCF)]
    for kind in ("user_name", "secret_key", "enrolment_token", "public_key", "endpoint", "plan", "protocol"):
        for role in ROLES:
            assert len({id(table[role][kind].why) for table in tables}) == 1, (role, kind)


def test_a_combination_that_is_not_declared_is_refused():
    with pytest.raises(ConfigError, match="hidden"):
        matrix("drift", "hidden", "masked")


# --- what a transcript's messages show


MODULES = (
    common_pb2,
    client_pb2,
    data_owner_pb2,
    expansion_pb2,
    intakes_pb2,
    latency_pb2,
    latents_pb2,
    log_pb2,
    operator_pb2,
    orchestrator_pb2,
    rounds_pb2,
    thirdparty_pb2,
)
AS_A_WHOLE = {
    # An array or a chunk has the kind of the field that holds it; a receipt, preference, plan or state, of the whole.
    *(
        "Tensor",
        "Chunk",
        "Disclosure",
        "Declined",
        "Preference",
        "PreferenceChange",
        "RunPlan",
        "RoundsPlan",
        "RunState",
    ),
    *("PhaseEvent", "RoundEvent", "RoundProgress"),
    # Payloads of Submit whose label says what they are.
    *("DeliveryStatus", "EpochStatus", "MetricSums"),
}


def every_message_class():
    return {
        name: descriptor
        for module in MODULES
        for name, descriptor in module.DESCRIPTOR.message_types_by_name.items()
    }


def test_every_field_of_the_contract_has_a_kind():
    unknown = {
        name
        for name, descriptor in every_message_class().items()
        if name not in AS_A_WHOLE and not reachable_kinds(descriptor) <= set(KINDS) - {"unclassified"}
    }
    assert unknown == set()
    assert set(FIELD_KINDS.values()) <= set(KINDS)


def test_what_counts_as_a_whole_has_a_kind_wherever_a_message_of_an_rpc_holds_it():
    for module in MODULES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                for descriptor in (method.input_type, method.output_type):
                    assert "unclassified" not in reachable_kinds(descriptor), descriptor.name


def test_the_table_names_only_fields_that_exist():
    existing = every_message_class()
    for name in FIELD_KINDS:
        message, field = name.split(".")
        assert field in {each.name for each in existing[message].fields}, name
    assert set(existing) >= PROTOCOL_MESSAGES


def test_the_kinds_of_a_message_are_those_of_the_fields_that_are_set():
    request = ExchangeRequest(run_id="r", owner=1, users=slots(1), items=slots(2))
    assert set(kinds_in(request)) == {"protocol", "slot", "requested_rows"}
    request.gradient.CopyFrom(Gradient(loss=1.0, item_gradient=to_wire(np.ones((1, 2), np.float32))))
    assert set(kinds_in(request)) == {"protocol", "slot", "requested_rows", "block_loss", "item_gradient"}


def test_every_class_of_the_contract_can_be_looked_into():
    for descriptor in every_message_class().values():
        assert list(kinds_in(message_factory.GetMessageClass(descriptor)())) == []


def test_each_party_is_seen_to_hold_what_passed_it(tmp_path):
    exchange = ExchangeRequest(run_id="r", owner=1, users=slots(1), items=slots(2))
    exchange.gradient.CopyFrom(Gradient(rows_version=1, item_gradient=to_wire(np.ones((1, 2), np.float32))))
    answer = ExchangeResponse(version=2, user_rows=to_wire(np.ones((1, 2), np.float32)))
    batch = SubmitInteractionsRequest(batches=[SealedBatch(user=b"u" * 32, ciphertext=b"c" * 40)])
    catalogue = Catalogue(version=1, items=["a", "b"], owner_counts=[1, 1], owner_positions=[0, 0])
    model = to_wire(np.ones((2, 4), np.float32))
    metrics = SubmitRequest(kind=SubmitKind.SUBMIT_KIND_METRICS)
    seen = observed(
        {
            COS: recorded(
                tmp_path / "cos",
                COS,
                [
                    ("server", "Exchange", OWNER, "received", exchange),
                    ("server", "Exchange", OWNER, "sent", answer),
                    ("server", "Submit", CLIENT, "received", metrics),
                    ("server", "Register", OWNER, "received", RegisterRequest(items=["a"])),
                ],
            ),
            OWNER: recorded(
                tmp_path / "owner",
                OWNER,
                [
                    ("server", "SubmitInteractions", CLIENT, "received", batch),
                    ("client", "Exchange", COS, "received", answer),
                ],
            ),
            CLIENT: recorded(
                tmp_path / "client",
                CLIENT,
                [
                    ("client", "Fetch", COS, "received", each)
                    for payload in (catalogue, model)
                    for each in fetched(payload.SerializeToString())
                ]
                + [
                    (
                        "server",
                        "RecordInteraction",
                        "operator/x",
                        "received",
                        RecordInteractionRequest(user="u"),
                    )
                ],
            ),
            THIRD: recorded(
                tmp_path / "third",
                THIRD,
                [
                    (
                        "server",
                        "Enrol",
                        "",
                        "received",
                        EnrolRequest(token="t", bundles=[KeyBundle(version=1)]),
                    )
                ],
            ),
        }
    )
    kinds = {party: {kind for kind, held in row.items() if held} for party, row in seen.items()}
    assert kinds[COS] == {
        "protocol",
        "slot",
        "requested_rows",
        "item_gradient",
        "user_factor",
        "metric_sum",
        "item_key",
    }
    assert kinds[OWNER] == {"participant_id", "sealed_record", "interaction", "protocol", "user_factor"}
    assert kinds[CLIENT] == {"protocol", "item_key", "holding", "item_factor", "user_name"}
    assert kinds[THIRD] == {"enrolment_token", "public_key"}
    assert all(set(row) == set(KINDS) for row in seen.values())
    allowed = matrix(*DRIFT)
    for party, row in kinds.items():
        assert all(allowed[party.split("/")[0]][kind].allowed for kind in row)


def test_sealed_records_at_the_cos_are_not_interactions_but_not_allowed_either(tmp_path):
    batch = SubmitInteractionsRequest(batches=[SealedBatch(ciphertext=b"c" * 40)])
    calls = [("client", "SubmitInteractions", OWNER, "sent", batch)]
    seen = observed({COS: recorded(tmp_path / "cos", COS, calls)})[COS]
    assert seen["sealed_record"]
    assert not seen["interaction"]
    assert not matrix(*DRIFT)["cos"]["sealed_record"].allowed


def test_a_users_own_rows_are_told_from_the_model_by_the_catalogue(tmp_path):
    catalogue = Catalogue(version=1, items=[f"i{n}" for n in range(9)], owner_counts=[0] * 9)
    rows = to_wire(np.ones((5, 4), np.float32))
    roster = to_wire(np.ones((5, 32), np.uint8))

    def kinds(*payloads):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        calls = [
            ("client", "Fetch", COS, "received", each)
            for payload in payloads
            for each in fetched(payload.SerializeToString())
        ]
        seen = observed({CLIENT: recorded(path, CLIENT, calls)})[CLIENT]
        return {kind for kind, held in seen.items() if held} - {"protocol", "item_key", "holding"}

    assert kinds(catalogue, rows) == {"user_factor"}
    assert kinds(rows) == {"user_factor", "item_factor"}
    # A table of bytes, as wide as participant ids are, may also be one of open items: nobody was heard to ask.
    assert kinds(roster) == {"participant_id", "slot", "open_items"}


def test_chunks_of_two_calls_at_once_are_put_together_each_for_itself(tmp_path):
    items = 300_000
    model = fetched(to_wire(np.ones((items, 2), np.float32)).SerializeToString())
    rows = fetched(to_wire(np.ones((200_000, 2), np.float32)).SerializeToString())
    catalogue = fetched(Catalogue(items=["x"] * items).SerializeToString())
    assert min(len(model), len(rows)) > 1
    mixed = [model[0], rows[0], *model[1:2], *rows[1:], *model[2:], *catalogue]
    calls = [("client", "Fetch", COS, "received", each) for each in mixed]
    seen = observed({CLIENT: recorded(tmp_path / "t", CLIENT, calls)})[CLIENT]
    assert seen["item_factor"]
    assert seen["user_factor"]
    assert not seen["unclassified"]


def test_a_payload_that_is_nothing_known_is_unclassified(tmp_path):
    calls = [("client", "Fetch", COS, "received", each) for each in fetched(b"\xff" * 40)]
    assert observed({CLIENT: recorded(tmp_path / "t", CLIENT, calls)})[CLIENT]["unclassified"]


def test_a_malformed_message_is_unclassified_and_the_others_still_count(tmp_path):
    with TranscriptWriter(tmp_path / "t", COS) as writer:
        writer.record(rpc="Exchange", peer=OWNER, direction="received", payload=b"\xff\xff")
        request = RegisterRequest(items=["a"]).SerializeToString()
        writer.record(rpc="Register", peer=OWNER, direction="received", payload=request)
    seen = observed({COS: [tmp_path / "t"]})[COS]
    assert {kind for kind, held in seen.items() if held} == {"unclassified", "item_key"}


# --- canaries


def planted() -> tuple[CanaryKit, dict[str, bytes]]:
    """Return a kit with a canary of each sort, and bytes that hold each."""
    kit = CanaryKit(5)
    (user,) = kit.user_names(1)
    (item,) = kit.item_keys(1)
    (token,) = kit.enrolment_tokens(1)
    kit.interactions([1700, 1703, 1701, 1702], [True, False, True, True])
    kit.interactions([1800, 1801, 1802], [True, True, True], kind="history")
    kit.plant("secret_key", bytes(range(100, 132)))
    holding = {
        "user_name": user.encode(),
        "item_key": item.encode(),
        "enrolment_token": token.encode(),
        "interaction": pack_records([1703, 1701, 1702], [False, True, True]),
        "history": pack_records([1800, 1801, 1802], [True] * 3),
        "secret_key": bytes(range(100, 132)),
    }
    for kind in ("user_factor", "item_factor", "item_gradient", "user_gradient"):
        holding[kind] = kit.factors(kind, 2, 8)[1].tobytes()
    return kit, holding


def test_each_kind_of_canary_is_found_and_no_other():
    kit, holding = planted()
    noise = np.random.default_rng(0).bytes(10_000)
    for kind, data in holding.items():
        assert kit.search(noise + data + noise) == {kind}
    assert kit.search(noise) == set()
    assert kit.search(b"") == set()


@pytest.mark.parametrize(
    "notation", [bytes.hex, lambda data: data.hex().upper(), base64.b64encode, base64.urlsafe_b64encode]
)
def test_canaries_are_found_as_logs_write_them(notation):
    kit, holding = planted()
    for kind, data in holding.items():
        for shift in range(3):
            text = notation(b"abc"[:shift] + data + b"tail"[shift:])
            text = text if isinstance(text, bytes) else text.encode()
            assert kit.search(b'{"value": "' + text + b'"}') == {kind}


def test_values_near_a_canary_are_not_taken_for_it():
    kit, _ = planted()
    assert kit.search(pack_records([1703, 1701, 1702], [False, True, False])) == set()
    assert kit.search(pack_records([1700, 1703], [True, False])) == set()
    assert kit.search(np.array([1700, 1703, 1701, 1702], "<u4").tobytes()) == set()
    assert kit.search(b"canary-user-notplanted, canary-item-") == set()


def test_the_same_seed_makes_the_same_canaries_and_another_seed_others():
    assert CanaryKit(1).user_names(3) == CanaryKit(1).user_names(3)
    assert set(CanaryKit(1).user_names(3)).isdisjoint(CanaryKit(2).user_names(3))
    assert np.array_equal(
        CanaryKit(1).factors("user_factor", 2, 4), CanaryKit(1).factors("user_factor", 2, 4)
    )


def test_a_history_is_found_in_arrays_of_indices_in_either_order_and_width():
    kit = CanaryKit(0)
    items = [812, 40, 977, 311, 650]
    assert kit.item_lists(items, holders=[CLIENT]) == 4
    for dtype in ("<u4", "<i8"):
        for order in (items, sorted(items)):
            for four in (order[:4], order[1:]):
                assert kit.search(b"..." + np.array(four, dtype).tobytes() + b"...") == {"history"}
            assert kit.search(np.array(order[:3], dtype).tobytes()) == set()
    # Another user has the same items, and never four of them in a row.
    assert kit.search(np.array([812, 40, 977, 1, 311, 650], "<u4").tobytes()) == set()


def test_items_that_are_counted_off_are_no_history():
    kit = CanaryKit(0)
    assert kit.item_lists([3, 4, 5, 6, 7]) == 0
    assert kit.item_lists([1, 2]) == 0
    assert kit.item_lists([10, 20, 30, 31, 40, 50, 60, 70]) == 2
    assert kit.search(np.arange(1000, dtype="<u4").tobytes()) == set()
    assert kit.search(np.array([40, 50, 60, 70], "<u4").tobytes()) == {"history"}


def test_a_contribution_in_clear_is_found_and_its_masked_form_is_not():
    rng = np.random.default_rng(0)
    zero = np.repeat(np.array([2**15, 1], np.uint32), [300, 20])
    codes = zero.copy()
    codes[12:36] += rng.integers(1, 900, 24).astype(np.uint32)
    codes[100:107] += np.uint32(5)
    kit = CanaryKit(0)
    assert kit.codes("user_update", codes, zero, holders=[CLIENT]) == 3
    assert kit.search(codes.astype("<u4").tobytes()) == {"user_update"}
    masked = codes + rng.integers(0, 2**32, len(codes), dtype=np.uint32)
    assert kit.search(masked.astype("<u4").tobytes()) == set()
    assert kit.search(zero.astype("<u4").tobytes()) == set()
    # Runs of their own each: a part that was cut out is found, too.
    assert kit.search(codes[20:28].astype("<u4").tobytes()) == {"user_update"}


def test_a_contribution_that_changes_nothing_is_no_canary():
    kit = CanaryKit(0)
    assert kit.codes("user_update", np.full(64, 2**15, np.uint32), 2**15) == 0
    assert kit.codes("user_update", np.zeros(3, np.uint32), 2**15) == 0
    assert kit.canaries == ()


def test_private_state_is_found_in_the_file_that_a_host_keeps_it_in(tmp_path):
    kit = CanaryKit(0)
    state = kit.factors("private_state", 5, 12, holders=[CLIENT])
    np.save(tmp_path / "p_u.npy", state)
    search = Audit(kit, rows_of("fedncf", "users", "masked"))
    assert search.audit_tree(CLIENT, tmp_path) == {"private_state"}
    assert search.result().violations == ()
    for other in ("client/host-1", COS, OWNER, THIRD, "operator/operator"):
        assert search.audit_tree(other, tmp_path) == {"private_state"}
    assert {one.party for one in search.result().violations} == {
        "client/host-1",
        COS,
        OWNER,
        THIRD,
        "operator/operator",
    }


def test_state_that_is_still_zero_is_refused_as_a_canary():
    with pytest.raises(ValueError, match="by chance"):
        CanaryKit(0).rows("private_state", np.zeros((2, 12)))


def test_canaries_that_would_occur_by_chance_are_refused():
    with pytest.raises(ValueError, match="by chance"):
        Canary("secret_key", b"short")
    with pytest.raises(ValueError, match="by chance"):
        CanaryKit(0).interactions([1, 2], [True, True])


def test_records_are_packed_as_the_contract_says():
    assert pack_records([1, 0x01020304], [True, False]) == b"\1\0\0\0\1" + b"\4\3\2\1\0"


@settings(max_examples=60)
@given(
    patterns=st.lists(st.binary(min_size=4, max_size=12), min_size=1, max_size=8),
    data=st.binary(max_size=400),
    at=st.integers(0, 400),
    which=st.integers(0, 7),
)
def test_the_search_finds_what_a_plain_search_finds(patterns, data, at, which):
    data = data[:at] + patterns[which % len(patterns)] + data[at:]
    search = PatternSearch((pattern, number) for number, pattern in enumerate(patterns))
    assert search.search(data) == {number for number, pattern in enumerate(patterns) if pattern in data}


def test_the_search_finds_a_pattern_across_its_own_slices():
    pattern = b"over the edge"
    search = PatternSearch([(pattern, 0)])
    for before in range((1 << 22) - 14, (1 << 22) + 2):
        assert search.search(bytes(before) + pattern) == {0}


# --- the audit


def test_an_audit_reports_what_was_seen_by_whom_and_what_may_not_be(tmp_path):
    kit, holding = planted()
    leak = SubmitInteractionsRequest(batches=[SealedBatch(ciphertext=holding["interaction"])])
    fine = ExchangeRequest(run_id="r", items=slots(1700, 1701, 1702, 1703))
    fine.gradient.item_gradient.data = holding["item_gradient"]
    result = audit(
        {
            COS: recorded(
                tmp_path / "cos",
                COS,
                [
                    ("server", "Exchange", OWNER, "received", fine),
                    ("client", "SubmitInteractions", OWNER, "received", leak),
                ],
            ),
            OWNER: recorded(
                tmp_path / "owner", OWNER, [("server", "SubmitInteractions", CLIENT, "received", leak)]
            ),
        },
        kit,
        PUBLISHED,
    )
    assert result.seen[COS] == dict.fromkeys(holding, "not seen") | {
        "interaction": "seen",
        "item_gradient": "seen",
    }
    assert result.seen[OWNER] == dict.fromkeys(holding, "not seen") | {"interaction": "seen"}
    (violation,) = result.violations
    assert (violation.party, violation.kind) == (COS, "interaction")
    assert violation.source == "SubmitInteractions received"
    assert "sealed" in violation.why


def test_what_is_anothers_own_is_a_violation(tmp_path):
    kit = CanaryKit(2)
    (name,) = kit.user_names(1, holders=[CLIENT])
    search = Audit(kit, PUBLISHED)
    search.audit_bytes(CLIENT, "log", f"user {name}".encode())
    assert search.result().violations == ()
    search.audit_bytes("client/host-1", "log", f"user {name}".encode())
    search.audit_bytes("client/host-1", "log", f"again {name}".encode())
    (violation,) = search.result().violations
    assert violation.party == "client/host-1"
    assert CLIENT in violation.why


def test_every_file_of_a_folder_is_searched(tmp_path):
    kit, holding = planted()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "service.log").write_bytes(b"joined: " + holding["user_name"] + b"\n")
    with sqlite3.connect(tmp_path / "cos.db") as database:
        database.execute("create table t (name text, payload blob)")
        database.execute("insert into t values ('x', ?)", (holding["interaction"],))
    database.close()
    (tmp_path / holding["enrolment_token"].decode()).write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "deep")
    result = audit({}, kit, PUBLISHED, folders={COS: [tmp_path]})
    assert {(each.kind, each.source) for each in result.violations} == {
        ("user_name", "deep/er/service.log"),
        ("interaction", "cos.db"),
    }
    assert result.seen[COS]["enrolment_token"] == "seen"


def test_a_canary_across_two_pieces_of_a_file_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("coterie.privacy.visibility._PIECE_BYTES", 64)
    kit, holding = planted()
    for before in range(40, 70):
        (tmp_path / "log").write_bytes(b"." * before + holding["user_name"] + b"." * 100)
        assert Audit(kit, PUBLISHED).audit_tree(COS, tmp_path) == {"user_name"}


def test_two_messages_do_not_make_a_canary_between_them(tmp_path):
    kit = CanaryKit(0)
    kit.plant("secret_key", b"first-half-second-half")
    halves = [RegisterRequest(run_id="first-half-"), RegisterRequest(run_id="second-half")]
    calls = [("server", "Register", CLIENT, "received", each) for each in halves]
    result = audit({COS: recorded(tmp_path / "t", COS, calls)}, kit, PUBLISHED)
    assert result.seen == {COS: dict.fromkeys(["secret_key"], "not seen")}


def test_a_party_that_saw_nothing_is_in_the_result(tmp_path):
    kit, holding = planted()
    result = audit({THIRD: recorded(tmp_path / "t", THIRD, [])}, kit, PUBLISHED)
    assert result.seen == {THIRD: dict.fromkeys(holding, "not seen")}


def test_a_party_without_a_known_role_is_refused():
    with pytest.raises(ConfigError, match="roles"):
        Audit(CanaryKit(0), PUBLISHED).audit_bytes("stranger/x", "log", b"")
