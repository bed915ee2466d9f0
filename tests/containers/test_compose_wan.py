"""The compose file with an emulated network: `coterie latency` shows the delay that was asked for, and where."""

import json

import pytest

from .engine import eventually
from .stack import Stack

pytestmark = pytest.mark.containers

FAR = {
    "COTERIE_WAN_COS": "--delay 20",
    "COTERIE_WAN_HOST_0": "--delay 20",
    "COTERIE_WAN_HOST_2": "--delay 20",
}
FILES = ("docker-compose.wan.yml", "docker-compose.scale.yml", "docker-compose.scale.wan.yml")
HOSTS = ("host-0", "host-1", "host-2")
BUSY_MS = 10
"""What a busy machine may add to the least round trip: half of what one delay in a wrong place would add."""


@pytest.fixture(scope="module")
def far(engine, images):
    """A COS and three hosts; the COS and all but one of them are each 20 ms away from everybody, one way."""
    stack = Stack(engine, {**images, **FAR}, *FILES)
    try:
        stack.compose("up", "--detach", *HOSTS, "wan-cos", *(f"wan-{host}" for host in HOSTS))
        stack.until(lambda: "emulating: delay 20 ms" in stack.logs("wan-cos"), "the COS is far")
        for host in ("host-0", "host-2"):
            stack.until(
                lambda host=host: "emulating: delay 20 ms" in stack.logs(f"wan-{host}"), f"{host} is far"
            )
        yield stack
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")


def measured(stack, *options):
    """Return what `coterie latency` measures, by who and whom."""
    command = ("latency", "--config", "/party/config.toml", "--json", "--largest", "0", "--connections", "3")
    printed = stack.compose("run", "--rm", "-T", "operator", *command, "--echoes", "30", *options)
    (line,) = [one for one in printed.splitlines() if one.startswith("{")]
    return {(one["source"], one["target"]): one for one in json.loads(line)["result"]["pairs"]}


def test_an_emulated_delay_of_forty_milliseconds_shows_as_forty(far):
    attending = [f"client/{host}" for host in HOSTS]
    trips = {
        ("client/host-0", "cos/cos"): 40,
        ("client/host-1", "cos/cos"): 20,
        ("client/host-2", "cos/cos"): 40,
        ("client/host-0", "thirdparty/directory"): 20,
        # Nobody of these two is far.
        ("client/host-1", "thirdparty/directory"): 0,
    }
    least = {(pair, kind): float("inf") for pair in trips for kind in ("echo_ms", "connect_ms")}

    def shown():
        """Measure again until the least of everything so far, which is the network alone, is what was asked for."""
        pairs = measured(far)
        if not {(one, "cos/cos") for one in attending} <= set(pairs):
            return None
        for pair, kind in least:
            assert pairs[pair]["failure"] == ""
            least[pair, kind] = min(least[pair, kind], pairs[pair][kind]["least"])
        return pairs if all(found <= trips[pair] + BUSY_MS for (pair, _), found in least.items()) else None

    pairs = eventually(shown, "all hosts attend, and are no farther than they were put", lambda: str(least))
    for (pair, kind), found in least.items():
        # Nothing is faster than the network; a busy machine only adds.
        assert found >= 0.9 * trips[pair], (pair, kind)
    for pair, expected in trips.items():
        assert pairs[pair]["handshake_ms"]["least"] > 0.9 * expected
        # The whole delay is the network's: no time of a server holds any of it.
        assert pairs[pair]["network_ms"]["least"] >= 0.9 * expected
