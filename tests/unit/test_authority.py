from __future__ import annotations

import base64
import hashlib
import pickle
import socket
import ssl
import stat
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509 import verification
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from coterie.crypto.authority import (
    ROLES,
    Authority,
    PeerIdentity,
    load_tls_key,
    logical_name,
    make_csr,
    name_in,
    new_tls_key,
    new_token,
    renewal_time,
    save_tls_key,
    token_hash,
    validate_name,
    validate_role,
    validity_of,
)
from coterie.crypto.clocks import BACKDATED_S, CLOCK_SKEW_S
from coterie.crypto.explicit import encode
from coterie.errors import CertificateError

from ..odd_certificates import ODD_EXTENSIONS, with_odd_extensions

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("Test federation", 365)


@pytest.fixture(scope="module")
def key() -> ec.EllipticCurvePrivateKey:
    return new_tls_key()


def store_of(authority: Authority) -> verification.Store:
    return verification.Store([x509.load_pem_x509_certificate(authority.certificate_pem)])


def certificate_with(names: list[x509.GeneralName], key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a self-signed certificate with these alternative names; none when the list is empty."""
    subject = x509.Name([])
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), 1, NOW, NOW + timedelta(days=1))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


# Names.


@pytest.mark.parametrize("role", ROLES)
def test_a_logical_name_says_name_and_role(role):
    assert logical_name(role, "host-1") == f"host-1.{role}.coterie.internal"


def test_the_name_is_read_off_a_logical_name_of_the_role_and_off_nothing_else():
    assert name_in("data-owner", logical_name("data-owner", "host-1")) == "host-1"
    for other in (
        logical_name("client", "host-1"),
        "127.0.0.1",
        "localhost",
        "a.host-1.data-owner.coterie.internal",
        "Host-1.data-owner.coterie.internal",
        "host-1.data-owner.coterie.internal.",
        "",
    ):
        with pytest.raises(CertificateError):
            name_in("data-owner", other)


@given(st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True))
def test_dns_labels_are_names(name):
    assert validate_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "-a", "a-", "A", "a.b", "a/b", "a b", "ä", "a" * 64, "a\n", "*", "a_b", "a\0"]
)
def test_what_is_no_dns_label_is_no_name(name):
    with pytest.raises(CertificateError, match="not a DNS label"):
        validate_name(name)


def test_an_unknown_role_is_refused_with_what_was_probably_meant():
    with pytest.raises(CertificateError, match=r"unknown role 'dataowner'.*did you mean 'data-owner'"):
        validate_role("dataowner")


# Issuing.


@pytest.mark.parametrize("role", ROLES)
def test_an_issued_certificate_verifies_for_its_logical_name_as_server_and_as_client(authority, key, role):
    certificate = x509.load_pem_x509_certificate(authority.issue(make_csr(key), role, "one"))
    builder = verification.PolicyBuilder().store(store_of(authority))
    name = x509.DNSName(logical_name(role, "one"))
    assert builder.build_server_verifier(name).verify(certificate, [])[0] == certificate
    assert builder.build_client_verifier().verify(certificate, []).chain[0] == certificate
    assert certificate.public_key() == key.public_key()


def test_an_issued_certificate_does_not_verify_for_another_role_or_name(authority, key):
    certificate = x509.load_pem_x509_certificate(authority.issue(make_csr(key), "data-owner", "one"))
    builder = verification.PolicyBuilder().store(store_of(authority))
    for role, name in [("cos", "one"), ("data-owner", "two")]:
        verifier = builder.build_server_verifier(x509.DNSName(logical_name(role, name)))
        with pytest.raises(verification.VerificationError):
            verifier.verify(certificate, [])


def test_a_certificate_of_another_authority_does_not_verify(authority, key):
    stranger = Authority.create("Test federation", 365)
    certificate = x509.load_pem_x509_certificate(stranger.issue(make_csr(key), "cos", "one"))
    builder = verification.PolicyBuilder().store(store_of(authority))
    with pytest.raises(verification.VerificationError):
        builder.build_client_verifier().verify(certificate, [])


def test_an_issued_certificate_cannot_issue_further_ones(authority, key):
    pem = authority.issue(make_csr(key), "client", "one")
    certificate = x509.load_pem_x509_certificate(pem)
    inner = Authority(certificate, key)
    leaf = x509.load_pem_x509_certificate(inner.issue(make_csr(new_tls_key()), "cos", "forged"))
    builder = verification.PolicyBuilder().store(store_of(authority))
    with pytest.raises(verification.VerificationError):
        builder.build_client_verifier().verify(leaf, [certificate])


def test_no_name_is_copied_from_the_request(authority, key):
    wanted = [x509.DNSName(logical_name("cos", "main")), x509.UniformResourceIdentifier("coterie://cos/main")]
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "main.cos")]))
        .add_extension(x509.SubjectAlternativeName(wanted), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    certificate = x509.load_pem_x509_certificate(authority.issue(request, "client", "mine"))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [
        x509.UniformResourceIdentifier("coterie://client/mine"),
        x509.DNSName("mine.client.coterie.internal"),
    ]
    assert certificate.subject.rfc4514_string() == "CN=mine"
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


@pytest.mark.parametrize(("role", "name"), [("boss", "one"), ("cos", "one.two"), ("cos", ""), ("", "one")])
def test_wrong_roles_and_names_are_not_issued(authority, key, role, name):
    with pytest.raises(CertificateError):
        authority.issue(make_csr(key), role, name)


def test_a_request_that_its_key_did_not_sign_is_refused(authority):
    mine = x509.load_pem_x509_csr(make_csr(new_tls_key()))
    body = mine.tbs_certrequest_bytes
    der = bytearray(mine.public_bytes(serialization.Encoding.DER))
    stolen = x509.load_pem_x509_csr(make_csr(new_tls_key())).tbs_certrequest_bytes
    start = bytes(der).index(body)
    assert len(stolen) == len(body)
    der[start : start + len(body)] = stolen
    pem = b"-----BEGIN CERTIFICATE REQUEST-----\n%s-----END CERTIFICATE REQUEST-----\n" % (
        base64.encodebytes(bytes(der))
    )
    with pytest.raises(CertificateError, match="not signed by the key"):
        authority.issue(pem, "client", "one")


@pytest.mark.parametrize(
    "other", [ec.generate_private_key(ec.SECP384R1()), ed25519.Ed25519PrivateKey.generate()]
)
def test_a_request_for_another_kind_of_key_is_refused(authority, other):
    algorithm = None if isinstance(other, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(other, algorithm)
    with pytest.raises(CertificateError, match="expected ECDSA P-256"):
        authority.issue(request.public_bytes(serialization.Encoding.PEM), "client", "one")


@pytest.mark.parametrize("pem", [b"", b"nonsense", b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n"])
def test_what_is_no_request_is_refused(authority, pem):
    with pytest.raises(CertificateError, match="not a certificate request"):
        authority.issue(pem, "client", "one")


def test_a_certificate_holds_thirty_days_and_is_due_for_renewal_after_two_thirds(authority, key):
    pem = authority.issue(make_csr(key), "client", "one")
    certificate = x509.load_pem_x509_certificate(pem)
    length = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert length == timedelta(days=30, seconds=BACKDATED_S)
    issued = certificate.not_valid_before_utc + timedelta(seconds=BACKDATED_S)
    assert renewal_time(pem) == (issued + timedelta(days=20)).timestamp()
    assert validity_of(pem) == (issued.timestamp(), certificate.not_valid_after_utc.timestamp())


def test_a_certificate_never_outlives_its_authority(key):
    authority = Authority.create("Short", 10, now=NOW)
    certificate = x509.load_pem_x509_certificate(
        authority.issue(make_csr(key), "cos", "one", now=NOW + timedelta(days=1))
    )
    assert certificate.not_valid_after_utc == NOW + timedelta(days=10)
    with pytest.raises(CertificateError, match="expired at 2030-01-11"):
        authority.issue(make_csr(key), "cos", "one", now=NOW + timedelta(days=10))


@pytest.mark.parametrize("days", [0, -1, 40_000])
def test_a_number_of_days_out_of_range_is_refused(authority, key, days):
    with pytest.raises(CertificateError, match=f"{days} days, expected more than 0"):
        authority.issue(make_csr(key), "cos", "one", days)
    with pytest.raises(CertificateError, match=f"{days} days, expected more than 0"):
        Authority.create("Test", days)


@pytest.mark.parametrize("name", ["", "x" * 65])
def test_an_authority_without_a_usable_name_is_refused(name):
    with pytest.raises(CertificateError, match="expected 1 to 64"):
        Authority.create(name, 1)


# Files.


def test_an_authority_survives_saving_and_its_key_is_private(authority, key, tmp_path):
    authority.save(tmp_path)
    assert stat.S_IMODE((tmp_path / "ca-key.pem").stat().st_mode) == 0o600
    loaded = Authority.load(tmp_path)
    assert loaded.certificate_pem == authority.certificate_pem
    issued = x509.load_pem_x509_certificate(loaded.issue(make_csr(key), "cos", "one"))
    issued.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.certificate_pem))


def test_a_key_that_does_not_belong_to_the_authority_is_refused(authority, tmp_path):
    authority.save(tmp_path)
    save_tls_key(tmp_path / "ca-key.pem", new_tls_key())
    with pytest.raises(CertificateError, match="does not belong"):
        Authority.load(tmp_path)


def test_an_authority_whose_key_others_can_read_is_refused(authority, tmp_path):
    authority.save(tmp_path)
    (tmp_path / "ca-key.pem").chmod(0o644)
    with pytest.raises(CertificateError, match="mode 0644, expected 0600"):
        Authority.load(tmp_path)


def test_a_missing_authority_is_named(tmp_path):
    with pytest.raises(CertificateError, match=r"cannot read .*ca\.pem"):
        Authority.load(tmp_path)


def test_a_tls_key_survives_saving(key, tmp_path):
    save_tls_key(tmp_path / "key.pem", key)
    assert load_tls_key(tmp_path / "key.pem").private_numbers() == key.private_numbers()
    (tmp_path / "key.pem").write_bytes(b"nonsense")
    with pytest.raises(CertificateError, match="no unencrypted private key"):
        load_tls_key(tmp_path / "key.pem")


def test_a_key_of_another_curve_is_refused(tmp_path):
    save_tls_key(tmp_path / "key.pem", ec.generate_private_key(ec.SECP384R1()))
    with pytest.raises(CertificateError, match="not an ECDSA P-256 key"):
        load_tls_key(tmp_path / "key.pem")


def test_an_authority_neither_prints_nor_pickles_its_key(authority):
    secret = authority._key.private_numbers().private_value
    assert f"{secret:x}" not in repr(authority)
    assert str(secret) not in repr(authority)
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps(authority)


# Peers.


@pytest.mark.parametrize("role", ROLES)
def test_a_peer_is_who_its_certificate_says(authority, key, role):
    pem = authority.issue(make_csr(key), role, "one")
    der = x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)
    peer = PeerIdentity.from_certificate(pem + authority.certificate_pem)
    assert (peer.role, peer.name) == (role, "one")
    assert peer.fingerprint == hashlib.sha256(der).digest()
    assert str(peer) == f"{role}/one"


COS_URI = x509.UniformResourceIdentifier("coterie://cos/one")
COS_DNS = x509.DNSName("one.cos.coterie.internal")


@pytest.mark.parametrize(
    "names",
    [
        [],
        [COS_DNS],
        [COS_URI],
        [COS_URI, x509.DNSName("one.client.coterie.internal")],
        [COS_URI, COS_DNS, x509.DNSName("two.cos.coterie.internal")],
        [COS_URI, x509.UniformResourceIdentifier("coterie://client/one"), COS_DNS],
        [x509.UniformResourceIdentifier("https://cos/one"), COS_DNS],
        [x509.UniformResourceIdentifier("coterie://boss/one"), x509.DNSName("one.boss.coterie.internal")],
        [x509.UniformResourceIdentifier("coterie://cos/one/two"), COS_DNS],
        [x509.UniformResourceIdentifier("coterie://cos"), COS_DNS],
    ],
)
def test_a_certificate_without_exactly_one_role_and_name_of_ours_is_nobody(key, names):
    with pytest.raises(CertificateError):
        PeerIdentity.from_certificate(certificate_with(names, key))


@pytest.mark.parametrize("kind", ODD_EXTENSIONS)
def test_a_certificate_whose_extensions_are_not_read_is_nobody(kind):
    with pytest.raises(CertificateError, match="the certificate's extensions cannot be read"):
        PeerIdentity.from_certificate(with_odd_extensions(kind))


def test_what_is_no_certificate_is_nobody():
    with pytest.raises(CertificateError, match="not a certificate"):
        PeerIdentity.from_certificate(b"nonsense")


# A real TLS handshake, over a pair of connected sockets.


def context(authority: Authority, role: str, tmp_path, *, server: bool) -> ssl.SSLContext:
    key = new_tls_key()
    save_tls_key(tmp_path / f"{role}-key.pem", key)
    (tmp_path / f"{role}.pem").write_bytes(
        authority.issue(make_csr(key), role, "one") + authority.certificate_pem
    )
    result = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    result.load_cert_chain(tmp_path / f"{role}.pem", tmp_path / f"{role}-key.pem")
    result.load_verify_locations(cadata=authority.certificate_pem.decode())
    result.verify_mode = ssl.CERT_REQUIRED
    return result


class ServerSideError(Exception):
    """The server's outcome of a handshake that it ended."""


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> tuple[bytes, bytes]:
    """Return the certificates (DER) that the client and the server saw.

    Raises
    ------
    ssl.SSLCertVerificationError
        The client refused the server.
    ServerSideError
        The server refused the client.
    """
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    theirs.settimeout(10)
    seen: list[bytes] = []
    refused: list[ssl.SSLError] = []

    def serve() -> None:
        try:
            with server.wrap_socket(ours, server_side=True) as stream:
                seen.append(stream.getpeercert(binary_form=True) or b"")
                stream.sendall(b"ok")
        except ssl.SSLError as error:
            refused.append(error)
        finally:
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    at_client = b""
    try:
        with client.wrap_socket(theirs, server_hostname=name) as stream:
            at_client = stream.getpeercert(binary_form=True) or b""
            stream.recv(2)
    except ssl.SSLCertVerificationError:
        raise
    except OSError:
        # With TLS 1.3 the client learns of a refusal only when it reads; the server says why.
        pass
    finally:
        theirs.close()
        thread.join()
    if refused:
        raise ServerSideError(refused[0].reason)
    return at_client, seen[0]


def test_both_ends_of_a_tls_connection_learn_who_the_other_is(authority, tmp_path):
    cos = context(authority, "cos", tmp_path, server=True)
    client = context(authority, "client", tmp_path, server=False)
    at_client, at_server = handshake(cos, client, logical_name("cos", "one"))
    peers = [
        PeerIdentity.from_certificate(ssl.DER_cert_to_PEM_cert(der).encode())
        for der in (at_client, at_server)
    ]
    assert [str(peer) for peer in peers] == ["cos/one", "client/one"]


def test_a_data_owner_cannot_pose_as_the_cos(authority, tmp_path):
    owner = context(authority, "data-owner", tmp_path, server=True)
    client = context(authority, "client", tmp_path, server=False)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(owner, client, logical_name("cos", "one"))


def test_a_client_of_another_federation_is_refused_by_the_server(authority, tmp_path):
    stranger = Authority.create("Elsewhere", 365)
    cos = context(authority, "cos", tmp_path, server=True)
    client = context(stranger, "client", tmp_path, server=False)
    client.load_verify_locations(cadata=authority.certificate_pem.decode())
    with pytest.raises(ServerSideError, match="CERTIFICATE_VERIFY_FAILED"):
        handshake(cos, client, logical_name("cos", "one"))


# Tokens.


def test_a_token_matches_its_own_record_only():
    text, record = new_token("client", "one", 1000, 5)
    other, _ = new_token("client", "one", 1000, 5)
    assert text != other
    assert record.matches(text)
    assert not record.matches(other)


def test_only_the_hash_of_a_token_is_kept():
    text, record = new_token("client", "one", 1000, 5)
    secret = base64.b32decode(text.upper() + "====")
    assert len(secret) == 32
    assert record.token_hash == hashlib.sha256(encode("enrolment-token", secret)).digest()
    assert text not in repr(record)
    assert (record.role, record.name, record.expiry, record.max_participants) == ("client", "one", 1000, 5)


def test_case_and_surrounding_space_of_a_token_do_not_matter():
    text, record = new_token("cos", "one", 1000, 0)
    assert record.matches(f"  {text.upper()}\n")


@pytest.mark.parametrize("text", ["", "short", "a" * 51, "a" * 60, "1" * 52, "ä" * 52])
def test_what_is_no_token_matches_nothing_and_is_not_repeated(text):
    _, record = new_token("cos", "one", 1000, 0)
    assert not record.matches(text)
    with pytest.raises(CertificateError, match="32 bytes in base32") as caught:
        token_hash(text)
    assert not text or text not in str(caught.value)


def test_a_token_holds_for_its_role_and_name_until_it_expires():
    text, record = new_token("client", "one", 1000, 5)
    record.check(text, "client", "one", 999 + CLOCK_SKEW_S)
    over = "expired at 1970-01-01 00:16:40 UTC, and this machine's clock says 1970-01-01 00:26:40 UTC"
    with pytest.raises(CertificateError, match=over):
        record.check(text, "client", "one", 1000 + CLOCK_SKEW_S)
    with pytest.raises(CertificateError, match="enrol cos/one, expected client/one"):
        record.check(text, "cos", "one", 999)
    with pytest.raises(CertificateError, match="enrol client/two, expected client/one"):
        record.check(text, "client", "two", 999)
    with pytest.raises(CertificateError, match="not the expected one") as caught:
        replace(record, token_hash=bytes(32)).check(text, "client", "one", 999)
    assert text not in str(caught.value)


@pytest.mark.parametrize(
    ("role", "name", "expiry", "participants"),
    [("boss", "one", 1, 1), ("cos", "A", 1, 1), ("cos", "one", -1, 1), ("cos", "one", 1, -1)],
)
def test_a_token_for_something_that_cannot_be_is_not_made(role, name, expiry, participants):
    with pytest.raises(CertificateError):
        new_token(role, name, expiry, participants)
