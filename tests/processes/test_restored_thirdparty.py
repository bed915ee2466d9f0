"""A third party restored from an older backup: parties refuse it by its log, and go on as docs/upkeep.md says."""

import asyncio
import shutil

import pytest

from coterie.cli.main import invoke
from coterie.errors import CoterieError
from coterie.launch.authority import make_token
from coterie.net.transparency import EVIDENCE, FOLDER, HEAD
from coterie.wire.v1 import operator_pb2 as wire

THIRD_PARTY, LATE = "thirdparty/directory", "client/host-2"
LATER = "5e" * 32
"""SHA-256 of a certificate that is revoked after the backup."""
USERS = 24


def settings_of(small):
    return small(
        system="fedncf",
        secure_sum="masked",
        split={"kind": "leave-last-out"},
        data={"synthetic": {"users": USERS, "items": 40, "interactions": 300}},
        rounds={"cohort": USERS, "group": USERS, "passes": 5_000, "evaluate_every": 5_000},
        federation={"hosts": 3, "party_timeout_s": 5.0},
    )


def command(running, name, *options):
    child = running.children[THIRD_PARTY]
    return invoke([name, child.role, *options, "--config", str(child.folder / "config.toml")])


async def revoke(running):
    tls = str(running.folder / "operator" / "tls")
    at = running.address(THIRD_PARTY)
    return await asyncio.to_thread(
        invoke, ["certs", "revoke", "--tls", tls, "--address", at, "--certificate", LATER]
    )


async def until_ended(running, *parties):
    """Wait until parties have ended with the status of a third party that takes something back."""
    for party in parties:
        await running.comes_true(
            lambda party=party: running.children[party].process.poll() == 31,
            f"{party} ends with status 31",
        )


async def test_a_third_party_restored_from_before_an_enrolment_is_refused_and_taken_again_by_the_procedure(
    small, federation, tmp_path
):
    backup = str(tmp_path / "thirdparty.tar")
    async with federation(settings_of(small), hold=[LATE]) as running:
        await running.start()
        for party in ("client/host-0", "client/host-1"):
            await running.change(party, "joined")
        assert command(running, "backup", backup) == 0
        running.release(LATE)
        await running.a_round("a round over everybody", reason="", summed=USERS)
        assert await revoke(running) == 0

        third_party = running.children[THIRD_PARTY]
        third_party.kill()
        shutil.rmtree(third_party.state)
        assert command(running, "restore", backup) == 0
        third_party.start()
        hosts = running.parties("client")
        await until_ended(running, *hosts, *running.parties("data-owner"))
        await running.ended()
        state = await running.run_state()
        assert (state.phase, state.resumable) == (wire.RunPhase.RUN_PHASE_FAILED, True)
        assert "its log was set back" in state.reason
        with pytest.raises(CoterieError, match="its log was set back"):
            await running._connected.resume("test")

        # The procedure of docs/upkeep.md.
        parties = [child for child in running.children.values() if child is not third_party]
        for child in parties:
            await child.stop()
        assert await revoke(running) == 0
        for child in parties:
            for name in (HEAD, EVIDENCE):
                (child.state / FOLDER / name).unlink(missing_ok=True)
        late = running.children[LATE]
        (late.state / "tls" / "chain.pem").unlink()
        make_token(third_party.state, late.role, late.name, USERS, late.folder / "token")
        for child in parties:
            child.start()
        await running.up(*(child.party for child in parties))
        await running._connected.resume("test")
        running.follow_again()
        await running.a_round("a round over everybody after the procedure", reason="", summed=USERS)
        await running.stop()
    assert {party: child.process.returncode for party, child in running.children.items()} == dict.fromkeys(
        running.children, 0
    )
