"""Devices that check in: real processes without a connection between two check-ins, through restarts of either side."""

from pathlib import Path

from coterie.process.next_wake import NEXT_WAKE

from .test_fedncf_faults import USERS_AT, feed_of

LATE = "client/host-2"
DEVICES = ("client/host-0", "client/host-1")
SERVERS = ("cos/cos", "thirdparty/directory")


def settings_of(small, secure_sum):
    users = sum(USERS_AT)
    return small(
        system="fedncf",
        secure_sum=secure_sum,
        split={"kind": "leave-last-out"},
        data={"synthetic": {"users": users, "items": 60, "interactions": 600}},
        rounds={"cohort": users, "group": users, "passes": 1, "evaluate_every": 1, "step_timeout_s": 60.0},
        federation={"hosts": len(USERS_AT), "check_in_s": 8.0, "party_timeout_s": 20.0},
    )


def connections(running, party, *to):
    """Return the number of TCP connections that a process holds to others of the federation."""
    ports = {int(running.address(one).rsplit(":", 1)[1]) for one in to}
    process = running.children[party].process.pid
    own = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            own.add(str(descriptor.readlink()))
        except FileNotFoundError:
            continue
    found = 0
    # gRPC's sockets are of IPv6, also where they lead to an address of IPv4.
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            established = fields[3] == "01" and f"socket:[{fields[9]}]" in own
            found += established and int(fields[2].rsplit(":", 1)[1], 16) in ports
    return found


async def rests(running, device, times=1):
    """Wait until a device holds no connection, so many times with a check-in between two."""
    for time in range(times):
        if time:
            await running.comes_true(
                lambda: connections(running, device, *SERVERS),
                f"{device} checks in again",
            )
        await running.comes_true(
            lambda: not connections(running, device, *SERVERS),
            f"{device} holds no connection",
        )


async def test_devices_hold_no_connection_between_check_ins_and_train_as_all_others(small, federation):
    settings = settings_of(small, "masked")
    async with federation(settings, hold=[LATE], feed=feed_of(settings)) as running:
        await running.start()
        for device in DEVICES:
            await running.change(device, "joined")
            # Twice: gRPC's own idle timeout closes the first connection of a channel only.
            await rests(running, device, times=2)
        # Either side is started again while the devices rest.
        running.kill_and_restart("cos/cos", DEVICES[0])
        await running.up("cos/cos", DEVICES[0])
        running.follow_again()
        running.release(LATE)
        report = await running.finish()

    assert running.ended_well()
    assert (report["phase"], report["reason"]) == ("done", "")
    assert {one["summed"] for one in report["rounds"]} == {sum(USERS_AT)}


async def test_a_device_that_is_started_again_before_its_time_calls_nobody(small, federation):
    settings = settings_of(small, "masked")
    settings = settings.model_copy(
        update={
            "rounds": settings.rounds.model_copy(update={"step_timeout_s": 2400.0}),
            "federation": settings.federation.model_copy(update={"check_in_s": 1200.0}),
        }
    )
    device = DEVICES[0]
    async with federation(settings, hold=[LATE, DEVICES[1]]) as running:
        await running.start()
        await running.change(device, "joined")
        # It is told to come back in ten minutes at least.
        kept = running.children[device].state / NEXT_WAKE
        await running.comes_true(kept.exists, f"{device} was told when to come back")
        running.kill_and_restart(device)
        log = running.children[device].log
        await running.comes_true(
            lambda: "rests as before this start" in log.read_text(), f"{device} goes on with its rest"
        )
        assert not connections(running, device, *SERVERS)
        assert log.read_text().count('"joined"') == 1
