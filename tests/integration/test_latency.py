"""Measuring the network: who may be asked for filler and how much, who is reached without being called."""

import asyncio
import json

import pytest

from coterie.cli.main import invoke
from coterie.crypto.authority import logical_name
from coterie.errors import ConfigError, RunError
from coterie.launch.latency import measure_all
from coterie.net.latency import MeasuredService, measure
from coterie.wire.v1 import latency_pb2 as wire
from coterie.wire.v1.latency_pb2_grpc import LatencyStub, ProbeStub

SOON_S = 60.0
SMALL = wire.MeasureOrder(echoes=5, connections=2, sizes=[0, 70_000], repeats=2)
MIB = 1 << 20


def service(process) -> MeasuredService:
    return MeasuredService(process.party, process.address, logical_name(process.role, process.name))


async def carried(stub, *requests):
    async def each():
        for one in requests:
            yield one

    return [one async for one in stub.Carry(each(), timeout=SOON_S)]


@pytest.fixture
def owner(start_member, third_party, cos, tmp_path):
    """A data owner that waits for a run: it serves nobody yet, and attends."""
    items = tmp_path / "items.csv"
    items.write_text("item\na\n")
    return start_member(
        "data-owner",
        "far-away",
        third_party,
        healthy=False,
        participants=1,
        cos={"address": cos.address, "name": cos.name},
        run="none-yet",
        owners=[{"name": "letters", "items": items}],
    )


async def attending(cos, tls, party):
    """Wait until a party attends at the COS: then an order for it is not refused."""
    stub = cos.channel(tls).stub(LatencyStub)
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                order = wire.MeasureOrder(echoes=1, repeats=1)
                return [
                    one
                    async for one in stub.Measure(
                        wire.MeasureRequest(order=order, parties=[party]), timeout=SOON_S
                    )
                ]
            except Exception as error:
                if "do not attend" not in str(error):
                    raise
            await asyncio.sleep(0.1)


async def test_what_is_asked_for_is_carried_each_way(cos, certificates):
    stub = cos.channel(certificates["operator"]).stub(ProbeStub)
    await stub.Echo(wire.EchoRequest(), timeout=SOON_S)
    up = await carried(stub, wire.CarryRequest(filler=bytes(MIB)), wire.CarryRequest(filler=bytes(5)))
    assert [(len(one.filler), one.arrived) for one in up] == [(0, MIB + 5)]
    down = await carried(stub, wire.CarryRequest(wanted=2 * MIB + 5))
    assert [len(one.filler) for one in down] == [MIB, MIB, 5]
    assert down[-1].arrived == 0


@pytest.mark.parametrize(
    "requests",
    [
        [wire.CarryRequest(filler=bytes(MIB + 1))],
        [wire.CarryRequest(wanted=16 * MIB + 1)],
        [wire.CarryRequest(filler=bytes(MIB))] * 17,
    ],
    ids=["a large piece", "a large answer", "too much"],
)
async def test_more_than_a_measurement_needs_is_refused(cos, certificates, calls, requests):
    stub = cos.channel(certificates["operator"]).stub(ProbeStub)
    refused = await calls.refused(carried(stub, *requests))
    assert (refused.reason, refused.field) == ("TOO_LARGE", "filler")


async def test_a_caller_has_filler_carried_once_at_a_time(cos, certificates, calls):
    stub = cos.channel(certificates["operator"]).stub(ProbeStub)
    under_way, go_on = asyncio.Event(), asyncio.Event()

    async def slow():
        yield wire.CarryRequest(filler=b"x")
        under_way.set()
        await go_on.wait()

    async def first():
        return [one async for one in stub.Carry(slow(), timeout=SOON_S)]

    waiting = asyncio.create_task(first())
    await under_way.wait()

    async def until_refused():
        # The message is on its way when the event is set; the service has it a moment later.
        while True:
            await stub.Echo(wire.EchoRequest(), timeout=SOON_S)

    refused = await asyncio.wait_for(calls.refused(until_refused()), SOON_S)
    assert (refused.reason, refused.field) == ("WRONG_STATE", "filler")
    go_on.set()
    assert (await waiting)[-1].arrived == 1
    await stub.Echo(wire.EchoRequest(), timeout=SOON_S)


async def test_a_service_is_probed_only_by_those_who_call_it(owner, third_party, certificates, calls):
    async def reason(role):
        stub = owner.channel(certificates[role]).stub(ProbeStub)
        return (await calls.refused(stub.Echo(wire.EchoRequest(), timeout=SOON_S))).reason

    async with asyncio.timeout(SOON_S):
        while not owner.answers():
            await asyncio.sleep(0.1)
        # Before it has the list of who is revoked, it trusts nobody.
        while (found := await reason("data-owner")) == "NOT_READY":
            await asyncio.sleep(0.1)
    assert found == await reason("thirdparty") == "WRONG_ROLE"
    for role in ("client", "cos", "operator"):
        await owner.channel(certificates[role]).stub(ProbeStub).Echo(wire.EchoRequest(), timeout=SOON_S)


async def test_a_measurement_has_every_time_and_says_where_it_ended(cos, certificates):
    tls = certificates["operator"]
    found = await measure(service(cos), tls, SMALL)
    assert found.failure == ""
    lengths = [
        len(one)
        for one in (found.echo_ms, found.server_ms, found.connect_ms, found.handshake_ms, found.first_ms)
    ]
    assert lengths == [5, 5, 2, 2, 2]
    assert [(one.size, one.up, len(one.ms)) for one in found.carried] == [
        (0, True, 2),
        (0, False, 2),
        (70_000, True, 2),
        (70_000, False, 2),
    ]
    assert all(whole > part > 0 for whole, part in zip(found.echo_ms, found.server_ms, strict=True))
    nowhere = MeasuredService("cos/cos", "127.0.0.1:1", service(cos).tls_name)
    assert "no connection" in (await measure(nowhere, tls, SMALL)).failure
    another = MeasuredService("cos/other", cos.address, logical_name("cos", "other"))
    assert (await measure(another, tls, SMALL)).failure


async def test_those_who_cannot_be_called_measure_when_the_operator_asks(
    cos, third_party, owner, certificates
):
    tls = certificates["operator"]
    await attending(cos, tls, owner.party)
    told = []
    found = await measure_all(tls, service(cos), SMALL, (), told.append)
    pairs = {(one["source"], one["target"]): one for one in found["pairs"]}
    expected = {
        ("operator/some-operator", cos.party),
        (cos.party, third_party.party),
        (owner.party, cos.party),
        (owner.party, third_party.party),
    }
    assert set(pairs) >= expected
    for pair in expected:
        one = pairs[pair]
        assert one["failure"] == ""
        assert (one["echo_ms"]["count"], one["handshake_ms"]["count"]) == (5, 2)
        assert one["network_ms"]["p50"] < one["echo_ms"]["p50"]
        assert [way["size"] for way in one["carried"]] == [0, 0, 70_000, 70_000]
    assert len(told) >= len(expected)
    only = await measure_all(tls, service(cos), SMALL, [owner.party], told.append)
    assert {one["source"] for one in only["pairs"]} == {owner.party}


async def test_who_does_not_attend_or_asks_for_too_much_is_refused(cos, certificates, calls):
    stub = cos.channel(certificates["operator"]).stub(LatencyStub)

    def asked(**order):
        fields = {"echoes": 1, "repeats": 1, **order}
        return stub.Measure(wire.MeasureRequest(order=wire.MeasureOrder(**fields)), timeout=SOON_S)

    request = wire.MeasureRequest(order=SMALL, parties=["client/nobody"])
    assert (await calls.refused(stub.Measure(request, timeout=SOON_S))).field == "parties"
    for order, field in [
        ({"echoes": 0}, "order.echoes"),
        ({"echoes": 1001}, "order.echoes"),
        ({"connections": 21}, "order.connections"),
        ({"sizes": [16 * MIB + 1]}, "order.sizes"),
        ({"repeats": 0}, "order.repeats"),
    ]:
        refused = await calls.refused(asked(**order))
        assert (refused.reason, refused.field) == ("INVALID_FIELD", field)


async def test_a_process_carries_no_more_than_its_configuration_allows(
    start_member, third_party, cos, certificates, tmp_path
):
    items = tmp_path / "items.csv"
    items.write_text("item\na\n")
    thrifty = start_member(
        "data-owner",
        "thrifty",
        third_party,
        healthy=False,
        participants=1,
        latency_mb=1,
        cos={"address": cos.address, "name": cos.name},
        run="none-yet",
        owners=[{"name": "letters", "items": items}],
    )
    tls = certificates["operator"]
    await attending(cos, tls, thrifty.party)
    order = wire.MeasureOrder(echoes=1, sizes=[MIB], repeats=1)
    found = await measure_all(tls, service(cos), order, [thrifty.party], lambda _: None)
    assert found["pairs"] == []
    (one,) = found["without"]
    assert one == {"party": thrifty.party, "why": "4 MiB would be carried, and `latency_mb` allows 1"}


async def test_what_a_party_brings_is_looked_at(cos, certificates, calls):
    stub = cos.channel(certificates["client"]).stub(LatencyStub)
    for pair, reason in [
        (wire.PairTimes(echo_ms=[float("nan")]), "NOT_FINITE"),
        (wire.PairTimes(first_ms=[-1.0]), "NOT_FINITE"),
        (wire.PairTimes(echo_ms=[1.0] * 1001), "TOO_LARGE"),
        (wire.PairTimes(target="x" * 201), "TOO_LARGE"),
        (wire.PairTimes(target="a\x1b[2J"), "INVALID_FIELD"),
    ]:
        request = wire.AttendRequest(number=1, pair=pair, more=True)
        assert (await calls.refused(stub.Attend(request, timeout=SOON_S))).reason == reason
    # Nobody asked for it: it goes nowhere, and is no error.
    await stub.Attend(
        wire.AttendRequest(number=7, pair=wire.PairTimes(target="cos/cos"), more=True), timeout=SOON_S
    )


async def test_the_command_prints_a_table_or_json_and_draws_the_round_trips(
    cos, third_party, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")  # names of columns are in one line each
    state = (await third_party.enrol("operator", "measuring")).settings.state
    config = tmp_path / "operator.toml"
    # Of a run to start it says nothing: neither its order nor the key that signs its plan.
    lines = [f'{key} = "{value}"' for key, value in (("name", "measuring"), ("state", state))]
    config.write_text("\n".join([*lines, f'cos = {{address = "{cos.address}", name = "{cos.name}"}}\n']))
    drawn = tmp_path / "trips.svg"
    words = ["latency", "--config", str(config), "--party", cos.party, "--echoes", "3", "--largest", "32"]
    assert await asyncio.to_thread(invoke, [*words, "--heat-map", str(drawn)]) == 0
    shown = capsys.readouterr().out
    assert "first answer" in shown
    assert "32 KiB up" in shown
    assert third_party.party in drawn.read_text()
    assert await asyncio.to_thread(invoke, [*words, "--json"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["result"]["pairs"]
    assert (pair["source"], pair["target"], pair["failure"]) == (cos.party, third_party.party, "")
    assert [one["size"] for one in pair["carried"]] == [0, 0, 1024, 1024, 32768, 32768]


def test_without_a_federation_the_command_says_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke(["latency"]) == RunError.exit_code
    assert "there is no run in runs" in capsys.readouterr().err
    for part in ("thirdparty", "cos"):
        (tmp_path / "old" / part / "state").mkdir(parents=True)
        (tmp_path / "old" / part / "config.toml").write_text("")
    assert invoke(["latency", "--run", "old"]) == RunError.exit_code
    assert "run old is not running" in capsys.readouterr().err
    assert invoke(["latency", "--run", "old", "--config", "x"]) == ConfigError.exit_code
    assert "both --config and --run" in capsys.readouterr().err
