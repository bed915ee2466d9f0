"""What an intake keeps of the coordinator's payloads: by their hash, fetched once, and no more than the last ones."""

import asyncio
import hashlib

from coterie_cos import kept_payloads
from coterie_cos.kept_payloads import KeptPayloads, Named

from coterie.errors import PeerError
from coterie.wire.v1.orchestrator_pb2 import FetchKind

MODEL, PLAN = FetchKind.FETCH_KIND_MODEL, FetchKind.FETCH_KIND_SUM_PLAN


def named(payload, kind=MODEL, run_id="run"):
    return Named(run_id, kind, hashlib.sha256(payload).digest())


class Coordinator:
    """What a coordinator has, and how often it was asked."""

    def __init__(self, *payloads):
        self.has = {hashlib.sha256(one).digest(): one for one in payloads}
        self.asked = []
        self.answering = asyncio.Event()
        self.answering.set()

    async def fetch(self, name):
        self.asked.append(name)
        await self.answering.wait()
        if name.sha256 not in self.has:
            raise PeerError("the payload is not one of the last ones")
        return self.has[name.sha256]


async def test_a_payload_is_fetched_once_for_all_who_ask_also_when_the_first_gives_up():
    coordinator = Coordinator(b"model")
    kept = KeptPayloads(coordinator.fetch)
    coordinator.answering.clear()
    asking = [asyncio.create_task(kept.payload(named(b"model"))) for _ in range(3)]
    await asyncio.sleep(0)
    asking[0].cancel()
    coordinator.answering.set()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1:] == [b"model", b"model"]
    assert await kept.payload(named(b"model")) == b"model"
    assert len(coordinator.asked) == 1


async def test_a_version_that_was_made_again_after_a_restore_is_another_payload():
    # The number of the version is the same: the coordinator was restored from a backup and made it anew.
    coordinator = Coordinator(b"version 7", b"version 7, made again")
    kept = KeptPayloads(coordinator.fetch)
    for payload in (b"version 7", b"version 7, made again", b"version 7"):
        assert await kept.payload(named(payload)) == payload


async def test_only_the_last_payloads_of_a_kind_and_a_run_are_kept():
    payloads = [b"first", b"second", b"third"]
    coordinator = Coordinator(*payloads, b"plan", b"another run's")
    kept = KeptPayloads(coordinator.fetch)
    others = [named(b"plan", PLAN), named(b"another run's", run_id="another")]
    for name in (*others, *map(named, payloads)):
        await kept.payload(name)
    coordinator.asked.clear()
    for name in (*others, named(b"second"), named(b"third")):
        await kept.payload(name)
    assert not coordinator.asked
    assert await kept.payload(named(b"first")) == b"first"
    assert coordinator.asked == [named(b"first")]


async def test_what_is_kept_has_a_bound_and_the_last_payload_stays(monkeypatch):
    monkeypatch.setattr(kept_payloads, "_MOST_BYTES", 10)
    coordinator = Coordinator(b"plan", b"a model of many bytes")
    kept = KeptPayloads(coordinator.fetch)
    await kept.payload(named(b"plan", PLAN))
    assert await kept.payload(named(b"a model of many bytes"))
    assert await kept.payload(named(b"a model of many bytes"))
    assert await kept.payload(named(b"plan", PLAN))
    assert coordinator.asked == [
        named(b"plan", PLAN),
        named(b"a model of many bytes"),
        named(b"plan", PLAN),
    ]


async def test_a_payload_that_the_coordinator_does_not_give_is_none_and_asked_for_again_later():
    coordinator = Coordinator()
    kept = KeptPayloads(coordinator.fetch)
    assert await kept.payload(named(b"model")) is None
    coordinator.has[named(b"model").sha256] = b"model"
    assert await kept.payload(named(b"model")) == b"model"


async def test_the_newest_of_a_kind_is_the_one_kept_last():
    kept = KeptPayloads(Coordinator().fetch)
    assert kept.newest("run", MODEL) is None
    for payload in (b"first", b"second", b"first"):
        kept.keep(named(payload), payload)
        assert kept.newest("run", MODEL) == (named(payload), payload)
    assert kept.newest("run", PLAN) is None
    assert kept.newest("another", MODEL) is None
