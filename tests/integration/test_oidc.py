"""Enrolment by ID tokens of an issuer on loopback, at a real third party over gRPC."""

import hashlib
import hmac
import json
import os
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from coterie.cli.certs import app
from coterie.crypto.authority import load_tls_key, new_tls_key, save_tls_key
from coterie.crypto.id_tokens import id_token_hash, id_token_nonce, subject_hash, subject_name
from coterie.errors import CertificateError, PreflightError
from coterie.net.credentials import TlsFiles
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.thirdparty_pb2 import RevokeRequest

from ..issuer import Issuer, unsigned
from .conftest import START_S, ThirdParty


@pytest.fixture(scope="module")
def issuer(tmp_path_factory):
    made = Issuer(tmp_path_factory.mktemp("issuer"))
    yield made
    made.close()


class Stand:
    """A third party that takes tokens of an issuer, and devices of its subjects."""

    def __init__(self, service, issuer, folder):
        self.service, self.issuer, self.folder = service, issuer, folder

    def settings(self, subject, device=1, *, name=None):
        """Return the settings of a device with a key of its own, and its nonce."""
        told = name or subject_name(self.issuer.url, subject, device)
        settings = self.service.settings(told, self.folder / f"{subject}-{device}-{time.monotonic_ns()}")
        tls = TlsFiles(settings.state / "tls")
        tls.folder.mkdir()
        save_tls_key(tls.key, new_tls_key())
        return settings, id_token_nonce(load_tls_key(tls.key).public_key())

    async def enrol(self, settings, token, participants=0, role="client"):
        settings.enrol.token_file.write_text(f"{token}\n")
        return await self.service.enrol_with(role, settings, participants)

    async def refusal(self, settings, token, role="client"):
        """Return what an enrolment that must be refused is told; nothing of the token is in it or in the log."""
        with pytest.raises(CertificateError, match="was refused") as refused:
            await self.enrol(settings, token, role=role)
        assert not (settings.state / "tls" / "chain.pem").exists()
        for part in filter(None, token.split(".")):
            assert part not in refused.value.message
        assert "coterie certs oidc-nonce" in refused.value.hint
        return refused.value.message


@pytest.fixture(scope="module")
def service(tmp_path_factory, issuer):
    made = ThirdParty(
        tmp_path_factory.mktemp("thirdparty"),
        oidc=issuer.section(devices=2, claims={"groups": "readers", "mail_verified": True}),
        enrol_limits={"calls_per_s": 1000.0, "burst": 1000},
    )
    made.start()
    yield made
    made.stop()


@pytest.fixture
def stand(service, issuer, tmp_path):
    return Stand(service, issuer, tmp_path)


def token(issuer, nonce, sub, **others):
    """Return an ID token of a subject with the claims that the third party requires."""
    return issuer.token(
        nonce, **{"sub": sub, "groups": ["staff", "readers"], "mail_verified": True, **others}
    )


@pytest.mark.parametrize("key_id", ["rsa", "ec", "ed"])
async def test_a_subject_enrols_by_an_id_token_and_repeats_the_request(stand, issuer, key_id):
    settings, nonce = stand.settings(key_id)
    shown = token(issuer, nonce, key_id, key_id=key_id)
    anna = await stand.enrol(settings, shown, 1)
    assert str(anna.tls.identity()) == f"client/{subject_name(issuer.url, key_id)}"
    assert anna.bundles[0].party == f"client/{settings.name}"
    anna.bundles[0].verify(anna.directory_key, int(time.time()))
    # The same token, as after a lost answer, and another one for the same key give the same certificate.
    for again in (shown, token(issuer, nonce, key_id, jti="another")):
        anna.tls.chain.unlink()
        assert (await stand.enrol(settings, again, 1)).fingerprint == anna.fingerprint


async def test_a_repeated_request_holds_when_the_token_has_expired(stand, issuer):
    settings, nonce = stand.settings("short")
    ends = int(time.time()) - 57
    shown = token(issuer, nonce, "short", exp=ends)
    first = await stand.enrol(settings, shown)
    while time.time() < ends + 61:
        time.sleep(0.1)
    first.tls.chain.unlink()
    assert (await stand.enrol(settings, shown)).fingerprint == first.fingerprint
    first.tls.chain.unlink()
    assert "has expired" in await stand.refusal(settings, token(issuer, nonce, "short", exp=ends, jti="2"))


BAD = {
    "issuer": ({"iss": "https://127.0.0.1:1"}, "is of another issuer"),
    "audience": ({"aud": "another"}, "is for another audience"),
    "expired": ({"exp": 1_000_000_000}, "has expired"),
    "issued later": ({"iat": 4_000_000_000, "exp": 4_000_000_100}, "is not valid yet"),
    "not yet valid": ({"nbf": 4_000_000_000, "exp": 4_000_000_100}, "is not valid yet"),
    "several audiences": ({"aud": ["coterie", "another"]}, "was not issued to coterie (claim azp)"),
    "issued to another": ({"aud": ["coterie", "b"], "azp": "b"}, "was not issued to coterie (claim azp)"),
    "no nonce": ({"without": "nonce"}, "lacks the claim nonce"),
    "no subject": ({"without": "sub"}, "lacks the claim sub"),
    "no end": ({"without": "exp"}, "lacks the claim exp"),
    "no issue": ({"without": "iat"}, "lacks the claim iat"),
    "no audience": ({"without": "aud"}, "lacks the claim aud"),
    "no group": ({"without": "groups"}, "lacks the claim groups"),
    "another group": ({"groups": ["staff"]}, "the claim groups of this ID token is not the required one"),
    "a number for a flag": ({"mail_verified": 1}, "the claim mail_verified of this ID token is not"),
    "another nonce": ({"nonce": "A" * 43}, "was made for another key"),
    "nonce of another kind": ({"nonce": ["A"]}, "was made for another key"),
    "nonce that is no text": ({"nonce": "\ud800"}, "was made for another key"),
    "empty subject": ({"sub": ""}, "names nobody"),
    "long subject": ({"sub": "a" * 256}, "names nobody"),
    "subject that is no text": ({"sub": "\ud800"}, "names nobody"),
    "end of another kind": ({"exp": "soon"}, "cannot be read"),
}


@pytest.mark.parametrize(("claims", "message"), list(BAD.values()), ids=list(BAD))
async def test_a_token_that_says_something_else_is_refused(stand, issuer, claims, message):
    settings, nonce = stand.settings("bad")
    assert message in await stand.refusal(settings, token(issuer, **{"nonce": nonce, "sub": "bad", **claims}))


async def test_several_audiences_are_taken_where_the_token_was_issued_to_ours(stand, issuer):
    settings, nonce = stand.settings("several")
    await stand.enrol(settings, token(issuer, nonce, "several", aud=["coterie", "b"], azp="coterie"))


async def test_a_token_that_the_issuer_did_not_sign_is_refused(stand, issuer):
    settings, nonce = stand.settings("forger")
    good = token(issuer, nonce, "forger", key_id="rsa")
    algorithms = "signed by an algorithm that is not taken, expected RS256, ES256, EdDSA"
    for algorithm in ("none", "None", "HS256", "PS256", ["RS256"]):
        assert algorithms in await stand.refusal(settings, unsigned(good, {"alg": algorithm, "kid": "rsa"}))
    # The public key as the secret of an HMAC: the classical confusion of algorithms.
    header = {"alg": "HS256", "kid": "rsa"}
    signed = unsigned(good, header).rpartition(".")[0].encode()
    digest = hmac.new(issuer.public_pem("rsa"), signed, hashlib.sha256).digest()
    assert algorithms in await stand.refusal(settings, unsigned(good, header, digest))
    assert "not one for signatures by its algorithm" in await stand.refusal(
        settings, unsigned(good, {"alg": "ES256", "kid": "rsa"}, bytes(64))
    )
    assert "signature of this ID token is not the issuer's" in await stand.refusal(
        settings, unsigned(good, {"alg": "RS256", "kid": "rsa"}, bytes(256))
    )
    assert "does not name its key (kid)" in await stand.refusal(settings, unsigned(good, {"alg": "RS256"}))
    assert "has no key of the id (kid)" in await stand.refusal(
        settings, unsigned(good, {"alg": "RS256", "kid": "another"}, bytes(256))
    )
    assert "cannot be read" in await stand.refusal(settings, "AAAA.AAAA.AAAA")
    assert "more than 16384 characters" in await stand.refusal(settings, "a" * 20_000 + ".e30.e30")


async def test_a_stolen_token_enrols_no_other_key(stand, issuer):
    settings, nonce = stand.settings("robbed")
    stolen = token(issuer, nonce, "robbed")
    thief, _ = stand.settings("robbed")
    assert "was made for another key" in await stand.refusal(thief, stolen)
    await stand.enrol(settings, stolen)
    assert "used before, with another key" in await stand.refusal(thief, stolen)


async def test_a_subject_has_as_many_devices_as_are_allowed(stand, issuer):
    first, nonce = stand.settings("busy")
    await stand.enrol(first, token(issuer, nonce, "busy"))
    another, nonce = stand.settings("busy")
    assert "is enrolled with another key" in await stand.refusal(another, token(issuer, nonce, "busy"))
    second, nonce = stand.settings("busy", 2)
    enrolled = await stand.enrol(second, token(issuer, nonce, "busy"))
    assert str(enrolled.tls.identity()).endswith("-2")
    third, nonce = stand.settings("busy", 3)
    assert "does not enrol" in await stand.refusal(third, token(issuer, nonce, "busy"))


async def test_an_id_token_enrols_no_other_name_and_no_other_role(stand, issuer):
    settings, nonce = stand.settings("carla", name="anna")
    told = await stand.refusal(settings, token(issuer, nonce, "carla"))
    assert f"does not enrol 'anna', but {subject_name(issuer.url, 'carla')}" in told
    other, nonce = stand.settings("carla", name=subject_name(issuer.url, "berta"))
    assert "does not enrol" in await stand.refusal(other, token(issuer, nonce, "carla"))
    for role in ("cos", "operator", "data-owner", "decrypting-client", "thirdparty"):
        settings, nonce = stand.settings("carla")
        shown = token(issuer, nonce, "carla")
        assert "enrols the role client alone" in await stand.refusal(settings, shown, role=role)


async def test_a_device_speaks_for_no_more_participants_than_are_allowed(stand, issuer):
    settings, nonce = stand.settings("crowd")
    with pytest.raises(Refusal) as refused:
        await stand.enrol(settings, token(issuer, nonce, "crowd"), 2)
    assert refused.value.reason == ErrorReason.ERROR_REASON_TOO_LARGE


async def test_a_revoked_subject_enrols_no_device_any_more(stand, issuer):
    settings, nonce = stand.settings("revoked")
    enrolled = await stand.enrol(settings, token(issuer, nonce, "revoked"))
    operator = await stand.service.enrol("operator", f"olga-{time.monotonic_ns()}")
    await stand.service.directory(operator).Revoke(RevokeRequest(certificates=[enrolled.fingerprint]))
    enrolled.tls.chain.unlink()
    with pytest.raises(Refusal, match="was revoked"):
        await stand.enrol(settings, token(issuer, nonce, "revoked", jti="2"))
    second, nonce = stand.settings("revoked", 2)
    with pytest.raises(Refusal, match="was revoked"):
        await stand.enrol(second, token(issuer, nonce, "revoked"))


async def test_records_name_the_issuer_and_a_hash_and_no_token(stand, issuer):
    settings, nonce = stand.settings("recorded")
    shown = token(issuer, nonce, "recorded")
    await stand.enrol(settings, shown)
    state = stand.service.state
    records = [
        json.loads(line)
        for path in sorted((state / "audit").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    of_this = [record for record in records if f"client/{settings.name}" in json.dumps(record)]
    assert any(
        issuer.url in json.dumps(record)
        and subject_hash(issuer.url, "recorded").hex()[:16] in json.dumps(record)
        for record in of_this
    ), records[-3:]
    parts = [part.encode() for part in shown.split(".")]
    kept = [path for path in stand.service.folder.rglob("*") if path.is_file()]
    for path in kept:
        content = path.read_bytes()
        assert not any(part in content for part in parts), path
    assert any(id_token_hash(shown) in path.read_bytes() for path in kept if "directory.db" in path.name)


async def test_a_third_party_without_an_issuer_takes_no_id_tokens(third_party, issuer, tmp_path):
    stand = Stand(third_party, issuer, tmp_path)
    settings, nonce = stand.settings("anna")
    assert "takes no ID tokens" in await stand.refusal(settings, token(issuer, nonce, "anna"))


def test_the_command_prints_the_nonce_of_the_key_that_it_makes(tmp_path):
    arguments = ["oidc-nonce", "--state", str(tmp_path / "state"), "--json"]
    first = json.loads(CliRunner().invoke(app, arguments).stdout)["result"]
    key = load_tls_key(tmp_path / "state" / "tls" / "key.pem")
    assert first["nonce"] == id_token_nonce(key.public_key())
    assert (tmp_path / "state" / "tls" / "key.pem").stat().st_mode & 0o777 == 0o600
    named = [*arguments, "--issuer", "https://id.example.org", "--subject", "anna"]
    again = json.loads(CliRunner().invoke(app, named).stdout)["result"]
    assert again["nonce"] == first["nonce"]
    assert again["name"] == subject_name("https://id.example.org", "anna")


def test_a_third_party_without_the_library_ends_and_says_what_to_install(issuer, tmp_path):
    (tmp_path / "jwt.py").write_text("raise ModuleNotFoundError('No module named jwt', name='jwt')")
    service = ThirdParty(tmp_path, oidc=issuer.section())
    done = subprocess.run(
        [sys.executable, "-m", "coterie", "serve", "thirdparty", "--config", service.config],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == PreflightError.exit_code, done.stderr
    assert "enrolment by ID tokens ([oidc]) needs the package PyJWT" in done.stderr
    assert "pip install 'coterie[oidc]'" in done.stderr


async def test_while_the_issuer_is_away_an_enrolment_is_put_off(start_third_party, issuer, tmp_path):
    service = start_third_party(oidc=issuer.section(jwks_url="https://127.0.0.1:1/keys"))
    stand = Stand(service, issuer, tmp_path)
    settings, nonce = stand.settings("anna")
    with pytest.raises(Refusal, match="the issuer's keys cannot be had: cannot fetch") as refused:
        await stand.enrol(settings, token(issuer, nonce, "anna"))
    assert refused.value.reason == ErrorReason.ERROR_REASON_NOT_READY
    # Enrolment tokens need no issuer.
    await service.enrol("client", "berta")
