"""A third party that lies to otherwise real processes: it vouches for participants that its log does not have."""

import dataclasses

import numpy as np
import pytest

from coterie.crypto.transparency import BUNDLE, LogBreach, bundle_statement
from coterie.launch.local_run import LocalRun
from coterie.launch.log_audit import of_local_run, replay
from coterie.net.enrolment import saved_bundles
from coterie.net.transparency import read_evidence
from coterie.studies.run_data import load, make_feed

from .lying.federation import Unlogged

USERS_AT = (8, 8, 8)
SYBIL, OTHERS = "client/host-0", ("client/host-1", "client/host-2")
STATUS = 31
"""Exit status of a party that stops because of the log."""


@pytest.fixture
def under(small, tmp_path):
    """Return a function that makes a federation whose third party keeps the first host's users from its log."""

    def make(*, checked):
        settings = small(
            system="fedncf",
            secure_sum="masked",
            split={"kind": "leave-last-out"},
            data={"synthetic": {"users": sum(USERS_AT), "items": 60, "interactions": 300, "seed": 2}},
            rounds={"cohort": sum(USERS_AT), "group": sum(USERS_AT), "passes": 1, "evaluate_every": 1},
            federation={"hosts": len(USERS_AT), "phase_timeout_s": 600.0},
        )
        feed = make_feed(settings, load(settings), 0)
        feed = dataclasses.replace(feed, host=np.repeat(np.arange(len(USERS_AT)), USERS_AT))
        return Unlogged(settings, feed, tmp_path, [SYBIL], checked=checked)

    return make


async def test_hosts_that_do_not_look_at_the_log_form_sums_with_participants_that_it_does_not_have(under):
    async with under(checked=False) as federation:
        await federation.start()
        report = await federation.finish()
    assert report["phase"] == "done"
    assert all(read_evidence(federation.children[party].state) is None for party in OTHERS)


async def test_no_sum_is_formed_with_participants_that_the_log_does_not_have(under):
    async with under(checked=True) as federation:
        await federation.start()
        ended = [federation.children[party].process for party in OTHERS]
        await federation.comes_true(
            lambda: all(process.poll() is not None for process in ended), "both hosts stop"
        )
        assert [process.returncode for process in ended] == [STATUS, STATUS]
        hidden = {bundle_statement(bundle) for bundle in saved_bundles(federation.children[SYBIL].state)}
        for party in OTHERS:
            evidence = read_evidence(federation.children[party].state)
            assert (evidence.finding, evidence.kind) == (LogBreach.NOT_LOGGED, BUNDLE)
            assert evidence.statement in hidden
            assert "error: thirdparty/directory signed" in federation.children[party].log.read_text()
        audit = await replay(of_local_run(LocalRun.at(federation.folder)))
        assert audit.kinds == {"bundle": 17, "certificate": 7}
        # The hosts' heads are of the log that the third party shows, and their evidence holds all the same.
        assert audit.compared == 6
        assert len(audit.problems) == 2
        assert all("evidence: thirdparty/directory signed" in problem for problem in audit.problems)
        formed = [one.round for one in federation.events if one.HasField("round") and not one.round.reason]
        assert formed == []
