"""deploy/wan.py on networks of its own: what it was told is what a connection through it shows."""

import bisect
import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

WAN = Path(__file__).parents[2] / "deploy" / "wan.py"
SOON_S = 20.0

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces of our own take root and the command `ip`",
)


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no network of our own: ip {' '.join(words)}: {done.stderr.strip()}")


class Network:
    """Two namespaces, and a third between them that forwards."""

    left, right = "10.77.1.2", "10.77.2.2"

    def __init__(self) -> None:
        tag = secrets.token_hex(3)
        self.names = {part: f"wan-{tag}-{part}" for part in ("left", "middle", "right")}
        self.emulating: list[subprocess.Popen[str]] = []

    def up(self) -> None:
        for name in self.names.values():
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for number, part in enumerate(("left", "right"), start=1):
            one, middle = self.names[part], self.names["middle"]
            ip(
                "link",
                "add",
                "eth0",
                "netns",
                one,
                "type",
                "veth",
                "peer",
                "name",
                f"m{number}",
                "netns",
                middle,
            )
            ip("-n", one, "addr", "add", f"10.77.{number}.2/24", "dev", "eth0")
            ip("-n", middle, "addr", "add", f"10.77.{number}.1/24", "dev", f"m{number}")
            ip("-n", one, "link", "set", "eth0", "up")
            ip("-n", middle, "link", "set", f"m{number}", "up")
            ip("-n", one, "route", "add", "default", "via", f"10.77.{number}.1")
        ip(
            "netns",
            "exec",
            self.names["middle"],
            sys.executable,
            "-c",
            "open('/proc/sys/net/ipv4/ip_forward', 'w').write('1')",
        )

    def emulate(self, part: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(WAN), "--namespace", self.names[part], *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.emulating.append(process)
        if not process.stdout.readline().startswith("emulating"):
            said = process.communicate(timeout=SOON_S)[1]
            if "kernel" in said:
                pytest.skip(said.strip())
            pytest.fail(said)
        return process

    def down(self) -> None:
        for process in self.emulating:
            process.terminate()
            process.communicate(timeout=SOON_S)
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def within(self, part: str, make):
        """Make a socket in a namespace: it stays there, whoever uses it.  In a thread, whose end undoes the move."""
        made = []

        def work() -> None:
            with Path(f"/run/netns/{self.names[part]}").open() as handle:
                assert ctypes.CDLL(None).setns(handle.fileno(), 0x40000000) == 0
            made.append(make())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(SOON_S)
        return made[0]


@pytest.fixture
def network():
    network = Network()
    try:
        network.up()
        yield network
    finally:
        network.down()


@contextlib.contextmanager
def datagrams(network):
    """Yield a socket whose datagrams the other side sends back, one by one."""
    far = network.within("right", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    near = network.within("left", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    far.bind((network.right, 4000))
    near.bind((network.left, 4000))
    near.connect((network.right, 4000))
    near.settimeout(SOON_S)

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                data, sender = far.recvfrom(2048)
                if data == b"end":
                    return
                far.sendto(data, sender)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield near
    finally:
        # Not through the network, which may lose it.
        network.within("right", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)).sendto(
            b"end", (network.right, 4000)
        )
        thread.join(SOON_S)
        near.close()
        far.close()


def round_trips_ms(near: socket.socket) -> Iterator[float]:
    """Yield round trips for as long as somebody asks for more, but not forever."""
    begun = time.perf_counter()
    while time.perf_counter() - begun < SOON_S:
        started = time.perf_counter()
        near.send(b"there and back")
        near.recv(2048)
        yield (time.perf_counter() - started) * 1e3


def assert_delayed_by(near: socket.socket, delay_ms: float) -> None:
    """Check that no round trip is shorter than it was told, and that not much is added.

    A busy machine makes any of them longer, so it takes one only to show that the network did not.
    """
    trips = []
    for trip in round_trips_ms(near):
        trips.append(trip)
        assert trip >= delay_ms
        if len(trips) >= 15 and min(trips) < 1.25 * delay_ms:
            return
    pytest.fail(f"the shortest of {len(trips)} round trips took {min(trips):.1f} ms, {delay_ms} were told")


def test_twenty_milliseconds_at_each_end_are_a_round_trip_of_forty_and_end_with_the_program(network):
    with datagrams(network) as near:
        network.emulate("left", "--delay", "20")
        at_the_other_end = network.emulate("right", "--delay", "20")
        assert_delayed_by(near, 40)
        at_the_other_end.send_signal(signal.SIGKILL)
        at_the_other_end.wait(SOON_S)
        assert_delayed_by(near, 20)


def test_what_is_forwarded_between_two_addresses_is_delayed_each_way_and_nothing_else(network):
    with datagrams(network) as near:
        network.emulate("middle", "--delay", "20", "--between", network.left, network.right)
        assert_delayed_by(near, 40)
        network.emulate("middle", "--delay", "30", "--between", network.left, "10.77.2.9", "--queue", "50")
        assert_delayed_by(near, 40)


def test_the_share_that_it_was_told_is_lost(network):
    sent = 1500
    with datagrams(network) as near:
        network.emulate("left", "--loss", "20", "--seed", "1")
        near.settimeout(0.5)
        back = 0
        for first in range(0, sent, 30):
            for number in range(30):
                near.send(b"%d" % (first + number))
            with contextlib.suppress(TimeoutError):
                while near.recv(2048) != b"%d" % (first + 29):
                    back += 1
                back += 1
    assert back / sent == pytest.approx(0.8, abs=0.04)


def test_a_stream_comes_no_faster_than_the_rate_and_reaches_it(network):
    network.emulate("right", "--rate", "20", "--delay", "5")
    listener = network.within("right", lambda: socket.create_server((network.right, 4001)))
    near = network.within("left", lambda: socket.create_connection((network.right, 4001), timeout=SOON_S))
    far, _ = listener.accept()
    far.settimeout(SOON_S)
    total, window = 5_000_000, 500_000
    sending = threading.Thread(target=lambda: near.sendall(bytes(total)))
    received, came = 0, [(time.perf_counter(), 0)]
    sending.start()
    while received < total:
        received += len(far.recv(1 << 16))
        came.append((time.perf_counter(), received))
    sending.join()
    for one in (near, far, listener):
        one.close()
    # Headers are part of what the link brings: 66 of 1514 bytes.
    told = 20e6 / 8 * 1448 / 1500
    assert total / (came[-1][0] - came[0][0]) <= told
    # A busy machine holds up some of it: part of the stream shows what the link lets through.
    bytes_by = [count for _, count in came]
    quickest = 0.0
    for here, count in came:
        place = bisect.bisect_left(bytes_by, count + window)
        if place < len(came):
            there, more = came[place]
            quickest = max(quickest, (more - count) / (there - here))
    assert quickest >= 0.9 * told


def test_it_ends_when_the_network_that_it_is_for_does(network):
    process = network.emulate("left", "--delay", "1")
    ip("-n", network.names["left"], "link", "del", "eth0")
    assert process.wait(SOON_S) == 2
    assert "the network is gone" in process.stderr.read()


def test_a_second_program_on_the_same_queue_is_told_so(network):
    network.emulate("left", "--delay", "1")
    command = [sys.executable, str(WAN), "--namespace", network.names["left"], "--delay", "1"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=SOON_S)
    assert second.returncode == 2
    assert "--queue names another" in second.stderr


def test_without_the_right_it_says_which_right_is_missing():
    # Everything is imported before the right is given up: the interpreter may be where only root can read.
    work = """
import os, runpy, sys
wan = runpy.run_path(sys.argv[1], run_name="wan")
os.setgroups([]), os.setgid(65534), os.setuid(65534)
try:
    wan["Emulation"](wan["Conditions"](0.001), [])
except wan["WanError"] as error:
    sys.exit(str(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", work, str(WAN)], capture_output=True, text=True, timeout=SOON_S
    )
    assert done.returncode == 1
    assert "be root, or have CAP_NET_ADMIN" in done.stderr
