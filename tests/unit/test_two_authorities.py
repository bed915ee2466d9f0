"""Two authorities that are trusted while one takes the place of the other."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from coterie_thirdparty.certification import Certification
from cryptography import x509
from structlog.testing import capture_logs

from coterie.crypto.authority import Authority, authorities, issuer_of, make_csr, new_tls_key, save_tls_key
from coterie.errors import CertificateError
from coterie.net.credentials import TlsFiles
from coterie.net.renewal import Renewal
from coterie.store.authority import create_secrets, load_secrets


@pytest.fixture
def first():
    return Authority.create("First", 10)


@pytest.fixture
def second():
    return Authority.create("Second", 10)


@pytest.fixture
def tls(tmp_path, first):
    """Return the folder of a host whose certificate is of the first authority."""
    files, key = TlsFiles(tmp_path), new_tls_key()
    save_tls_key(files.key, key)
    files.chain.write_bytes(first.issue(make_csr(key), "client", "host", 5) + first.certificate_pem)
    files.authority.write_bytes(first.certificate_pem)
    return files


def test_a_certificate_of_one_of_the_authorities_is_trusted_and_another_is_named(tls, first, second):
    certificate = x509.load_pem_x509_certificate(tls.chain.read_bytes())
    both = second.certificate_pem + first.certificate_pem
    assert [one.subject.rfc4514_string() for one in authorities(both)] == ["CN=Second", "CN=First"]
    assert issuer_of(certificate, both).subject.rfc4514_string() == "CN=First"
    with pytest.raises(CertificateError, match=r"CN=First signed it, and trusted are CN=Second \(SHA-256 "):
        issuer_of(certificate, second.certificate_pem)
    with pytest.raises(ValueError, match=r"."):
        authorities(both[:-40])


def test_a_folder_that_names_both_is_whole_and_one_that_names_the_other_alone_is_not(tls, first, second):
    tls.authority.write_bytes(first.certificate_pem + second.certificate_pem)
    assert tls.damage() is None
    tls.authority.write_bytes((first.certificate_pem + second.certificate_pem)[:-40])
    assert "ca.pem is damaged" in tls.damage()
    tls.authority.write_bytes(second.certificate_pem)
    assert "CN=First signed it" in tls.damage()


async def test_authorities_are_taken_up_while_a_process_runs_unless_its_own_certificate_would_not_be_trusted(
    tls, first, second
):
    renewed = []
    slept = asyncio.Queue()

    async def sleep(_):
        slept.put_nowait(None)
        await asyncio.Event().wait()

    renewal = Renewal(tls, lambda: None, lambda: renewed.append(None), sleep=sleep)
    tls.authority.write_bytes(first.certificate_pem + second.certificate_pem)
    with capture_logs() as logged:
        running = asyncio.create_task(renewal.run())
        await slept.get()
        running.cancel()
        tls.authority.write_bytes(second.certificate_pem)
        running = asyncio.create_task(renewal.run())
        await slept.get()
        running.cancel()
    assert [line["event"] for line in logged] == [
        "took up other authorities",
        "other authorities are not taken up",
    ]
    assert logged[0]["authorities"] == 2
    assert "CN=First signed it" in logged[1]["error"]
    assert len(renewed) == 1


# --- what a third party trusts -------------------------------------------------------------------------------------


def subjects(pem):
    return [one.subject.rfc4514_string() for one in authorities(pem)]


def test_a_third_party_keeps_authorities_that_can_sign_and_says_which_it_trusts(tmp_path, second):
    create_secrets(tmp_path)
    own = (tmp_path / "ca.pem").read_bytes()
    files = TlsFiles(tmp_path / "tls")
    files.folder.mkdir()
    expired = Authority.create("Expired", 10, now=datetime.now(UTC) - timedelta(days=20))
    party = second.issue(make_csr(new_tls_key()), "client", "host", 5)
    files.authority.write_bytes(expired.certificate_pem + second.certificate_pem + party)
    certification = Certification(load_secrets(tmp_path), 5)
    with capture_logs() as logged:
        assert certification.certify_self(files, "directory")
    assert files.authority.read_bytes() == own + second.certificate_pem
    dropped, other, trusted = logged
    assert dropped["authority"].startswith("CN=Expired (SHA-256 ")
    assert dropped["reason"].startswith("it expired at ")
    assert other["reason"] == "it is no certificate of an authority"
    assert [name.partition(" (")[0] for name in trusted["authorities"]] == [*subjects(own), "CN=Second"]
    # Nothing is left to be done or said.
    with capture_logs() as logged:
        assert not certification.certify_self(files, "directory")
    assert logged == []


def test_a_third_party_whose_file_of_authorities_is_damaged_says_that_it_trusts_its_own_alone(
    tmp_path, second
):
    create_secrets(tmp_path)
    own = (tmp_path / "ca.pem").read_bytes()
    files = TlsFiles(tmp_path / "tls")
    files.folder.mkdir()
    files.authority.write_bytes((own + second.certificate_pem)[:-40])
    with capture_logs() as logged:
        assert Certification(load_secrets(tmp_path), 5).certify_self(files, "directory")
    assert files.authority.read_bytes() == own
    assert logged[0]["event"] == "trusts its own authority alone"
    assert logged[0]["file"] == str(files.authority)


def test_a_damaged_file_of_former_authorities_is_named(tls, first, second):
    former = tls.folder / "former-ca.pem"
    former.write_bytes(second.certificate_pem)
    assert subjects(tls.all_authorities()) == ["CN=First", "CN=Second"]
    former.write_bytes(second.certificate_pem[:-40])
    with pytest.raises(CertificateError, match=r"former-ca\.pem is damaged") as raised:
        tls.all_authorities()
    assert "BEGIN to its END line" in raised.value.hint
