"""Every RPC of every service, called as every role with messages that are malformed, or well formed and wrong.

Nothing that is refused may change what a service has stored, nothing may end in a fault of the service, and nothing
private may stand in an answer or a log.  The variables ``COTERIE_FUZZ_MESSAGES`` and ``COTERIE_FUZZ_SEED`` say how many
messages, and which; ``make fuzz`` sends 100,000.  Those of ``make test`` reach every RPC.
"""

import asyncio
import contextlib
import hashlib
import os
import sqlite3
import time
from collections import Counter
from pathlib import Path

import grpc
import pytest
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2

from coterie.crypto.identity import Bundle
from coterie.net.authorisation import ALLOWED
from coterie.net.retry import status_lost
from coterie.net.status import from_rpc_error
from coterie.parties.party import Registrant
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1 import rounds_pb2
from coterie.wire.v1.common_pb2 import Tensor

from .fuzzing import CANARY, Draw, Known
from .playing import World

MESSAGES = int(os.environ.get("COTERIE_FUZZ_MESSAGES", "800"))
SEED = int(os.environ.get("COTERIE_FUZZ_SEED", "5"))
BATCH = 50
AT_ONCE = 10
CALL_S = 10.0
LARGE = {"calls_per_s": 1e6, "burst": 1_000_000}
USER = wire.ParticipantKind.PARTICIPANT_KIND_USER
OWNER = wire.ParticipantKind.PARTICIPANT_KIND_DATA_OWNER
DRIFT = "fuzzed-drift"
PRIVATE = [f"CANARY-user-{n}" for n in range(3)]
INTERACTIONS = 4
"""Of each of these users."""

READS = frozenset(
    f"/coterie.v1.{name}"
    for name in (
        "Orchestrator/Poll",
        "Orchestrator/Fetch",
        "Orchestrator/Recommend",
        "Operator/ListRuns",
        "Operator/GetRun",
        "Operator/WatchRun",
        "Operator/GetReport",
        "DataOwner/OwnerInfo",
        "UserAgent/DisclosureReceipt",
        "UserAgent/ShowPreferences",
        "KeyDirectory/Lookup",
        "KeyDirectory/Revocations",
        "KeyDirectory/PaillierPublicKey",
        "KeyDirectory/PaillierEnvelope",
        "GraphExpansion/SealingKey",
        "GraphExpansion/GraphKey",
        "GraphExpansion/ExpansionState",
        "Latency/Attend",
        "Latency/Measure",
        "TransparencyLog/LogHead",
        "TransparencyLog/LogInclusion",
        "TransparencyLog/LogConsistency",
        "TransparencyLog/LogEntries",
        "LogGossip/CompareHeads",
    )
) | {"/grpc.health.v1.Health/Check", "/coterie.v1.Probe/Echo", "/coterie.v1.Probe/Carry"}
"""Calls that may succeed and change nothing."""

HELD = frozenset(
    f"/coterie.v1.{name}"
    for name in (
        "Orchestrator/Poll",
        "Orchestrator/Submit",
        "KeyDirectory/Revocations",
        "KeyDirectory/PaillierPublicKey",
        "KeyDirectory/PaillierEnvelope",
        "GraphExpansion/GraphKey",
        "Latency/Attend",
        "LogGossip/CompareHeads",
    )
)
"""Calls whose answer may be asked to wait."""

FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED)


class Stand:
    """All services, with people who take part."""

    def __init__(self, third_party, cos, owner, host):
        self.services = {"thirdparty": third_party, "cos": cos, "data-owner": owner, "client": host}
        self.callers = {}
        self.known = Known({})

    def at(self, method):
        """Return the services that offer a method."""
        name = method.split("/")[1]
        if name == "coterie.v1.LogGossip":
            return [self.services["cos"], self.services["data-owner"]]
        role = {
            "coterie.v1.Orchestrator": "cos",
            "coterie.v1.Operator": "cos",
            "coterie.v1.Latency": "cos",
            "coterie.v1.DataOwner": "data-owner",
            "coterie.v1.UserAgent": "client",
            "coterie.v1.KeyDirectory": "thirdparty",
            "coterie.v1.ExpansionRelay": "cos",
            "coterie.v1.LatentRelay": "cos",
            "coterie.v1.MetaLatents": "thirdparty",
            "coterie.v1.GraphExpansion": "thirdparty",
            "coterie.v1.TransparencyLog": "thirdparty",
            "coterie.v1.Enrolment": "thirdparty",
        }.get(name)
        return [self.services[role]] if role else list(self.services.values())

    def stored(self):
        """Return a hash of everything in each store."""
        found = {}
        for role, service in self.services.items():
            sha = hashlib.sha256()
            for path in sorted(Path(service.state).glob("*.db")):
                with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
                    tables = connection.execute(
                        "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
                    )
                    for (table,) in tables.fetchall():
                        if table in ("log_clock", "relayed"):
                            # The time of the newest head, for which all parties ask now and then; and numbers of
                            # requests to the third party, which count refused ones, too.
                            continue
                        for row in connection.execute(f'SELECT * FROM "{table}"'):
                            sha.update(repr(row).encode())
            found[role] = sha.hexdigest()
        return found

    def acknowledged(self):
        """Return how many interactions of the host its data owner has acknowledged, as the host has written down."""
        path = Path(self.services["client"].state) / "client.db"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            (found,) = connection.execute(
                "SELECT SUM(acknowledged) FROM sent WHERE kind = 'interaction'"
            ).fetchone()
        return found or 0

    def usage(self):
        """Return memory, MiB, and open files of each process."""
        return {
            role: (service.resident_mib(), service.open_files()) for role, service in self.services.items()
        }


@pytest.fixture(scope="module")
def stand(tmp_path_factory, calls):
    from .conftest import START_S, ThirdParty

    folder = tmp_path_factory.mktemp
    third = ThirdParty(folder("fuzzed-thirdparty"), limits=LARGE, enrol_limits=LARGE)
    third.start()
    cos = calls.Member("cos", "fuzzed", third, folder("fuzzed-cos"), limits=LARGE)
    cos.start()
    at = {"address": cos.address, "name": cos.name}
    items, histories = folder("fuzzed-files") / "items.csv", folder("fuzzed-files") / "histories.csv"
    items.write_text("item\n" + "".join(f"item-{n}\n" for n in range(6)))
    histories.touch(mode=0o600)
    histories.write_text(
        "user,item,positive,time,part\n"
        + "".join(f"{u},item-{n},1,{n},0\n" for u in PRIVATE for n in range(INTERACTIONS))
    )
    owner = calls.Member(
        "data-owner",
        "fuzzed-owner",
        third,
        folder("fuzzed-owner"),
        participants=1,
        limits=LARGE,
        cos=at,
        run=DRIFT,
        owners=[{"name": "farm", "items": items}],
    )
    host = calls.Member(
        "client",
        "fuzzed-host",
        third,
        folder("fuzzed-host"),
        participants=len(PRIVATE),
        limits=LARGE,
        cos=at,
        run=DRIFT,
        histories=histories,
        consent={"min_cohort": 1, "min_sum": 1, "experiment": True},
    )
    made = Stand(third, cos, owner, host)
    roles = ("cos", "data-owner", "client", "decrypting-client", "thirdparty", "operator")
    made.callers = {role: third.issue(folder("fuzzed") / role, role, f"some-{role}") for role in roles}

    async def prepare():
        operating = calls.Operating(cos, made.callers["operator"])
        # It waits for more users than will ever come.
        await operating.start(DRIFT, owners=1, users=100)
        people = {
            "left": await third.enrol("client", "fuzzed-left", 3),
            "owner": await third.enrol("data-owner", "fuzzed-zoo", 1),
        }
        world = World(cos, operating, people, calls, per_user=True)
        await world.begin("left")
        await world.hosts["left"].task(wire.TaskKind.TASK_KIND_ROUND)
        await operating.start("fuzzed-epoch", owners=1, users=3)
        taking = {
            "left": calls.party_at(cos, people["left"], "fuzzed-epoch"),
            "owner": calls.party_at(cos, people["owner"], "fuzzed-epoch"),
        }
        one, bundle = people["owner"].identities[0], people["owner"].bundles[0]
        await taking["owner"].register(
            [
                Registrant(
                    one,
                    bundle,
                    OWNER,
                    name="zoo",
                    address="127.0.0.1:1",
                    tls_name="zoo.test",
                    items=["a", "b", "c"],
                )
            ]
        )
        pairs = zip(people["left"].identities, people["left"].bundles, strict=True)
        await taking["left"].register([Registrant(one, bundle, USER) for one, bundle in pairs])
        await cos.release()
        return people, world.run

    owner.start(healthy=False)
    people, rounds = asyncio.run(prepare())
    owner.wait_for_health(True)
    # The run stays in its first phase, in which a host sends only to owners that had joined before it.
    host.start()
    # Those who are registered come more often than strangers.
    made.callers["client/registered"] = people["left"].tls
    made.callers["data-owner/registered"] = people["owner"].tls
    runs = (DRIFT, rounds, "fuzzed-epoch")
    bundles: tuple[Bundle, ...] = people["left"].bundles
    ids = tuple(one.participant_id for one in bundles)
    (farm,) = (one.participant_id for one in calls.Enrolled.of(owner).bundles)
    submissions = [
        *(one for one in rounds_pb2.DESCRIPTOR.message_types_by_name.values()),
        Tensor.DESCRIPTOR,
        wire.DeliveryStatus.DESCRIPTOR,
    ]
    made.known = Known(
        {
            "run_id": (*runs, *runs, "none"),
            "owner": (farm,),
            "user": (ids[0], PRIVATE[0]),
            "signing_public": tuple(one.signing_public for one in bundles),
            "round": (0, 1, 2),
            "epoch": (0, 1, 2),
            "version": (0, 1),
            "first": (0, 1, 2, 3),
            "count": (0, 1, 2, 3),
            "sequence": (0, 1, 2),
            "slot": (0, 1, 2, 3),
            "submissions": tuple(submissions),
            "ExchangeRequest.owner": (0, 1, 2, 3, 2**32 - 1),
            # What would be right, and would end what the others need.
            "StopRunRequest.run_id": ("none", ""),
            "RecordInteractionRequest.user": ("nobody", ""),
            "SetPreferencesRequest.user": ("nobody", ""),
            "RegisterRequest.intent": (0, 1, 99),
        }
    )
    # What the host has to send is where it belongs: from here on nobody but the fuzz changes a store.
    deadline = time.monotonic() + START_S
    while made.acknowledged() < len(PRIVATE) * INTERACTIONS:
        assert time.monotonic() < deadline, host.log.read_text()
        time.sleep(0.05)
    yield made
    for service in (host, owner, cos, third):
        service.stop()


class Fuzz:
    """Sends messages and keeps what becomes of them."""

    def __init__(self, stand, methods):
        self.stand, self.methods = stand, methods
        self.channels = {}
        self.codes = Counter()
        self.taken = Counter()
        self.accepted = set()
        """Roles of the services that may have changed something."""
        self.sent = Counter()

    def channel(self, service, caller):
        key = (service.role, caller)
        if key not in self.channels:
            self.channels[key] = (
                service.anonymous_channel(service.enrol_address)
                if caller is None
                else service.channel(self.stand.callers[caller])
            )
        return self.channels[key]

    def drawn(self, number):
        """Return what message a number stands for."""
        draw = Draw(f"{SEED}:{number}", self.stand.known)
        rng = draw.rng
        method = rng.choice(sorted(self.methods))
        service = rng.choice(self.stand.at(method))
        if method.startswith("/coterie.v1.Enrolment/"):
            caller = None
        else:
            callers = sorted(self.stand.callers)
            # What is not served any more may be called by nobody.
            may = [one for one in callers if one.split("/")[0] in ALLOWED.get(method, ())] or callers
            known = [one for one in may if "/" in one]
            caller = rng.choice(rng.choices((callers, may, known or may), (2, 3, 5))[0])
        return method, service, caller, draw.payload(self.methods[method])

    async def send(self, number):
        method, service, caller, parts = self.drawn(number)
        self.sent[method] += 1
        described = self.methods[method]
        response = message_factory.GetMessageClass(described.output_type)
        kind = ("stream" if described.client_streaming else "unary") + (
            "_stream" if described.server_streaming else "_unary"
        )
        call = getattr(self.channel(service, caller), kind)(method, bytes, response.FromString)

        async def stream():
            for part in parts:
                yield part

        lasts = described.server_streaming or method in HELD
        answers, failure = [], None
        request = stream() if described.client_streaming else parts[0]
        try:
            under_way = call(request, timeout=0.5 if lasts else CALL_S)
            if described.server_streaming:
                answers = [one async for one in under_way]
            else:
                answers = [await under_way]
        except grpc.aio.AioRpcError as error:
            failure = error
        self.judge(number, method, service, caller, parts, answers, failure)

    def judge(self, number, method, service, caller, parts, answers, failure):
        what = f"message {number} of seed {SEED}: {method} as {caller}: {[part.hex() for part in parts]}"
        code = grpc.StatusCode.OK if failure is None else failure.code()
        self.codes[code.name] += 1
        if failure is not None:
            lost = status_lost(failure)
            assert lost or code not in FAULTS, f"{code.name} ({failure.details()}) for {what}"
            lasts = self.methods[method].server_streaming or method in HELD
            assert lasts or code != grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer for {what}"
            ended = code == grpc.StatusCode.UNAVAILABLE and not isinstance(
                from_rpc_error(failure, ""), Refusal
            )
            assert not ended, f"the service went away ({failure.details()}) at {what}"
            said = (failure.details() or "").encode() + b"".join(
                value if isinstance(value, bytes) else value.encode()
                for _, value in failure.trailing_metadata() or ()
            )
            for secret in (CANARY, CANARY.hex().encode(), b"CANARY-user"):
                assert secret not in said, f"{secret!r} in the refusal of {what}"
            if not (lost or code == grpc.StatusCode.DEADLINE_EXCEEDED):
                return
        if method not in READS and not all(self.refused(one) for one in answers):
            self.accepted.add(service.role)
            self.taken[method] += 1

    @staticmethod
    def refused(answer):
        """Whether an answer says that nothing of the request was taken."""
        if isinstance(answer, wire.SubmitResponse):
            return answer.accepted == 0
        return bool(getattr(answer, "refused", ())) and not any(getattr(answer, "replies", ()))


async def test_no_message_breaks_a_service_or_changes_what_it_refuses(stand, calls, capsys):
    methods = dict(calls.METHODS)
    health = health_pb2.DESCRIPTOR.services_by_name["Health"]
    methods.update({f"/{health.full_name}/{one.name}": one for one in health.methods if one.name == "Check"})
    fuzz = Fuzz(stand, methods)
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(number):
        async with turns:
            await fuzz.send(number)

    before, at_first = stand.stored(), None
    unchanged = 0
    for numbers in [range(first, min(first + BATCH, MESSAGES)) for first in range(0, MESSAGES, BATCH)]:
        fuzz.accepted.clear()
        await asyncio.gather(*(one(number) for number in numbers))
        after = stand.stored()
        for role in after.keys() - fuzz.accepted:
            assert after[role] == before[role], (
                f"{role} changed by refused messages {numbers[0]} to {numbers[-1]} of seed {SEED}"
            )
            unchanged += 1
        before = after
        # Caches, threads and connections are there from the first batches on.
        if at_first is None and numbers[-1] >= MESSAGES // 4:
            at_first = stand.usage()
    for role, (memory, files) in stand.usage().items():
        was, had = at_first[role]
        assert memory - was < 64, f"{role} grew from {was:.0f} to {memory:.0f} MiB"
        assert files - had < 32, f"{role} has {files} open files, {had} before"
    for role, service in stand.services.items():
        assert service.healthy(), role
        log = service.log.read_text()
        assert "Traceback" not in log, role
        assert "rpc failed" not in log, role
        assert CANARY.decode() not in log, role
        assert CANARY.hex() not in log, role
    with capsys.disabled():
        print(
            f"\n{MESSAGES} messages of seed {SEED}: {dict(fuzz.codes.most_common())}, taken: {dict(fuzz.taken)}"
        )
    assert set(fuzz.sent) == set(methods)
    # Most messages get past the check of the role, and most batches show that refusals change nothing.
    assert unchanged >= 2 * MESSAGES // BATCH
    assert fuzz.codes["INVALID_ARGUMENT"] > MESSAGES // 20
    for service in stand.services.values():
        await service.release()
