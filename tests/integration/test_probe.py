"""The health probe of the images asks real services, and says no more than they do."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROBE = Path(__file__).parents[2] / "deploy" / "probe.py"
WAIT_S = 60.0


def probe(state, address, *options):
    """Return exit status and what was said."""
    # As in the image: without site-packages, so that nothing but the standard library is there.
    command = [sys.executable, "-I", "-S", str(PROBE), *options, str(state), address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    return ended.returncode, (ended.stdout + ended.stderr).strip()


def probe_until(done, service):
    """Probe until the answer is one that is waited for, or for too long; return the last."""
    deadline = time.monotonic() + WAIT_S
    while not done(answer := probe(service.state, service.address)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return answer


def test_a_service_that_serves_is_found_serving(third_party):
    # What its page says, on which the fixture waited, gRPC says a moment later.
    assert probe_until(lambda answer: answer[0] == 0, third_party) == (0, "SERVING")


def test_a_service_that_waits_for_a_run_is_found_not_serving(third_party, cos, start_member, tmp_path):
    items = tmp_path / "items.csv"
    items.write_text("item\n1\n")
    owner = start_member(
        "data-owner",
        "probed",
        third_party,
        healthy=False,
        participants=1,
        run="not-started",
        cos={"address": cos.address, "name": cos.name},
        owners=[{"name": "probed", "items": items}],
    )

    # Until it listens there is no answer; from then on it is this one.
    answer = probe_until(lambda answer: "NOT_SERVING" in answer[1], owner)

    assert answer == (1, "not serving: NOT_SERVING")
    # It waits, and nothing is wrong with it: starting it again would help nobody.
    assert probe(owner.state, owner.address, "--alive") == (0, "alive")


def test_a_process_that_hangs_is_found_not_serving(start_third_party):
    hanging = start_third_party()
    hanging._child.send_signal(signal.SIGSTOP)
    try:
        status, said = probe(hanging.state, hanging.address)
        dead = probe(hanging.state, hanging.address, "--alive")
    finally:
        hanging._child.send_signal(signal.SIGCONT)

    assert status == 1
    assert "timed out" in said
    assert dead[0] == 1
    assert dead[1].startswith("not alive: ")
    assert "timed out" in dead[1]


def test_another_service_at_the_address_does_not_pass_for_this_one(third_party, cos):
    status, said = probe(third_party.state, cos.address)

    assert status == 1
    assert "another certificate" in said


@pytest.mark.parametrize("state", ["", "nothing-here"])
def test_a_service_that_has_not_enrolled_is_found_not_serving(third_party, tmp_path, state):
    status, said = probe(tmp_path / state, third_party.address)

    assert status == 1
    assert said.startswith("not serving: ")
