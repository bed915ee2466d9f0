"""Versions of the protocol at the sockets: highest common one, or a refusal that says what to upgrade."""

import asyncio
import contextlib
import itertools
import json
import time

import grpc
import pytest
import sqlalchemy as sa
import structlog

from coterie.crypto.identity import Delegation
from coterie.net.channel import connect
from coterie.net.meter import Meter
from coterie.net.retry import Retry
from coterie.net.status import abort
from coterie.parties.party import Party, Registrant
from coterie.rounds.plan_features import FEATURES
from coterie.rounds.plan_hash import plan_hash
from coterie.secure_sum.bundles import bundle_to_wire
from coterie.store.backup import read_manifest
from coterie.store.engine import migrate
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import operator_pb2 as operating
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import Delegation as WireDelegation
from coterie.wire.v1.common_pb2 import Protocol
from coterie.wire.v1.operator_pb2_grpc import OperatorStub
from coterie.wire.v1.orchestrator_pb2_grpc import (
    OrchestratorServicer,
    OrchestratorStub,
    add_OrchestratorServicer_to_server,
)
from coterie.wire.v1.thirdparty_pb2 import EnrolRequest, RevocationsRequest, RevocationsResponse
from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryServicer, add_KeyDirectoryServicer_to_server
from coterie.wire.versions import NEWEST, OLDEST, UnsupportedVersionError, own

from .conftest import Member
from .hosting import NAMES, SETTINGS, write_histories

SOON_S = 60.0
USER = wire.ParticipantKind.PARTICIPANT_KIND_USER
JOIN = wire.RegisterIntent.REGISTER_INTENT_JOIN
LEAVE = wire.RegisterIntent.REGISTER_INTENT_LEAVE
NUMBERS = itertools.count()
FUTURE = Protocol(oldest=NEWEST + 7, newest=NEWEST + 9, release="9.1.0")
"""What a process of a far later release says."""
IN_ROUNDS = {
    "system": "fedncf",
    "form": "hosts",
    "settings": SETTINGS.to_json(),
    "rounds": wire.RoundsPlan(
        cohorts=wire.CohortKind.COHORT_KIND_ALL,
        cohort=1,
        group=1000,
        beacon=bytes(32),
        min_cohort=1,
        min_sum=1,
        experiment=True,
        passes=1,
        evaluate_every=1,
        choose_by="validation_ndcg_all@10",
        step_timeout_ms=3_600_000,
    ),
}
"""Changes to a plan that make it one of a system that learns in rounds."""


@pytest.fixture(scope="module")
def host(shared_third_party):
    return asyncio.run(shared_third_party.enrol("client", "versioned-host", 2))


def new_run():
    return f"versions-{next(NUMBERS)}-{time.monotonic_ns()}"


def members(enrolled):
    return [Registrant(one, b, USER) for one, b in zip(enrolled.identities, enrolled.bundles, strict=True)]


def registration(host, run, said=None, intent=JOIN):
    """Return what a host sends to register, with what it says of its versions."""
    participants = []
    for one, bundle in zip(host.identities, host.bundles, strict=True):
        made = Delegation.sign(one, host.fingerprint, run, int(time.time()) + 3600)
        participants.append(
            wire.Participant(
                bundle=bundle_to_wire(bundle),
                delegation=WireDelegation(
                    certificate_fingerprint=made.certificate_fingerprint,
                    run_id=made.run_id,
                    expiry=made.expiry,
                    signature=made.signature,
                ),
                kind=USER,
            )
        )
    return wire.RegisterRequest(run_id=run, intent=intent, participants=participants, protocol=said)


# --- The orchestration server --------------------------------------------------------------------------------------


async def test_a_party_that_names_no_version_joins_and_gets_the_plan_hashed_as_it_hashes_it(
    cos, operator, host, calls
):
    run = new_run()
    await operator.start(run)
    at = cos.channel(host).stub(OrchestratorStub)
    answer = await at.Register(calls.each(registration(host, run)))
    assert answer.plan_hash == plan_hash(answer.plan)
    assert (answer.protocol.oldest, answer.protocol.newest) == (OLDEST, NEWEST)
    # As a release before versions were exchanged: its poll names none either.
    tasks = await at.Poll(wire.PollRequest(run_id=run))
    assert tasks.newest_protocol == NEWEST


async def test_a_party_speaks_the_highest_common_version(cos, operator, host, calls):
    run = new_run()
    await operator.start(run)
    party = calls.party_at(cos, host, run)
    await party.register(members(host))
    assert party.protocol == NEWEST
    wider = Protocol(oldest=OLDEST, newest=NEWEST + 5, features=["sum/clear"])
    at = cos.channel(host).stub(OrchestratorStub)
    answer = await at.Register(calls.each(registration(host, run, wider)))
    assert answer.protocol.newest == NEWEST


async def test_a_party_without_a_common_version_is_refused_by_name(cos, operator, host, calls):
    run = new_run()
    await operator.start(run)
    at = cos.channel(host).stub(OrchestratorStub)
    why = await calls.refused(lambda: at.Register(calls.each(registration(host, run, FUTURE))))
    assert (why.code, why.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "UNSUPPORTED_VERSION")
    assert "client/versioned-host (release 9.1.0)" in why.text
    assert f"versions {NEWEST + 7} to {NEWEST + 9}" in why.text
    assert "an upgrade of the service" in why.expected
    refused = {"rpc": "Register", "reason": "UNSUPPORTED_VERSION"}
    assert await asyncio.to_thread(cos.metric, "coterie_refusals_total", **refused) >= 1
    # Nobody was registered.
    assert (await operator.state(run)).users == 0


async def test_a_run_that_asks_for_a_later_version_refuses_older_parties_at_registration_and_at_polls(
    cos, operator, host, calls
):
    run = new_run()
    await operator.start(run, oldest_protocol=2)
    at = cos.channel(host).stub(OrchestratorStub)
    why = await calls.refused(lambda: at.Register(calls.each(registration(host, run))))
    assert why.reason == "UNSUPPORTED_VERSION"
    assert "client/versioned-host speaks version 1 of the protocol, and version 2 is asked for" in why.text
    assert why.expected == "an upgrade of client/versioned-host, to a release that speaks version 2"
    # The operator sees it, until the party was upgraded.
    assert "client/versioned-host speaks version 1" in (await operator.state(run)).waiting
    party = calls.party_at(cos, host, run)
    await party.register(members(host))
    assert party.plan.oldest_protocol == 2
    assert (await operator.state(run)).waiting == ""
    # The party is replaced by one of an older release, in the middle of the run.
    why = await calls.refused(at.Poll(wire.PollRequest(run_id=run)))
    assert why.reason == "UNSUPPORTED_VERSION"
    # It may still leave.
    await at.Register(calls.each(registration(host, run, intent=LEAVE)))


async def test_a_party_that_lacks_what_the_plan_asks_for_is_refused_with_what_it_lacks(
    cos, operator, host, calls
):
    run = new_run()
    await operator.start(run)
    at = cos.channel(host).stub(OrchestratorStub)
    said = Protocol(oldest=1, newest=2, features=["sum/masked"])
    why = await calls.refused(lambda: at.Register(calls.each(registration(host, run, said))))
    assert (why.reason, why.field) == ("UNSUPPORTED_VERSION", "protocol.features")
    assert f"the plan of run {run} asks for sum/clear" in why.text
    assert why.expected == "an upgrade of client/versioned-host"


async def test_the_operator_is_told_of_a_party_that_registers_for_ever_as_one_with_another_hash_does(
    cos, operator, host, calls
):
    run = new_run()
    await operator.start(run)
    at = cos.channel(host).stub(OrchestratorStub)
    for _ in range(19):
        await at.Register(calls.each(registration(host, run)))
    assert (await operator.state(run)).waiting == ""
    # One that polls is well.
    await at.Poll(wire.PollRequest(run_id=run))
    for _ in range(19):
        await at.Register(calls.each(registration(host, run)))
    assert (await operator.state(run)).waiting == ""
    for _ in range(2):
        await at.Register(calls.each(registration(host, run)))
        said = (await operator.state(run)).waiting
        assert said.startswith("client/versioned-host has registered 20 times and takes no part")
    await at.Poll(wire.PollRequest(run_id=run))
    assert (await operator.state(run)).waiting == ""


@pytest.mark.parametrize("system", ["drift", "fedncf"])
async def test_a_run_that_gathered_in_vain_says_which_party_could_not_join(
    cos, operator, host, calls, system
):
    run = new_run()
    changes = {"oldest_protocol": 2}
    if system == "fedncf":
        changes |= IN_ROUNDS
    await operator.start(run, phase_s=3.0, **changes)
    at = cos.channel(host).stub(OrchestratorStub)
    await calls.refused(lambda: at.Register(calls.each(registration(host, run))))
    async with asyncio.timeout(SOON_S):
        async for event in operator.stub.WatchRun(operating.WatchRunRequest(run_id=run)):
            last = event
    assert "gather took too long" in last.state.reason
    assert "client/versioned-host speaks version 1 of the protocol" in last.state.reason


HOSTILE = "\x1b[31m" + "x" * 4000


async def test_the_release_that_a_party_names_is_logged_short_and_printable(cos, operator, host, calls):
    run = new_run()
    await operator.start(run)
    at = cos.channel(host).stub(OrchestratorStub)
    said = own(FEATURES)
    said.release = HOSTILE
    await at.Register(calls.each(registration(host, run, said)))
    lines = [json.loads(line) for line in cos.log.read_text().splitlines() if line.startswith("{")]
    (line,) = [one for one in lines if one["event"] == "a party registers" and one["run"] == run]
    assert line["release"] == "?[31m" + "x" * 35


async def test_a_range_that_is_none_is_refused(cos, operator, host, calls):
    run = new_run()
    await operator.start(run)
    at = cos.channel(host).stub(OrchestratorStub)
    said = Protocol(oldest=2, newest=1, release=HOSTILE)
    why = await calls.refused(lambda: at.Register(calls.each(registration(host, run, said))))
    assert why.reason == "UNSUPPORTED_VERSION"
    assert "\x1b" not in why.text
    assert len(why.text) < 1000


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        # Field 99 of the plan and of its rounds, as a later release may have them.
        (lambda plan: plan.MergeFromString(b"\x98\x06\x05"), "plan"),
        (lambda plan: plan.rounds.MergeFromString(b"\x98\x06\x05"), "plan"),
        (lambda plan: setattr(plan, "oldest_protocol", NEWEST + 1), "plan.oldest_protocol"),
    ],
)
async def test_the_server_starts_no_run_whose_plan_it_does_not_know_whole(operator, calls, spoil, field):
    run = new_run()
    plan = calls.plan(run)
    plan.rounds.SetInParent()
    spoil(plan)
    request = operating.StartRunRequest(
        plan=plan, expect_owners=1, expect_users=1, phase_timeout_ms=60_000, party_timeout_ms=60_000
    )
    why = await calls.refused(operator.stub.StartRun(request))
    assert (why.reason, why.field) == ("UNSUPPORTED_VERSION", field)
    assert "an upgrade of the cos" in why.expected


# --- The third party -----------------------------------------------------------------------------------------------


async def test_the_third_party_answers_callers_that_name_no_version_and_refuses_those_it_cannot_follow(
    third_party, host, calls
):
    directory = third_party.directory(host)
    answer = await directory.Revocations(RevocationsRequest())
    assert (answer.protocol.oldest, answer.protocol.newest) == (OLDEST, NEWEST)
    why = await calls.refused(directory.Revocations(RevocationsRequest(protocol=FUTURE)))
    assert why.reason == "UNSUPPORTED_VERSION"
    assert "client/versioned-host (release 9.1.0)" in why.text
    token = third_party.token("client", "too-new").read_text().strip()
    head = EnrolRequest(token=token, role="client", name="too-new", protocol=FUTURE)
    why = await calls.refused(lambda: third_party.enrolment().Enrol(calls.each(head)))
    assert why.reason == "UNSUPPORTED_VERSION"


# --- A party at servers of other releases --------------------------------------------------------------------------


class OtherCos(OrchestratorServicer):
    """A server of another release: it knows the hosts, and answers what the test says."""

    def __init__(self, plan):
        self.plan, self.hash, self.protocol, self.newest = plan, plan_hash(plan), None, 0
        self.said, self.registrations = [], 0
        self.refusals = []

    async def Register(self, requests, context):  # noqa: N802
        self.registrations += 1
        self.said += [one.protocol async for one in requests]
        if self.refusals:
            await abort(context, self.refusals.pop(0))
        return wire.RegisterResponse(plan=self.plan, plan_hash=self.hash, protocol=self.protocol)

    async def Poll(self, request, context):  # noqa: N802
        return wire.PollResponse(revision=request.cursor + 1, newest_protocol=self.newest)


@pytest.fixture
async def other_cos(shared_third_party, tmp_path, host, calls):
    """Return the server, and a party of the host that is connected to it over mutual TLS."""
    tls = shared_third_party.issue(tmp_path / "tls", "cos", "other")
    run = new_run()
    servicer = OtherCos(calls.plan(run))
    server = grpc.aio.server()
    add_OrchestratorServicer_to_server(servicer, server)
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials())
    await server.start()
    channel = connect(
        f"127.0.0.1:{port}",
        host.tls.channel_credentials(),
        tls_name="other.cos.coterie.internal",
        peer="cos/other",
        meter=Meter(),
    )
    yield servicer, Party(channel, run, lambda: host.fingerprint, Retry(limit_s=0.0))
    await channel.close()
    await server.stop(None)


async def test_a_party_joins_a_server_that_names_no_version(other_cos, host):
    servicer, party = other_cos
    await party.register(members(host))
    assert party.protocol == 1
    (said,) = servicer.said
    assert (said.oldest, said.newest) == (OLDEST, NEWEST)
    assert "sum/masked" in said.features
    # It is upgraded while the party polls.
    servicer.newest = NEWEST
    async for _ in party.tasks():
        break
    assert party.protocol == NEWEST


def later_plan(servicer):
    servicer.plan.MergeFromString(b"\x98\x06\x05")
    servicer.hash = b"h" * 32


def other_hash(servicer):
    servicer.hash = b"h" * 32


def later_version(servicer):
    servicer.plan.oldest_protocol = NEWEST + 1
    servicer.hash = plan_hash(servicer.plan)
    servicer.protocol = Protocol(oldest=1, newest=NEWEST + 1)


def later_cos(servicer):
    servicer.protocol = FUTURE


def lower_cos(servicer):
    servicer.plan.oldest_protocol = 2
    servicer.hash = plan_hash(servicer.plan)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (later_plan, ["cos/other", "field 99", "an upgrade of this party"]),
        (other_hash, ["cos/other", "an older release", "the same release at both"]),
        (later_version, [f"asks for version {NEWEST + 1}", "an upgrade of this party"]),
        (lower_cos, ["cos/other speaks version 1", "version 2 is asked for", "an upgrade of cos/other"]),
        (later_cos, ["cos/other (release 9.1.0)", f"versions {NEWEST + 7} to {NEWEST + 9}", "upgrade"]),
    ],
)
async def test_a_party_ends_at_a_server_that_it_cannot_follow_and_says_what_to_upgrade(
    other_cos, host, spoil, says
):
    servicer, party = other_cos
    spoil(servicer)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(UnsupportedVersionError) as raised:
            await party.wait_and_register(members(host))
    assert [one for one in says if one not in str(raised.value)] == []
    assert raised.value.exit_code == 51
    assert servicer.registrations == 1


async def test_the_release_that_a_server_names_is_logged_short_and_printable(other_cos, host):
    servicer, party = other_cos
    servicer.protocol = Protocol(oldest=1, newest=NEWEST, release=HOSTILE)
    with structlog.testing.capture_logs() as logs:
        await party.register(members(host))
    (line,) = [one for one in logs if one["event"] == "speaks with the COS"]
    assert line["release"] == "?[31m" + "x" * 35
    other_hash(servicer)
    with pytest.raises(UnsupportedVersionError) as raised:
        await party.register(members(host))
    assert "it is of release ?[31mxxx" in str(raised.value)
    assert len(str(raised.value)) < 400


async def test_a_party_ends_when_its_server_is_set_back_below_what_the_plan_asks_for(other_cos, host):
    servicer, party = other_cos
    lower_cos(servicer)
    servicer.protocol, servicer.newest = Protocol(oldest=1, newest=2), 2
    await party.register(members(host))
    answers = party.tasks()
    await anext(answers)
    assert party.protocol == 2
    servicer.newest = 0
    with pytest.raises(UnsupportedVersionError, match="cos/other speaks version 1 of the protocol"):
        await anext(answers)


async def test_a_party_that_waits_for_its_run_says_why_once_for_each_reason(other_cos, host):
    servicer, party = other_cos
    unknown = Refusal(ErrorReason.ERROR_REASON_UNKNOWN_ROUND, "no such run")
    unready = Refusal(ErrorReason.ERROR_REASON_NOT_READY, "the run is restored")
    servicer.refusals = [unknown, unknown, unready, unready, unknown]
    with structlog.testing.capture_logs() as logs:
        await party.wait_and_register(members(host), pause_s=0.01)
    waits = [line["because"] for line in logs if line["event"] == "waiting for the run"]
    assert waits == ["no such run", "the run is restored", "no such run"]


# --- Processes -----------------------------------------------------------------------------------------------------


async def test_a_host_whose_server_has_another_hash_of_the_plan_ends_with_a_message(
    shared_third_party, start_member, tmp_path, calls
):
    tls = shared_third_party.issue(tmp_path / "tls", "cos", "other")
    run = new_run()
    servicer = OtherCos(calls.plan(run))
    later_plan(servicer)
    server = grpc.aio.server()
    add_OrchestratorServicer_to_server(servicer, server)
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials())
    await server.start()
    try:
        service = await asyncio.to_thread(
            start_member,
            "client",
            f"ending-host-{next(NUMBERS)}",
            shared_third_party,
            healthy=False,
            cos={"address": f"127.0.0.1:{port}", "name": "other"},
            run=run,
            histories=write_histories(tmp_path / "histories.csv"),
            participants=len(NAMES),
        )
        assert await asyncio.to_thread(service.wait_for_end) == 51
    finally:
        await server.stop(None)
    lines = [json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{")]
    (end,) = [line for line in lines if line.get("event") == "cannot go on"]
    assert end["error"] == "version"
    assert "field 99" in end["message"]
    assert "an upgrade of this party" in end["message"]


async def test_a_service_with_a_store_of_an_earlier_revision_writes_a_backup_and_migrates_it(
    shared_third_party, tmp_path
):
    role, name = "data-owner", f"migrating-{next(NUMBERS)}"
    items = tmp_path / "items.csv"
    items.write_text("item\nfilm\n")
    service = Member(
        role,
        name,
        shared_third_party,
        tmp_path,
        participants=1,
        cos={"address": "127.0.0.1:1", "name": "nobody"},
        run="run",
        owners=[{"name": "zoo", "items": items}],
    )
    service.state.mkdir(mode=0o700)
    engine = sa.create_engine(f"sqlite:///{service.state / 'data_owner.db'}")
    migrate(engine, "data_owner", to="data_owner_0003")
    engine.dispose()
    (service.state / "data_owner.db").chmod(0o600)
    await asyncio.to_thread(service.start, healthy=False)
    try:
        async with asyncio.timeout(SOON_S):
            while not await asyncio.to_thread(service.answers):
                await asyncio.sleep(0.05)
    finally:
        await asyncio.to_thread(service.stop)
    lines = [json.loads(line) for line in service.log.read_text().splitlines()]
    (line,) = [line for line in lines if line["event"].startswith("the store is migrated")]
    assert (line["before"], line["after"]) == ("data_owner_0003", "data_owner_0004")
    manifest = read_manifest(service.state / "before-data_owner_0004.tar")
    assert line["backup"] == str(service.state / "before-data_owner_0004.tar")
    assert {"data_owner.db", "identities.key", "tls/key.pem"} <= manifest.files.keys()


class OtherThirdParty(KeyDirectoryServicer):
    """A third party of another release, far later if nothing else is said, which may still answer."""

    def __init__(self, refuses, says=FUTURE):
        self.refuses, self.says = refuses, says

    async def Revocations(self, request, context):  # noqa: N802
        if self.refuses:
            refusal = UnsupportedVersionError(
                f"cos/ending speaks version {request.protocol.newest}", expected="an upgrade of cos/ending"
            )
            await abort(context, refusal)
        return RevocationsResponse(revision=1, protocol=self.says)


@pytest.mark.parametrize(
    ("refuses", "says"),
    [
        (True, f"cos/ending speaks version {NEWEST} (expected an upgrade of cos/ending)"),
        (False, f"thirdparty/directory (release 9.1.0) speaks versions {NEWEST + 7} to {NEWEST + 9}"),
    ],
    ids=["is refused", "refuses"],
)
async def test_a_service_ends_when_it_and_the_third_party_have_no_version_in_common(
    shared_third_party, tmp_path, refuses, says
):
    service = Member("cos", f"ending-{int(refuses)}", shared_third_party, tmp_path)
    await asyncio.to_thread(service.start)
    await asyncio.to_thread(service.stop)
    async with third_party_of_another_release(
        shared_third_party, tmp_path, service, OtherThirdParty(refuses)
    ):
        await asyncio.to_thread(service.start, healthy=False)
        assert await asyncio.to_thread(service.wait_for_end) == 51
    lines = [json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{")]
    (end,) = [line for line in lines if line["event"] == "cannot go on"]
    assert says in end["message"]


@contextlib.asynccontextmanager
async def third_party_of_another_release(third_party, folder, service, servicer):
    """Let a service have another third party: at the same name, with a certificate of the same authority."""
    tls = third_party.issue(folder / "tls", "thirdparty", third_party.name)
    server = grpc.aio.server()
    add_KeyDirectoryServicer_to_server(servicer, server)
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials())
    await server.start()
    try:
        service.configure(
            {**service.keys, "thirdparty": {"address": f"127.0.0.1:{port}", "name": third_party.name}}
        )
        yield
    finally:
        await server.stop(None)


async def test_a_run_with_an_open_population_does_not_start_with_a_third_party_of_version_1(
    shared_third_party, start_member, tmp_path, certificates, calls
):
    service = await asyncio.to_thread(start_member, "cos", "waiting-for-waves", shared_third_party)
    await asyncio.to_thread(service.stop)
    old = OtherThirdParty(False, Protocol(oldest=1, newest=1, release="0.1.0"))
    async with third_party_of_another_release(shared_third_party, tmp_path, service, old):
        await asyncio.to_thread(service.start)
        stub = service.channel(certificates["operator"]).stub(OperatorStub)

        def request(most_users):
            settings = FedNcfSettings(bits=24).to_json()
            plan = wire.RunPlan(
                run_id=new_run(), system="fedncf", form="hosts", secure_sum="masked", settings=settings
            )
            kind = wire.CohortKind.COHORT_KIND_GROUPS
            floors = {"cohort": 2, "group": 2, "min_cohort": 2, "min_sum": 2, "most_users": most_users}
            times = {"passes": 9, "evaluate_every": 1, "step_timeout_ms": 1000}
            plan.rounds.CopyFrom(wire.RoundsPlan(cohorts=kind, **floors, **times))
            return operating.StartRunRequest(
                plan=plan, expect_owners=1, expect_users=2, phase_timeout_ms=60_000, party_timeout_ms=60_000
            )

        why = await calls.refused(lambda: stub.StartRun(request(9)))
        assert why.reason == "UNSUPPORTED_VERSION"
        assert (
            "thirdparty/directory (release 0.1.0) speaks version 1 of the protocol, and version 2" in why.text
        )
        await stub.StartRun(request(0))
