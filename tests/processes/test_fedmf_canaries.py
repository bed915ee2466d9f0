"""Who saw what of FedMF and FCF, on the bytes of runs: histories with ratings, users' factors, the model, supports."""

import asyncio
import dataclasses

import numpy as np
import pytest
from safetensors.numpy import load_file

from coterie.privacy.canaries import CanaryKit
from coterie.privacy.visibility import Audit, observed
from coterie.studies.run_data import load, make_feed
from coterie.systems.visibility import matrix, rows_of

from .planted import (
    Held,
    ask,
    audit_everybody,
    names_at,
    plant_histories,
    plant_identities,
    plant_recommendations,
    plant_secrets,
    with_canaries,
)

USERS_AT = (12, 9, 9)
COS, OWNER = "cos/cos", "data-owner/catalogue"
KINDS = [("fedmf", "clear"), ("fedmf", "masked"), ("fcf", "masked")]
EACH = pytest.mark.parametrize(("system", "secure_sum"), KINDS)
FROM_USERS = {"interaction", "history", "private_state", "user_name", "recommendation"}


def run_to_the_end(small, federation, system, secure_sum):
    settings = small(
        system=system,
        secure_sum=secure_sum,
        split={"kind": "random"},
        data={"synthetic": {"users": sum(USERS_AT), "items": 40, "interactions": 500}},
        rounds={"cohort": 20, "group": 20, "passes": 2, "evaluate_every": 2},
        federation={"hosts": len(USERS_AT), "transcripts": True},
        **{system: {"factors": 4, "min_touch": 2}},
    )
    kit = CanaryKit(7)
    feed = make_feed(settings, load(settings), 0)
    feed = dataclasses.replace(feed, host=np.repeat(np.arange(len(USERS_AT)), USERS_AT))
    feed = with_canaries(feed, kit)
    keys = {role: {"log_level": "debug"} for role in ("client", "cos", "data-owner", "thirdparty")}

    async def to_the_end():
        async with federation(settings, feed=feed, keys=keys) as running:
            await running.start()
            await running.ended()
            hosts = running.parties("client")
            recommended = {host: await ask(running, host, names_at(feed, host)[0]) for host in hosts}
            pages = [(party, running.page(party)) for party in running.children]
            return Held(running, kit, await running.finish(), pages, recommended)

    held = asyncio.run(to_the_end())
    assert held.running.ended_well()
    assert held.report["abandoned"] == 0
    return held


@pytest.fixture(scope="module")
def audited(small, federation):
    """Return a function that runs a federation, plants its private values and audits everything that anybody held."""
    made = {}

    def make(system, secure_sum):
        if (system, secure_sum) not in made:
            held = run_to_the_end(small, federation, system, secure_sum)
            for plant in (
                plant_histories,
                plant_recommendations,
                plant_identities,
                plant_secrets,
                plant_learned,
            ):
                plant(held)
            audit = Audit(held.kit, rows_of(system, "hosts", secure_sum))
            made[system, secure_sum] = held, audit_everybody(held, audit).result()
        return made[system, secure_sum]

    return make


def plant_learned(held):
    """Users' own factors, the model, and supports."""
    for host in held.running.parties("client"):
        paths = list((held.running.children[host].state / "private").glob("*factors.npy"))
        assert paths
        for path in paths:
            held.kit.rows("private_state", np.load(path), {host})
    newest = max((held.running.cos.state / "models" / "test").glob("version-*.safetensors"))
    arrays = load_file(newest)
    held.kit.rows("item_factor", arrays["model.items"])
    held.kit.plant("item_support", arrays["supports"].astype("<u4").tobytes())


@EACH
def test_nobody_holds_of_fedmf_or_fcf_what_it_may_not_see(audited, system, secure_sum):
    held, result = audited(system, secure_sum)
    assert result.violations == ()
    seen = {
        party: {name for name, how in kinds.items() if how == "seen"} for party, kinds in result.seen.items()
    }
    for party in (COS, OWNER, "thirdparty/directory"):
        assert not seen[party] & FROM_USERS
    assert seen[COS] >= {"item_factor", "item_support"}
    for host in held.running.parties("client"):
        assert seen[host] >= {"interaction", "history", "private_state", "item_factor"}
        assert "item_support" not in seen[host]


@EACH
def test_the_kinds_read_off_the_messages_of_fedmf_and_fcf_are_declared(audited, system, secure_sum):
    held, _ = audited(system, secure_sum)
    transcripts = {party: [child.state / "transcript.bin"] for party, child in held.running.children.items()}
    declared, shown = matrix(system, "hosts", secure_sum), observed(transcripts)
    for party, kinds in shown.items():
        for name, seen in kinds.items():
            assert not seen or declared[party.partition("/")[0]][name].allowed, (party, name)
    sent = "host_update" if secure_sum == "clear" else "masked_vector"
    assert shown[COS][sent]
    assert not shown[OWNER]["item_pull"]


@EACH
def test_logs_and_metrics_pages_of_fedmf_and_fcf_hold_nothing_private(audited, system, secure_sum):
    held, _ = audited(system, secure_sum)
    private = {canary.kind for canary in held.kit.canaries} - {"participant_id", "item_support"}
    for party, page in held.pages:
        assert not private & held.kit.search(held.running.children[party].log.read_bytes()), party
        assert held.kit.search(page.encode()) == set(), party
