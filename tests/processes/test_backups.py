"""Each role restored from a backup of each age, in one run: it goes on and says what was lost, or refuses by name."""

import re
import shutil

import pytest

from coterie.cli.main import invoke
from coterie.launch.authority import make_authority
from coterie.telemetry.audit_log import verify

COS, THIRD_PARTY = "cos/cos", "thirdparty/directory"
LATE = "client/host-9"
AGES = ("before", "rounds", "seconds")
"""When a backup was made: before the run began, before its last rounds, and just before the restore."""
AUDITED = {
    COS: {"start", "restore", "restored", "registration", "operator", "round", "sum"},
    THIRD_PARTY: {"start", "restore", "enrolment", "key"},
    "client/host-0": {"start", "restore", "no-consent"},
    "client/host-4": {"start", "enrolment", "consent"},
    "decrypting-client/key-1": {"start", "restore", "no-consent", "reveal", "key"},
    "decrypting-client/key-4": {"start", "consent", "reveal", "key"},
    "data-owner/catalogue-2": {"start", "restore", "restored"},
}
"""Kinds of records that parties' audit logs have at the end."""

pytestmark = pytest.mark.xdist_group("backups")


def settings_of(small):
    return small(
        system="fedmvmf",
        secure_sum="encrypted",
        split={"kind": "random"},
        data={"synthetic": {"users": 60, "items": 60, "interactions": 1500}},
        mvmf={"factors": 4, "ridge": 3.0, "item_servers": 3},
        rounds={"cohort": 60, "group": 60, "passes": 2000, "evaluate_every": 1000},
        federation={"hosts": 10, "party_timeout_s": 4.0},
        encryption={"bits": 1024, "comparison": True, "holders": 7},
    )


def parties_of(age):
    """Return the parties that get a backup of an age; a majority of hosts and of key holders stays."""
    number = AGES.index(age)
    return f"client/host-{number}", f"decrypting-client/key-{number}", f"data-owner/catalogue-{number}"


class Backups:
    """Backups of a running federation's parties, by age."""

    def __init__(self, running, folder):
        self.running, self.folder = running, folder

    def _command(self, name, party, archive, *options):
        child = self.running.children[party]
        config = str(child.folder / "config.toml")
        return invoke([name, child.role, str(archive), "--config", config, *options])

    def path(self, party, age):
        return self.folder / f"{age}-{party.replace('/', '-')}.tar"

    def make(self, party, age, *options):
        assert self._command("backup", party, self.path(party, age), *options) == 0

    def make_all(self, age):
        """Back up parties of each role; those that have to stop are started again."""
        for party in parties_of(age):
            child = self.running.children[party]
            child.kill()
            self.make(party, age)
            child.start()
        self.make(COS, age)
        self.make(THIRD_PARTY, age)

    def restore(self, party, age):
        """Put a party back to what it was, and start it."""
        child = self.running.children[party]
        child.kill()
        shutil.rmtree(child.state)
        assert self._command("restore", party, self.path(party, age)) == 0
        child.start()

    def refused(self, party, archive, capsys, *options):
        """Try to restore a party that has lost its state; return what the command says, and put the state back."""
        child = self.running.children[party]
        kept = child.state.with_name("kept")
        child.state.rename(kept)
        capsys.readouterr()
        assert self._command("restore", party, archive, *options) == 40
        assert not child.state.exists(), "nothing was written"
        kept.rename(child.state)
        return " ".join(capsys.readouterr().err.split())


def said(running, party, event, after=0):
    """Return the lines of a party's log that have some words."""
    text = running.children[party].log.read_text()[after:]
    return [line for line in text.splitlines() if event in line]


async def says(running, party, event, after=0):
    """Wait until a party has logged something, and return the line."""
    await running.comes_true(lambda: said(running, party, event, after), f"{party} says {event!r}")
    return said(running, party, event, after)[0]


async def test_each_role_restored_from_a_backup_of_each_age_goes_on_or_refuses_and_says_what_was_lost(
    small, federation, tmp_path, capsys
):
    async with federation(settings_of(small), hold=[LATE]) as running:
        backups = Backups(running, tmp_path)
        await running.start()
        for party in running.children:
            if party.startswith(("client/", "decrypting-client/")) and party != LATE:
                await running.change(party, "joined")

        backups.make_all("before")
        # All of them answer in the first sum, which a restored COS gets again over the same members only.
        await running.becomes("SERVING", *parties_of("before")[:2])
        running.release(LATE)
        await running.a_round("the first round", reason="")
        backups.make_all("rounds")
        for _ in range(5):
            await running.a_round("a round after the backup", reason="")

        # --- the COS -----------------------------------------------------------------------------------------------
        backups.make(COS, "seconds")
        for age in ("seconds", "rounds", "before"):
            before = running.children[COS].log.stat().st_size
            backups.restore(COS, age)
            if age == "before":
                # It knows neither that the last host registered nor that the run began.
                await says(running, LATE, "the COS has forgotten this party")
            if age != "seconds":
                line = await says(running, COS, "this server is behind its parties", before)
                assert '"goes_on_after_round": ' in line
                assert '"versions_lost_after": ' in line
            await running.a_round(f"a round after the restore of the COS, {age}", reason="")
            rounds = (await running.report())["rounds"]
            reasons = [one["reason"] for one in rounds if "as after a restore" in one["reason"]]
            if age != "seconds":
                found = [re.search(r"versions of the model after (\d+) are lost", one) for one in reasons]
                kept = [int(one.group(1)) for one in found if one is not None]
                # Backups take a moment, in which a further round may end.
                assert kept, reasons
                assert (0 in kept) is (age == "before"), reasons
            # None of the rounds that count comes twice.
            numbers = [one["round"] for one in rounds if not one["reason"]]
            assert numbers == sorted(set(numbers))

        # --- the third party ---------------------------------------------------------------------------------------
        backups.make(THIRD_PARTY, "seconds")
        for age in ("seconds", "rounds"):
            # Nothing was added to its log since.
            backups.restore(THIRD_PARTY, age)
            await running.becomes("SERVING", THIRD_PARTY)
            await running.a_round(f"a round after the restore of the third party, {age}", reason="")

        # --- hosts, key holders and item servers -------------------------------------------------------------------
        for party in parties_of("seconds"):
            running.children[party].kill()
            backups.make(party, "seconds")
        for age in AGES:
            for party in parties_of(age):
                backups.restore(party, age)
        for age in AGES:
            host, holder, owner = parties_of(age)
            lost = "all that it did in the run is lost" if age == "before" else "what it did after round "
            for party in (host, holder):
                line = await says(running, party, "the state was restored from a backup made at ")
                assert lost in line, line
                assert "takes no part in protected sums" in line
            assert "the state was restored from a backup made at " in await says(
                running, owner, "goes on with a restored state"
            )
            version = await says(running, owner, "an owner's item factors are those of a backup")
            assert ('"version": null' in version) == (age == "before"), version
        await running.a_round("a round with those who remain", reason="")
        await running.a_round("and another one", reason="")

        # --- backups of another run, party and federation ----------------------------------------------------------
        for party in parties_of("before"):
            running.children[party].kill()
            other = backups.path(party, "other")
            backups.make(party, "other", "--set", "run=other")
            told = backups.refused(party, other, capsys)
            assert f"is a backup of another run: {party} took part in 'other' then" in told, told
            assert "restore a backup made in 'test'" in told
            told = backups.refused(party, backups.path(party, "before"), capsys, "--set", "name=someone")
            assert f"is a backup of {party}, not of " in told, told
        running.children[COS].kill()
        authority = tmp_path / "authority"
        make_authority(authority)
        told = backups.refused(
            COS, backups.path(COS, "rounds"), capsys, "--set", f"enrol.ca_file={authority / 'ca.pem'}"
        )
        assert "is a backup of another federation: its authority has the SHA-256" in told, told
        running.children[COS].start()
        await running.becomes("SERVING", COS)
        await running.a_round("a round of the COS that was not replaced", reason="")

        # Another federation's third party, at this one's address: nobody trusts it, and training goes on.
        third_party = running.children[THIRD_PARTY]
        third_party.kill()
        kept = third_party.state.rename(third_party.state.with_name("kept"))
        begun = {party: child.log.stat().st_size for party, child in running.children.items()}
        third_party.start()
        await running.comes_true(
            lambda: any(said(running, party, "CERTIFICATE_VERIFY_FAILED", at) for party, at in begun.items()),
            "a party says that it does not trust the other third party",
        )
        await running.a_round("a round while another third party answers", reason="")
        third_party.kill()
        shutil.rmtree(third_party.state)
        kept.rename(third_party.state)

        # --- the third party of before the run ---------------------------------------------------------------------
        backups.restore(THIRD_PARTY, "before")

        set_back = "error: thirdparty/directory shows a log"

        def stopped():
            return [party for party in running.children if said(running, party, set_back)]

        await running.comes_true(stopped, "a party does not take the third party from before the run")
        party = stopped()[0]
        # Other errors may have been logged before, of which it did not end.
        (line,) = said(running, party, set_back)
        assert "its log was set back, as by a restoration from a backup" in line
        assert "if it was restored from a backup, docs/upkeep.md says" in await says(running, party, "hint: ")

    # What an auditor needs is in the audit logs, which hold although services were killed and restored.
    kinds = {party: verify(child.state) for party, child in running.children.items()}
    assert {party: found.problems for party, found in kinds.items() if found.problems} == {}
    for party, wanted in AUDITED.items():
        assert wanted <= kinds[party].kinds.keys(), (party, kinds[party].kinds)
