"""``coterie certs``: the authority, tokens and what a certificate says."""

import json
import socket
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from coterie.cli.certs import app
from coterie.crypto.authority import Authority, make_csr, new_tls_key, token_hash
from coterie.crypto.identity import load_signing_key
from coterie.crypto.operator_key import public_text
from coterie.crypto.roster import Roster, load_roster_key
from coterie.errors import CertificateError, ConfigError, CoterieError
from coterie.launch.authority import keep_operator_keys
from coterie.launch.invitation import Invitation
from coterie.store.authority import load_secrets
from coterie.store.tokens import TokenFile


def run(*arguments):
    """Run a command with --json; return its result, or raise what it raised."""
    outcome = CliRunner().invoke(app, [*(str(argument) for argument in arguments), "--json"])
    if outcome.exception is not None:
        raise outcome.exception
    return json.loads(outcome.stdout)["result"]


def mode(path):
    return path.stat().st_mode & 0o777


def test_init_makes_an_authority_whose_secrets_nobody_else_can_read(tmp_path):
    state = tmp_path / "state"
    result = run("init", state)
    secrets = load_secrets(state)
    assert result["ca"] == str(state / "ca.pem")
    assert result["directory_key"] == secrets.directory_key.hex()
    assert run("show", state / "ca.pem")["fingerprint"] == result["fingerprint"]
    assert {path.name for path in state.iterdir() if mode(path) & 0o077} <= {"ca.pem"}
    assert mode(state) == 0o700


def test_init_never_replaces_an_authority(tmp_path):
    run("init", tmp_path)
    before = (tmp_path / "ca.pem").read_bytes()
    with pytest.raises(CertificateError, match="holds an authority already"):
        run("init", tmp_path)
    assert (tmp_path / "ca.pem").read_bytes() == before


def test_a_token_is_private_and_only_its_hash_is_recorded(tmp_path):
    file = tmp_path / "anna.token"
    options = ["--role", "client", "--name", "anna", "--participants", 7, "--hours", 2, "--out", file]
    before = time.time()
    result = run("token", "--state", tmp_path, *options)
    secret = file.read_text().strip()
    assert mode(file) == mode(tmp_path / "tokens.jsonl") == 0o600
    assert secret not in (tmp_path / "tokens.jsonl").read_text()
    record = TokenFile(tmp_path / "tokens.jsonl").find(token_hash(secret))
    assert (record.role, record.name, record.max_participants) == ("client", "anna", 7)
    assert before + 7199 <= record.expiry == result["expiry"] <= time.time() + 7200


@pytest.mark.parametrize(("role", "name"), [("klient", "anna"), ("client", "Anna!")])
def test_a_token_for_no_role_or_no_label_is_refused_and_leaves_nothing(tmp_path, role, name):
    with pytest.raises(CertificateError):
        run("token", "--state", tmp_path, "--role", role, "--name", name, "--out", tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_a_token_file_is_never_overwritten(tmp_path):
    (tmp_path / "t").write_text("precious")
    with pytest.raises(CertificateError, match="there already"):
        run("token", "--state", tmp_path, "--role", "cos", "--name", "cos", "--out", tmp_path / "t")
    assert (tmp_path / "t").read_text() == "precious"
    assert not (tmp_path / "tokens.jsonl").exists()


def test_show_says_whose_a_certificate_is(tmp_path):
    certificate = Authority.create("test", 10).issue(make_csr(new_tls_key()), "data-owner", "comedy", 3)
    (tmp_path / "chain.pem").write_bytes(certificate)
    for path in (tmp_path, tmp_path / "chain.pem"):
        shown = run("show", path)
        assert (shown["role"], shown["name"], shown["valid"]) == ("data-owner", "comedy", True)


def test_show_refuses_what_is_no_certificate(tmp_path):
    (tmp_path / "letter.pem").write_text("dear sir")
    with pytest.raises(CertificateError, match="no certificate in PEM"):
        run("show", tmp_path / "letter.pem")
    with pytest.raises(CertificateError, match="cannot read"):
        run("show", tmp_path / "absent.pem")


@pytest.mark.parametrize("fingerprint", ["abc", "zz" * 32, "ab" * 31])
def test_revoke_refuses_a_malformed_fingerprint_before_it_calls_anybody(tmp_path, fingerprint):
    with pytest.raises(CertificateError, match="64 hexadecimal digits"):
        run("revoke", "--tls", tmp_path, "--address", "127.0.0.1:1", "--certificate", fingerprint)


def test_show_finds_the_certificate_of_a_folder_and_says_where_it_looked(tmp_path):
    made = run("init", tmp_path / "authority")
    assert run("show", tmp_path / "authority")["fingerprint"] == made["fingerprint"]
    with pytest.raises(
        CertificateError, match=r"holds no certificate; expected one of chain.pem, tls/chain.pem"
    ):
        run("show", tmp_path)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [("--address", "127.0.0.1", "host:port"), ("--thirdparty", "The Directory", "lower-case")],
)
def test_an_option_that_does_not_fit_is_named_with_what_was_expected(tmp_path, option, value, expected):
    given = {"--address": "127.0.0.1:1", option: value}
    words = [word for pair in given.items() for word in pair]
    party = ["--state", tmp_path, "--role", "operator", "--name", "olga"]
    calls = (
        ["revoke", "--tls", tmp_path, "--certificate", "00" * 32],
        ["rotate-graph", "a-run", "--tls", tmp_path],
        ["enrol", *party, "--ca", tmp_path / "ca.pem", "--token", tmp_path / "token"],
    )
    for call in calls:
        with pytest.raises(ConfigError, match=rf"^{option} '{value}': expected .*{expected}"):
            run(*call, *words)


def test_enrolling_prints_nothing_but_the_envelope_on_standard_output(tmp_path):
    run("init", tmp_path)
    token = tmp_path / "token"
    run("token", "--state", tmp_path, "--role", "operator", "--name", "olga", "--out", token)
    with socket.socket() as taken:  # bound and not listening: whoever connects is refused
        taken.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        words = ["certs", "enrol", "--state", tmp_path / "operator", "--role", "operator", "--name", "olga"]
        words += [
            "--address",
            where,
            "--ca",
            tmp_path / "ca.pem",
            "--token",
            token,
            "--timeout",
            "0.1",
            "--json",
        ]
        command = [sys.executable, "-P", "-m", "coterie", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["error"]["exit_code"] == done.returncode == 50


# --- rosters


def roster_key(folder):
    result = run("roster-key", "--out", folder / "roster.key")
    return folder / "roster.key", bytes.fromhex(result["roster_key"])


def test_the_operators_key_is_private_its_public_half_is_for_everybody_and_neither_is_replaced(tmp_path):
    file, public = roster_key(tmp_path)
    assert mode(file) == 0o600
    assert mode(tmp_path / "roster.key.pub") == 0o644
    assert load_roster_key(tmp_path / "roster.key.pub") == public
    for gone in (file, tmp_path / "roster.key.pub"):
        with pytest.raises(CertificateError, match="there already"):
            run("roster-key", "--out", file)
        gone.unlink()
    run("roster-key", "--out", file)


def test_a_roster_names_who_was_given_here_and_in_a_file(tmp_path):
    file, public = roster_key(tmp_path)
    ids = [f"{one:064x}" for one in range(5)]
    (tmp_path / "ids").write_text("\n".join(ids[2:]) + "\n")
    out = tmp_path / "roster.txt"
    options = ["--key", file, "--out", out, "--member", ids[1], "--member", ids[0]]
    result = run("roster", *options, "--members", tmp_path / "ids", "--days", 2, "--run", "a-run")
    signed = Roster.load(out)
    assert result["members"] == ids == [one.hex() for one in signed.members]
    assert signed.expiry - signed.issued == 2 * 86400
    signed.verify(public, purpose="paillier", run="a-run", now=int(time.time()))
    run("roster", *options, "--purpose", "graph-tags")
    Roster.load(out).verify(public, purpose="graph-tags", run="any", now=int(time.time()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--member", "abc"], "64 hexadecimal digits"),
        (["--member", "0" * 64, "--member", "0" * 64], "twice"),
        (["--member", "0" * 64, "--run", "A Run"], "A Run"),
        (["--member", "0" * 64, "--purpose", "Upper Case"], "purpose"),
        (["--members", "absent"], "cannot read absent"),
    ],
)
def test_a_roster_that_would_be_refused_is_not_written(tmp_path, options, said):
    file, _ = roster_key(tmp_path)
    with pytest.raises(CoterieError, match=said):
        run("roster", "--key", file, "--out", tmp_path / "roster.txt", *options)
    assert not (tmp_path / "roster.txt").exists()


def test_a_roster_of_nobody_is_not_signed(tmp_path):
    file, _ = roster_key(tmp_path)
    with pytest.raises(SystemExit):
        run("roster", "--key", file, "--out", tmp_path / "roster.txt")


def test_another_file_in_place_of_the_operators_key_is_refused(tmp_path):
    file, _ = roster_key(tmp_path)
    options = ["--out", tmp_path / "roster.txt", "--member", "0" * 64]
    file.write_bytes(b"something else")
    with pytest.raises(CertificateError, match="does not hold a signing key"):
        run("roster", "--key", file, *options)


def test_who_speaks_for_participants_is_not_enrolled_without_them(tmp_path):
    (tmp_path / "identities.key").write_bytes(b"kept")
    party = ["--state", tmp_path, "--role", "client", "--name", "anna", "--address", "127.0.0.1:1"]
    with pytest.raises(CertificateError, match="speaks for participants"):
        run("enrol", *party, "--ca", tmp_path / "ca.pem", "--token", tmp_path / "token")
    assert [path.name for path in tmp_path.iterdir()] == ["identities.key"]


def test_an_operators_key_is_private_and_never_replaced(tmp_path):
    made = run("operator-key", "--out", tmp_path / "run.key")
    assert (tmp_path / "run.key").stat().st_mode & 0o777 == 0o600
    assert public_text(load_signing_key(tmp_path / "run.key")) == made["public"]
    with pytest.raises(CertificateError, match="is there already"):
        run("operator-key", "--out", tmp_path / "run.key")


def test_an_invitation_names_the_operators_that_the_authority_knows(tmp_path):
    run("init", tmp_path / "state")
    places = ["--enrol", "10.0.0.1:7444", "--address", "10.0.0.1:7443", "--cos", "10.0.0.2:7443"]

    def invited(role, name, *options):
        file = tmp_path / f"{name}.invitation"
        asked = ["--state", tmp_path / "state", "--role", role, "--name", name, "--out", file]
        run("invite", *asked, *places, *options)
        return Invitation.load(file).settings

    assert "operator_keys" not in invited("client", "before")
    keep_operator_keys(tmp_path / "state", ["ab" * 32, "cd" * 32])
    assert invited("client", "after")["operator_keys"] == ["ab" * 32, "cd" * 32]
    told = invited("client", "told", "--set", 'operator_keys=["12"]')
    assert told["operator_keys"] == ["12"]
    operator = invited("operator", "operator")
    assert (operator["signs"], "operator_keys" in operator) == ("run.key", False)
