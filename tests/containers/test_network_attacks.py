"""Attacks from the federation's network on services in containers, each beside its control.

One container is the attacker.  A client host finds it where the orchestration server should be, as where a name is
resolved falsely, and trains through it all the time.
"""

import asyncio
import json
import shutil
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from coterie.config.load import load
from coterie.config.operate import OperateSettings
from coterie.crypto.authority import Authority, logical_name
from coterie.launch.order import Order
from coterie.net.credentials import TlsFiles
from coterie.wire.v1.thirdparty_pb2 import RevokeRequest
from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryStub

from ..callers import (
    ROLES,
    calling,
    forged,
    in_place_of_callers,
    in_place_of_services,
    issue,
    polled,
    revoked_in_mid_stream,
)
from .engine import DEPLOY
from .stack import Stack

pytestmark = pytest.mark.containers

RELAY = Path(__file__).parents[1] / "relay.py"
SETTINGS = {
    "name": "attacked",
    "secure_sum": "clear",
    "data.synthetic.users": 80,
    "data.synthetic.items": 120,
    "data.synthetic.interactions": 3000,
    "federation.hosts": 4,
    "federation.party_timeout_s": 4,
    "reference": "false",
    "rounds.cohorts": "all",
    "rounds.passes": 100_000,
    "rounds.patience": 0,
    "rounds.evaluate_every": 100,
    "rounds.step_timeout_s": 10,
}
HOSTS = ("host-0", "host-1", "host-2", "host-3")
NAMES = {"thirdparty": "directory", "data-owner": "catalogue", "client": "host-0", "cos": "cos"}
SERVICES = {"thirdparty": "thirdparty", "data-owner": "owner-0", "client": "host-0", "cos": "cos"}
COS = logical_name("cos", "cos")
ORDERS, WAY = 7000, 7443
_SHARE_OF_HOSTS = 0.1
"""Share of a processor for each client host; no test waits for their rounds."""


def beside(folder):
    """Return a file for compose: the run, the attacker, and a host that finds it in place of the server."""
    sets = " ".join(f"--set {key}={value}" for key, value in SETTINGS.items())
    return {
        "services": {
            "bootstrap": {"command": f"bootstrap /etc/coterie/run.toml --into /federation {sets}"},
            "host-0": {"environment": {"COTERIE_COS__ADDRESS": f"attacker:{WAY}"}},
            "attacker": {
                "extends": {"file": str(DEPLOY / "services.yml"), "service": "operator"},
                "entrypoint": ["python3", "-I", "/relay.py", str(ORDERS)],
                "command": [],
                "volumes": [f"{RELAY}:/relay.py:ro", f"{folder}:/stolen:ro"],
            },
        }
    }


class Attacked:
    """A federation with an attacker on its network, and what of others the attacker has."""

    def __init__(self, stack, folder):
        self.stack, self._folder = stack, folder
        self.run = ""

    def order(self, what, **how):
        """Have the attacker do something."""
        with socket.create_connection((self.stack.address("attacker"), ORDERS), timeout=60) as way:
            way.sendall(json.dumps({"do": what, **how}).encode() + b"\n")
            return json.loads(way.makefile().readline())

    def steal(self, service):
        """Let the attacker have the key and certificate of a service."""
        held = self.stack.copy(service, "/party/state/tls", self._folder / f"{service}-copied")
        shutil.move(held, self._folder / service)
        return self.given(service)

    def given(self, name):
        """Let the attacker read a TLS folder."""
        for file in (self._folder / name).iterdir():
            file.chmod(0o644)
        return TlsFiles(self._folder / name)

    @property
    def folder(self):
        """Where its TLS folders are."""
        return self._folder

    def relay(self, shown=None):
        """Have it relay what `host-0` says to the server, as somebody."""
        how = {}
        if shown is not None:
            how = {"shown": files(shown), "name": COS, "onward": files("host-0")}
        self.order("listen", port=WAY, target="cos:7443", **how)

    def report(self):
        """Return what came the way of `host-0`, and whether the run's name was in it."""
        return self.order("report", port=WAY, find=self.run)

    def rounds(self):
        """Return how many rounds were applied so far."""
        return self.stack.metric("cos", "coterie_rounds_total", outcome="applied")

    def until_rounds(self, more):
        """Wait for so many more rounds to be applied."""
        wanted = self.rounds() + more
        self.stack.until(lambda: self.rounds() >= wanted, f"{wanted} rounds")

    def address(self, service):
        return f"{self.stack.address(service)}:7443"


def files(name):
    """Return chain and key of a TLS folder as the attacker finds them."""
    return [f"/stolen/{name}/chain.pem", f"/stolen/{name}/key.pem"]


@pytest.fixture(scope="module")
def attacked(engine, images, tmp_path_factory):
    """A run in which `host-0` trains through an attacker who only hands on."""
    folder = tmp_path_factory.mktemp("stolen")
    folder.chmod(0o755)
    overlay = tmp_path_factory.mktemp("attacked") / "attacked.yml"
    overlay.write_text(json.dumps(beside(folder)))
    settings = {**images, "COTERIE_METRICS": "0.0.0.0:9464"}
    stack = Stack(engine, settings, "docker-compose.fedncf.yml", "docker-compose.scale.yml", overlay)
    try:
        stack.compose("up", "--detach", "attacker")
        one = Attacked(stack, folder)
        stack.until(lambda: listening(stack), "the attacker listens")
        one.relay()
        stack.compose("up", "--detach", "operator")
        stack.until(lambda: "rounds of training" in stack.logs("operator"), "rounds begin")
        for host in HOSTS:
            stack.slow_down(host, _SHARE_OF_HOSTS)
        party = stack.copy("operator", "/party", overlay.parent)
        operating = load(OperateSettings, party / "config.toml", relative_to=party).settings
        one.run = Order.load(operating.order).run_id
        yield one
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")


def listening(stack):
    try:
        socket.create_connection((stack.address("attacker"), ORDERS), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def everybody(attacked, tmp_path_factory):
    """TLS files of somebody in every role, by the authority of the federation; the attacker has them, too."""
    state = attacked.stack.copy("thirdparty", "/party/state", tmp_path_factory.mktemp("authority"))
    authority = Authority.load(state)
    for role in ROLES:
        folder = attacked.folder / f"any-{role}"
        issue(folder, role, "somebody", authority, authority.certificate_pem)
        attacked.given(folder.name)
    forged(attacked.folder / "forged", "cos", "cos", authority.certificate_pem)
    attacked.given("forged")
    return {role: TlsFiles(attacked.folder / f"any-{role}") for role in ROLES}


@pytest.fixture(scope="module")
def stolen(attacked):
    """TLS files of parties, which the attacker has, too."""
    return {service: attacked.steal(service) for service in (*HOSTS, "cos", "operator")}


@pytest.fixture(scope="module")
def recorded(attacked):
    """Bytes that `host-0` sent from its registration on, as they were on the network."""
    attacked.until_rounds(3)
    attacked.order("keep", port=WAY, path="/tmp/recorded")
    return "/tmp/recorded"


@pytest.fixture(scope="module")
def read(attacked, stolen):
    """Messages of `host-0`, read by an attacker with the key of the orchestration server, in whose place it stands."""
    attacked.relay("cos")
    attacked.stack.until(lambda: attacked.report()["found"], "the run's name is read")
    attacked.stack.until(lambda: attacked.report()["flows"][0] > 30_000, "some rounds are read")
    attacked.order("keep", port=WAY, path="/tmp/read")
    attacked.relay()
    return "/tmp/read"


# --- in the middle -------------------------------------------------------------------------------------------------


def test_a_host_trains_through_somebody_on_the_way_who_reads_nothing(attacked, recorded):
    before = attacked.report()
    attacked.until_rounds(3)
    after = attacked.report()
    assert after["flows"][0] > before["flows"][0] > 3000
    assert not after["found"]


def test_a_host_is_not_led_to_somebody_else_in_place_of_the_server(
    attacked, everybody, stolen, recorded, read
):
    """Beside `read`: the same with the server's own key, which reads it all."""
    for shown in ("forged", "host-1", "any-thirdparty"):
        attacked.relay(shown)
        attacked.stack.until(lambda: len(attacked.report()["greeted"]) >= 2, "the host tries")
        report = attacked.report()
        assert set(report["greeted"]) == {COS}
        # Some shake hands before they look at the name; nothing is said to it.
        assert sum(report["flows"]) == 0
    # The others train meanwhile, and it with them once nobody is in its way.
    attacked.until_rounds(2)
    attacked.relay()
    attacked.stack.until(lambda: sum(attacked.report()["flows"]) > 3000, "the host is back")


# --- in somebody's place ---------------------------------------------------------------------------------------------


async def test_no_role_passes_for_another_as_a_caller(attacked, everybody):
    pairs = set()
    for role, service in SERVICES.items():
        async with AsyncExitStack() as stack:
            channels = {
                caller: await stack.enter_async_context(
                    calling(attacked.address(service), tls, logical_name(role, NAMES[role]))
                )
                for caller, tls in everybody.items()
            }
            pairs |= await in_place_of_callers(role, channels.__getitem__)
    assert {
        (role, victim)
        for role in ROLES
        for victim in ("client", "data-owner", "operator", "cos")
        if role != victim
    } <= pairs


async def test_no_role_passes_for_another_as_a_service(attacked, everybody, stolen):
    addresses = {}
    for port, role in enumerate(ROLES, start=WAY + 1):
        shown = files(f"any-{role}")
        attacked.order(
            "listen", port=port, target="cos:7443", shown=shown, name=COS, onward=files("any-client")
        )
        addresses[role] = f"{attacked.stack.address('attacker')}:{port}"
    taken = await in_place_of_services(addresses, everybody["client"], ("somebody", "cos"))
    assert taken == {(role, role, "somebody") for role in ROLES}


# --- recorded and sent again -----------------------------------------------------------------------------------------


def test_a_recorded_connection_sent_again_does_nothing(attacked, recorded):
    def registered():
        return attacked.stack.metric("cos", "coterie_rpc_calls_total", side="server", rpc="Register")

    before = registered()
    assert before >= len(HOSTS)
    done = attacked.order("again", path=recorded, address="cos:7443")
    # Greeted as whoever comes, and then sent away.
    assert done["answered"] > 0
    assert done["closed"]
    assert registered() == before


def test_messages_sent_again_by_another_party_are_not_those_of_who_sent_them(attacked, stolen, read):
    """Beside it: sent again by somebody with the key of the host that had sent them."""

    def refused(reason):
        return attacked.stack.metric("cos", "coterie_refusals_total", rpc="Submit", reason=reason)

    def again(who):
        where = {"address": "cos:7443", "shown": files(who), "name": COS}
        return attacked.order("again", path=read, piece=4096, limit_s=2.0, **where)

    over, unknown = refused("UNKNOWN_ROUND"), refused("UNKNOWN_PARTICIPANT")
    # Of rounds that are over, and otherwise as it should be.
    again("host-0")
    assert refused("UNKNOWN_ROUND") > over
    assert refused("UNKNOWN_PARTICIPANT") == unknown
    again("host-1")
    assert refused("UNKNOWN_PARTICIPANT") > unknown


# --- revoked in the middle ---------------------------------------------------------------------------------------


async def test_a_party_revoked_in_mid_stream_is_cut_off_and_the_others_train_on(attacked, stolen):
    cos, victim, other = attacked.address("cos"), stolen["host-2"], stolen["host-1"]

    async def revoke():
        name = logical_name("thirdparty", "directory")
        async with calling(attacked.address("thirdparty"), stolen["operator"], name) as channel:
            fingerprint = victim.identity().fingerprint
            await channel.stub(KeyDirectoryStub).Revoke(RevokeRequest(certificates=[fingerprint]))

    async with calling(cos, victim, COS) as cut, calling(cos, other, COS) as kept:
        ended, went_on = await revoked_in_mid_stream(cut, kept, revoke)
    assert ended == {"upload": "REVOKED", "registration": "REVOKED", "answers": "REVOKED"}
    assert went_on.keys() == {"upload", "registration"}
    assert "REVOKED" not in went_on.values()
    assert await polled(cos, victim, COS, "none") == "REVOKED"
    assert await polled(cos, other, COS, "none") == "UNKNOWN_ROUND"
    # The host itself was in the middle of calls, too, and is told why.
    stack = attacked.stack
    assert stack.metric("cos", "coterie_refusals_total", rpc="Attend", reason="REVOKED")
    told = "this certificate was revoked"
    await asyncio.to_thread(stack.until, lambda: told in stack.logs("host-2"), "the host hears of it")
    await asyncio.to_thread(attacked.until_rounds, 3)
