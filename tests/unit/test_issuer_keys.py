"""Keys of an issuer of ID tokens: real HTTPS on loopback, bounds on size, time and number of fetches."""

import asyncio
import contextlib
import json
import socket
import ssl
import sys
import threading

import pytest
from coterie_thirdparty.id_tokens import IdTokens
from coterie_thirdparty.issuer_keys import IssuerKeys
from pydantic import ValidationError

from coterie.config.services import OidcSettings
from coterie.crypto.authority import new_tls_key, new_token
from coterie.crypto.id_tokens import id_token_nonce, is_id_token, is_subject_name, subject_name
from coterie.errors import CertificateError, PeerError, PreflightError

from ..issuer import Issuer, jwk, keys_of_all_kinds


@pytest.fixture
def issuer(tmp_path):
    made = Issuer(tmp_path)
    yield made
    made.close()


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def keys_of(issuer, clock=None, **others):
    settings = OidcSettings(**issuer.section())
    return IssuerKeys(settings, clock or Clock(), **others)


async def test_keys_are_fetched_once_and_an_unknown_one_at_most_every_minute(issuer):
    clock = Clock()
    keys = keys_of(issuer, clock)
    for _ in range(3):
        assert (await keys.find("ec"))["crv"] == "P-256"
    assert issuer.fetches == 1
    issuer.keys["new"] = ("ES256", new_tls_key())
    issuer.content = issuer.jwks()
    clock.now = 59.0
    assert await keys.find("new") is None
    assert issuer.fetches == 1
    clock.now = 61.0
    assert (await keys.find("new"))["kid"] == "new"
    assert issuer.fetches == 2
    for other in range(50):
        assert await keys.find(f"guess-{other}") is None
    assert issuer.fetches == 2


async def test_keys_are_fetched_anew_after_an_hour_so_that_one_that_the_issuer_withdrew_ends(issuer):
    clock = Clock()
    keys = keys_of(issuer, clock)
    assert await keys.find("rsa") is not None
    issuer.keys.pop("rsa")
    issuer.content = issuer.jwks()
    clock.now = 3601.0
    assert await keys.find("rsa") is None


async def test_old_keys_are_not_used_while_the_issuer_is_away(issuer):
    clock = Clock()
    keys = keys_of(issuer, clock)
    assert await keys.find("ec") is not None
    issuer.status = 503
    clock.now = 3601.0
    with pytest.raises(PeerError, match="answered with status 503"):
        await keys.find("ec")
    clock.now = 3630.0
    with pytest.raises(PeerError, match="answered with status 503"):
        await keys.find("ec")
    assert issuer.fetches == 2
    issuer.status = 200
    clock.now = 3662.0
    assert await keys.find("ec") is not None


async def test_callers_share_a_fetch_and_one_that_goes_away_does_not_end_it(issuer):
    keys = keys_of(issuer)
    first, *others = (asyncio.create_task(keys.find("ec")) for _ in range(5))
    await asyncio.sleep(0)
    first.cancel()
    assert all(await asyncio.gather(*others))
    assert first.cancelled()
    assert issuer.fetches == 1


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (404, b"", "answered with status 404, expected 200"),
        (302, b"", "answered with status 302, expected 200"),
        (200, b"<html>", "is no JWKS"),
        (200, b"\xff\xfe", "is no JWKS"),
        (200, b"[]", "is no JWKS"),
        (200, b'{"keys": {}}', "is no JWKS"),
        (200, b"[" * 100_000, "is no JWKS"),
        (200, json.dumps({"keys": [{"kid": str(n)} for n in range(101)]}).encode(), "at most 100"),
        (200, b'{"keys": []}' + b" " * 262_144, "has more than 262144 bytes"),
        (200, b'{"keys": [{"kid": "a"}, {"kid": "a"}]}', "two keys of one id"),
    ],
    ids=["absent", "moved", "page", "bytes", "list", "object", "deep", "many", "large", "twice"],
)
async def test_what_is_no_set_of_keys_is_named(issuer, status, content, message):
    issuer.status, issuer.content = status, content
    with pytest.raises(PeerError, match="the issuer's keys cannot be had") as refused:
        await keys_of(issuer).find("ec")
    assert message in refused.value.message


async def test_an_issuer_that_is_away_or_is_another_is_named(issuer, tmp_path):
    (tmp_path / "other").mkdir()
    other = Issuer(tmp_path / "other")
    other.close()
    stranger = OidcSettings(**issuer.section(jwks_ca_file=other.ca_file))
    with pytest.raises(PeerError, match="certificate verify failed"):
        await IssuerKeys(stranger).find("ec")
    with pytest.raises(PeerError, match="cannot fetch"):
        await IssuerKeys(OidcSettings(**issuer.section(jwks_url="https://127.0.0.1:1/keys"))).find("ec")


@pytest.mark.parametrize(
    "begin",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: ",
    ],
    ids=["content", "content without an end", "header"],
)
async def test_an_issuer_that_drips_is_cut_off_in_time(issuer, begin):
    """A server that sends a byte now and then never runs into a limit for each piece."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issuer.ca_file, issuer.ca_file.with_suffix(".key"))
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"https://127.0.0.1:{listener.getsockname()[1]}/keys"
    over = threading.Event()

    def drip():
        with listener, contextlib.suppress(OSError):
            raw, _ = listener.accept()
            with context.wrap_socket(raw, server_side=True) as secure:
                secure.sendall(begin)
                while not over.wait(0.05):
                    secure.sendall(b" ")

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    keys = IssuerKeys(OidcSettings(**issuer.section(jwks_url=url)), limit_s=1.0)
    try:
        with pytest.raises(PeerError, match=r"cannot fetch .*: no answer within 1 s"):
            await keys.find("ec")
        # The thread that fetched has ended, too: its end of the connection is closed.
        await asyncio.to_thread(thread.join, 30.0)
        assert not thread.is_alive(), "the connection of the fetch is still open"
    finally:
        over.set()


async def test_keys_of_a_file_are_read_for_each_token(tmp_path):
    file = tmp_path / "keys.json"
    settings = OidcSettings(issuer="https://id.example.org", audience="a", jwks_file=file)
    keys = IssuerKeys(settings)
    with pytest.raises(PeerError, match=r"keys cannot be had: cannot read .*keys\.json"):
        await keys.find("ec")
    file.write_text("{}")
    with pytest.raises(PeerError, match="is no JWKS"):
        await keys.find("ec")
    made = keys_of_all_kinds()
    file.write_text(json.dumps({"keys": [jwk(key_id, *held) for key_id, held in made.items()]}))
    assert (await keys.find("ed"))["crv"] == "Ed25519"


async def test_a_key_serves_only_signatures_by_its_own_algorithm(issuer):
    key = new_tls_key()
    for change, message in (
        ({"use": "enc"}, "not one for signatures"),
        ({"alg": "ES384"}, "not one for signatures"),
        ({"crv": "P-384"}, "not one for signatures"),
        ({"kty": "oct", "k": "AAAA"}, "not one for signatures"),
        ({"d": "AAAA"}, "not one for signatures"),
        ({"x": "AAAA"}, "cannot be read"),
    ):
        issuer.content = json.dumps({"keys": [{**jwk("ec", *issuer.keys["ec"]), **change}]}).encode()
        tokens = IdTokens(OidcSettings(**issuer.section()), keys_of(issuer))
        with pytest.raises(CertificateError, match=message):
            await tokens.check(issuer.token(id_token_nonce(key.public_key())), key.public_key())


@pytest.mark.parametrize(
    ("module", "message"), [("jwt", "needs the package PyJWT"), ("httpx", "need the package httpx")]
)
def test_a_third_party_without_a_library_says_what_to_install(issuer, monkeypatch, module, message):
    monkeypatch.setitem(sys.modules, module, None)
    settings = OidcSettings(**issuer.section())
    with pytest.raises(PreflightError, match=message) as refused:
        IdTokens(settings, IssuerKeys(settings))
    assert "coterie[oidc]" in refused.value.hint


def test_an_authority_that_cannot_be_read_is_named(issuer, tmp_path):
    for content in (None, "no certificate"):
        file = tmp_path / "ca.pem"
        if content is not None:
            file.write_text(content)
        with pytest.raises(PreflightError, match=r"cannot read the authority in .*ca\.pem"):
            IssuerKeys(OidcSettings(**issuer.section(jwks_ca_file=file)))


@pytest.mark.parametrize(
    "changed",
    [
        {"issuer": "http://id.example.org"},
        {"jwks_url": "http://id.example.org/keys"},
        {"jwks_url": "https://user:secret@id.example.org/keys"},  # pragma: allowlist secret
        {"jwks_url": None},
        {"jwks_file": "keys.json"},
        {"jwks_url": None, "jwks_file": "keys.json", "jwks_ca_file": "ca.pem"},
        {"devices": 0},
        {"devices": 100},
        {"audience": ""},
    ],
    ids=["issuer", "clear", "password", "no keys", "two places", "authority", "none", "many", "audience"],
)
def test_settings_that_cannot_be_meant_are_refused(changed):
    good = {"issuer": "https://id.example.org", "audience": "a", "jwks_url": "https://id.example.org/keys"}
    OidcSettings(**good)
    with pytest.raises(ValidationError):
        OidcSettings(**{**good, **changed})


def test_names_of_subjects_differ_and_no_enrolment_token_is_made_for_one():
    pairs = [
        ("https://a", "b"),
        ("https://a", "B"),
        ("https://ab", ""),
        ("https://b", "a"),
        ("https://", "ab"),
    ]
    names = {subject_name(*pair, device) for pair in pairs for device in (1, 2, 99)}
    assert len(names) == 3 * len(pairs)
    for name in names:
        assert is_subject_name(name)
        assert len(name) <= 63
        with pytest.raises(CertificateError, match="belongs to a subject of an issuer"):
            new_token("client", name, 1, 1)
        new_token("cos", name, 1, 1)
    assert not is_subject_name("oidc-anna")
    new_token("client", "oidc-anna", 1, 1)


def test_enrolment_tokens_and_id_tokens_are_told_apart(issuer):
    assert is_id_token(f" {issuer.token('n')}\n")
    for text in (new_token("client", "anna", 1, 1)[0], "", "a.b", "a.b.c.d", "a b.c.d", "ä.b.c"):
        assert not is_id_token(text)
