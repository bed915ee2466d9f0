"""Joining by an invitation: what a party gets, and every way in which an invitation does not let anybody in."""

import asyncio
import json
import time
import tomllib

import pytest

from coterie.cli.main import invoke
from coterie.config.load import load_service
from coterie.crypto.authority import Authority
from coterie.crypto.roster import PAILLIER
from coterie.errors import CertificateError, ConfigError, PeerError, PreflightError
from coterie.launch.invitation import Invitation, invite
from coterie.launch.joining import join
from coterie.net.credentials import TlsFiles
from coterie.net.enrolment import enrol, identities, saved_bundles
from coterie.process.key_trust import key_trust
from coterie.store.authority import create_secrets

from ..operators import KEYS

HISTORY = "user,item,positive,time,part\nanna,1,1,5,0\nberta,2,1,6,0\n"


async def as_client(settings, tls):
    """Enrol as a client host with two users does."""
    await enrol("client", settings, tls, identities(settings.state, 2))


@pytest.fixture
def invited(third_party, tmp_path):
    """Return a function that makes an invitation for a client at the running third party."""

    def make(name="anna", participants=2, *, settings=None, file=True, **options):
        sent = tmp_path / f"sent-{name}"
        sent.mkdir()
        peers = {
            "thirdparty": {"address": third_party.address, "name": "directory"},
            "cos": {"address": "[::1]:7443", "name": "cos"},
            "operator_keys": KEYS,
        }
        made = invite(
            third_party.state,
            "client",
            name,
            participants,
            enrol=options.pop("enrol", (third_party.enrol_address, "directory")),
            settings=peers | {"histories": "histories.csv"} | (settings or {}),
            **options,
        )
        made.save(sent / "invitation")
        if file:
            (sent / "histories.csv").write_text(HISTORY)
        return sent / "invitation"

    return make


def joining(file, into, *sets, timeout_s=5.0):
    return asyncio.run(
        join(Invitation.load(file), file.parent, into, as_client, sets=sets, timeout_s=timeout_s)
    )


def changed(file, **changes):
    """Write an invitation with changes beside it, and return the file."""
    facts = json.loads(file.read_text()) | changes
    other = file.with_name("changed")
    other.write_text(json.dumps(facts))
    return other


# --- Joining -----------------------------------------------------------------------------------------------------


def test_a_party_that_joins_has_its_keys_its_files_and_a_configuration_that_serves(invited, tmp_path):
    file, into = invited(), tmp_path / "here"
    joined = joining(file, into, "listen=127.0.0.9:7450")
    assert str(joined.tls.identity()) == "client/anna"
    assert joined.copied == ("histories.csv",)
    settings = load_service("client", into / "config.toml", environ={}).settings
    assert settings == joined.settings
    assert (settings.listen, settings.histories) == ("127.0.0.9:7450", into / "histories.csv")
    assert len(saved_bundles(into / "state")) == 2
    assert into.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in into.iterdir() if path.name != "ca.pem"} == {0}


def test_the_command_says_what_it_did_and_how_to_go_on(invited, tmp_path, capsys):
    file, into = invited("by-command"), tmp_path / "here"
    fingerprint = Invitation.load(file).fingerprint
    assert invoke(["enrol", str(file), "--into", str(into), "--fingerprint", fingerprint, "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)["result"]
    assert result["start"] == f"coterie serve client --config {into / 'config.toml'}"
    assert "cos.address = [::1]:7443" in printed.err
    assert Invitation.load(file).token not in printed.err + printed.out


def test_a_party_may_name_files_of_its_own_wherever_it_stands(invited, tmp_path, monkeypatch):
    file, into = invited("elsewhere", file=False), tmp_path / "here"
    (tmp_path / "mine.csv").write_text(HISTORY)
    monkeypatch.chdir(tmp_path)
    assert joining(file, into, "histories=mine.csv").copied == ()
    config = tomllib.loads((into / "config.toml").read_text())
    assert config["histories"] == str(tmp_path / "mine.csv")


def test_the_same_command_again_goes_on_where_an_enrolment_was_interrupted(invited, tmp_path):
    file, into = invited("interrupted"), tmp_path / "here"
    first = joining(file, into).tls.identity()
    (into / "state" / "tls" / "chain.pem").unlink()
    assert joining(file, into).tls.identity() == first


# --- What does not let anybody in --------------------------------------------------------------------------------


def test_an_invitation_is_used_once(invited, tmp_path):
    file = invited("once")
    joining(file, tmp_path / "first")
    with pytest.raises(CertificateError, match="used before, with another key") as refused:
        joining(file, tmp_path / "second")
    assert "coterie certs invite --role client --name once" in refused.value.hint


def test_an_invitation_that_is_over_says_when_and_what_the_clock_says(invited, tmp_path, monkeypatch):
    file = invited("late", hours=1)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * 3600)
    with pytest.raises(CertificateError, match=r"late expired at .* this machine's clock says"):
        joining(file, tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_a_clock_that_is_behind_is_named_with_its_least_error(invited, tmp_path, monkeypatch):
    file = invited("early")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 7200)
    with pytest.raises(CertificateError, match="was made at") as refused:
        joining(file, tmp_path / "here")
    assert "at least 7" in refused.value.hint


@pytest.mark.parametrize(
    "change",
    [
        {"role": "cos"},
        {"name": "other"},
        {"participants": 9},
        {"expiry": 2_000_000_000},
        {"enrol_address": "10.0.0.9:1"},
        {"settings": {}},
        {"authority": Authority.create("other", 1).certificate_pem.decode()},
        {"token": "a" * 52},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_changed_invitation_is_refused(invited, change):
    with pytest.raises(CertificateError, match="not as it was signed"):
        Invitation.load(changed(invited("changed"), **change))


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1]", b"\xff\xfe", b'{"kind": "coterie-invitation-1"}', b"{" * 100_000],
    ids=["empty", "object", "list", "bytes", "kind", "deep"],
)
def test_what_is_no_invitation_is_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CertificateError, match="is no invitation"):
        Invitation.load(tmp_path / "file")


def test_an_invitation_of_others_is_known_by_its_fingerprint(invited, tmp_path, capsys):
    create_secrets(tmp_path / "impostor")
    forged = invite(
        tmp_path / "impostor", "client", "anna", 1, enrol=("10.0.0.9:1", "directory"), settings={}
    )
    forged.save(tmp_path / "forged")
    told = Invitation.load(invited("forged")).fingerprint
    arguments = ["enrol", str(tmp_path / "forged"), "--into", str(tmp_path / "here"), "--fingerprint", told]
    assert invoke(arguments) == CertificateError.exit_code
    assert f"fingerprint {forged.fingerprint}, expected {told}" in capsys.readouterr().err
    assert not (tmp_path / "here").exists()


def test_a_third_party_of_another_authority_is_told_from_one_that_is_away(invited, third_party, tmp_path):
    create_secrets(tmp_path / "impostor")
    point = (third_party.enrol_address, "directory")
    forged = invite(
        tmp_path / "impostor",
        "client",
        "anna",
        1,
        enrol=point,
        settings={
            "thirdparty": {"address": third_party.address, "name": "directory"},
            "cos": {"address": "10.0.0.2:7443", "name": "cos"},
            "operator_keys": KEYS,
        },
    )
    forged.save(tmp_path / "forged")
    with pytest.raises(PeerError, match="is not the third party"):
        joining(tmp_path / "forged", tmp_path / "here", timeout_s=0.5)
    away = invited("away", enrol=("127.0.0.1:1", "directory"))
    with pytest.raises(PeerError, match=r"nothing answers at 127\.0\.0\.1:1"):
        joining(away, tmp_path / "there", timeout_s=0.5)


def test_a_folder_in_use_stays_as_it_is(invited, tmp_path):
    into = tmp_path / "here"
    into.mkdir()
    (into / "something").write_text("mine")
    with pytest.raises(PreflightError, match="is not empty"):
        joining(invited("folder"), into)
    assert [path.name for path in into.iterdir()] == ["something"]


def test_a_missing_file_and_one_outside_are_named_and_nothing_is_left(invited, tmp_path):
    with pytest.raises(ConfigError, match=r"histories = 'histories\.csv', which is not beside it") as missing:
        joining(invited("missing", file=False), tmp_path / "here")
    assert "--set histories=PATH" in missing.value.hint
    outside = invited("outside", settings={"histories": "../../etc/passwd"})
    with pytest.raises(ConfigError, match="expected a name alone"):
        joining(outside, tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_a_roster_may_come_after_those_whom_it_names_have_joined(invited, tmp_path, capsys):
    trust = {"encryption": {"roster": "roster.txt", "roster_key": "roster.pub", "holds_key": True}}
    file, into = invited("holder", settings=trust), tmp_path / "here"
    with pytest.raises(ConfigError, match=r"encryption\.roster_key = 'roster\.pub', which is not beside it"):
        joining(file, into)
    operator = tmp_path / "operator"
    assert invoke(["certs", "roster-key", "--out", str(operator)]) == 0
    operator.with_name("operator.pub").rename(file.with_name("roster.pub"))
    joined = joining(file, into)
    assert joined.missing == (into / "roster.txt",)
    assert joined.copied == ("histories.csv", "roster.pub")
    capsys.readouterr()
    assert invoke(["certs", "participants", str(into / "state")]) == 0
    members = tmp_path / "members"
    members.write_text(capsys.readouterr().out)
    with pytest.raises(CertificateError, match="cannot read the roster") as missing:
        key_trust("run", joined.settings.encryption, tuple)
    assert "coterie certs roster" in missing.value.hint
    sign = ["certs", "roster", "--key", str(operator), "--members", str(members)]
    assert invoke([*sign, "--out", str(into / "roster.txt")]) == 0
    trust = key_trust("run", joined.settings.encryption, tuple)
    trust.roster.verify(trust.roster_key, purpose=PAILLIER, run="run", now=int(time.time()))
    assert len(trust.roster.members) == 2


def test_a_key_that_the_role_does_not_have_is_named(invited, tmp_path):
    with pytest.raises(ConfigError, match="owners"):
        joining(invited("wrong", settings={"owners": 3}), tmp_path / "here")
    with pytest.raises(ConfigError, match="listen"):
        joining(invited("listen"), tmp_path / "here", "listen=somewhere")


def test_a_role_that_the_token_was_not_made_for_gets_no_certificate(invited, tmp_path):
    async def as_owner(settings, tls):
        await enrol("data-owner", settings, tls, ())

    file = invited("role")
    with pytest.raises(CertificateError, match="another role or name") as refused:
        asyncio.run(join(Invitation.load(file), file.parent, tmp_path / "here", as_owner, timeout_s=5))
    assert "coterie certs invite" in refused.value.hint
    assert not TlsFiles(tmp_path / "here" / "state" / "tls").complete()


# --- Inviting ----------------------------------------------------------------------------------------------------


def inviting(third_party, tmp_path, *options):
    named = ["--state", str(third_party.state), "--name", "x", "--out", str(tmp_path / "x")]
    return invoke(["certs", "invite", *named, *options])


def test_the_command_invites_and_says_what_is_missing(third_party, tmp_path, capsys):
    client = ["--role", "client", "--enrol", third_party.enrol_address]
    assert inviting(third_party, tmp_path, *client, "--address", "10.0.0.1:7443") == ConfigError.exit_code
    assert "--cos is missing" in capsys.readouterr().err
    both = ["--cos", "10.0.0.2:7443", "--address", third_party.address]
    assert inviting(third_party, tmp_path, *client, *both, "--run", "a-run", "--set", "seed=3") == 0
    made = Invitation.load(tmp_path / "x")
    assert (made.settings["run"], made.settings["seed"]) == ("a-run", 3)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
    assert inviting(third_party, tmp_path, *client, *both) == CertificateError.exit_code  # is there already
    cos = ["--role", "cos", "--enrol", third_party.enrol_address, "--address", third_party.address]
    assert inviting(third_party, tmp_path, *cos, "--cos", "10.0.0.2:7443") == ConfigError.exit_code
    assert (
        inviting(third_party, tmp_path, "--role", "thirdparty", *client[2:], *both)
        == CertificateError.exit_code
    )
    assert inviting(third_party, tmp_path, *client[:3], "nowhere", *both) == ConfigError.exit_code
    assert "--enrol 'nowhere'" in capsys.readouterr().err
