"""The compose files bring up a COS of several processes; a run outlives kills of an intake and the coordinator."""

import json

import pytest

from .database_image import database_image
from .same_run import in_one_process
from .stack import HOSTS, Stack

pytestmark = [pytest.mark.containers, pytest.mark.full("takes two minutes with its images")]

PASSES = 16
SETTINGS = {
    "COTERIE_REFERENCE": "false",
    "COTERIE_SECURE_SUM": "masked",
    "COTERIE_ROUNDS__PASSES": str(PASSES),
    "COTERIE_ROUNDS__COHORT": "30",
    "COTERIE_ROUNDS__GROUP": "30",
    "COTERIE_ROUNDS__EVALUATE_EVERY": "1",
}
COORDINATORS, INTAKES = ("coordinator-0", "coordinator-1"), ("intake-0", "intake-1")


@pytest.fixture(scope="module")
def stack(engine, images):
    settings = {
        **images,
        **SETTINGS,
        "COTERIE_POSTGRES_IMAGE": database_image(engine, images["BASE_IMAGE"]),
        "BALANCER_IMAGE": engine.balancer_image(),
    }
    one = Stack(engine, settings, "docker-compose.fedncf.yml", "docker-compose.replicas.yml")
    one.compose("build", "cos", "coordinator-0")
    try:
        yield one
    finally:
        one.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")


@pytest.fixture(scope="module")
def trained(stack, tmp_path_factory):
    """Train; kill an intake and the coordinator; return who was in office before and after, and the report."""
    stack.compose("up", "--detach", "operator")
    stack.until(lambda: reached(stack, 2), "the second pass ends")
    first = in_office(stack)
    stack.crash("intake-0")
    stack.until(lambda: reached(stack, 4), "a pass begins and ends without the intake")
    # As a machine that is gone: the engine does not start it again.
    stack.container(first).kill()
    second = stack.until(lambda: in_office(stack), "the standby serves")
    assert stack.state("operator")["Running"], "the run ended before anything was killed"
    stack.until(lambda: not stack.state("operator")["Running"], "the run ends")
    assert stack.state("operator")["ExitCode"] == 0, stack.logs("operator")
    report = stack.copy("operator", "/report", tmp_path_factory.mktemp("parties"))
    return first, second, json.loads((report / "report.json").read_text())


def reached(stack, number):
    return f"pass {number}/{PASSES}" in stack.logs("operator")


def in_office(stack):
    """Return the coordinator that serves, None while none does."""
    found = [name for name in COORDINATORS if stack.state(name)["Running"] and serves(stack, name)]
    return found[0] if len(found) == 1 else None


def serves(stack, service):
    status, _ = stack.execute(service, "python3", "-I", "-S", "/opt/coterie/probe.py", "/party/state")
    return not status


def test_the_standby_takes_over_and_the_numbers_are_those_of_one_process_without_a_fault(trained, stack):
    first, second, report = trained
    assert {first, second} == set(COORDINATORS)
    assert (report["system"], report["secure_sum"]) == ("fedncf", "masked")
    trained_rounds = [
        one["version"] for one in report["rounds"] if one["purpose"] == "train" and not one["reason"]
    ]
    assert trained_rounds == list(range(1, len(trained_rounds) + 1))
    alone = in_one_process("fedncf", stack.environment, sets=["federation.hosts=2", "secure_sum=clear"])
    found, wanted = (
        [(one["epoch"], one["version"], one["metrics"]) for one in history]
        for history in (report["history"], alone["history"])
    )
    assert report["abandoned"] == 0
    assert found == wanted
    assert len(found) == PASSES + 1


def test_intakes_took_the_contributions_and_both_are_healthy_after_the_kill(trained, stack, tmp_path):
    assert stack.restarts("intake-0") == 1
    for intake in INTAKES:
        stack.until(lambda intake=intake: stack.healthy(intake), f"{intake} is healthy")
    # Accounts are written at the end.
    stack.compose("stop", "--timeout", "20", *INTAKES)
    accounts = [
        json.loads(stack.copy(intake, "/party/state/account.json", tmp_path / intake).read_text())
        for intake in INTAKES
    ]
    assert any(one["counts"].get("take contributions") for one in accounts)


def test_parties_reach_the_balancer_and_no_process_behind_it(trained, stack):
    networks = {
        name: {one.rpartition("_")[2] for one in stack.container(name).attrs["NetworkSettings"]["Networks"]}
        for name in ("cos", "thirdparty", "operator", "owner-0", *HOSTS, *COORDINATORS, *INTAKES)
    }
    for name in ("operator", "owner-0", *HOSTS):
        assert networks[name] == {"federation"}, name
    for name in (*COORDINATORS, *INTAKES):
        assert networks[name] == {"orchestration"}, name
    # Only who is in both is reached by both.
    assert networks["cos"] == networks["thirdparty"] == {"federation", "orchestration"}
    for name in ("coordinator-1", "intake-1"):
        status, said = stack.execute("host-0", "getent", "hosts", name)
        assert status != 0, said


def test_the_balancer_has_no_rights_no_key_and_no_socket_of_the_database(trained, stack):
    attached = stack.container("cos").attrs
    assert attached["Config"]["User"] == "10001:10001"
    assert attached["HostConfig"]["ReadonlyRootfs"] is True
    assert attached["HostConfig"]["CapDrop"] == ["ALL"]
    assert [one["Destination"] for one in attached["Mounts"] if one["Type"] == "volume"] == ["/party"]
    status, listed = stack.execute("cos", "ls", "-A", "/party")
    assert (status, listed.strip()) == (0, "")
