"""The signature under a request to renew an expired certificate: which bytes it covers, and whose key it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coterie.crypto.authority import Authority, make_csr, new_tls_key
from coterie.crypto.late_renewal import check_late_request, sign_late_request
from coterie.errors import CertificateError

KEY, OTHER = new_tls_key(), new_tls_key()
AUTHORITY = Authority.create("authority", 9)
HELD = AUTHORITY.issue(make_csr(KEY), "client", "anna", 1)
LATER = AUTHORITY.issue(make_csr(KEY), "client", "anna", 1)
CSR = make_csr(KEY)
TIME = 1_800_000_000
SIGNATURE = sign_late_request(KEY, HELD, CSR, "directory", TIME)


def test_the_holder_of_the_key_is_believed() -> None:
    check_late_request(HELD, CSR, "directory", TIME, SIGNATURE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: (LATER, CSR, "directory", TIME, SIGNATURE), "not signed with the key"),
        (lambda: (HELD, make_csr(KEY), "directory", TIME, SIGNATURE), "not signed with the key"),
        (lambda: (HELD, CSR, "other", TIME, SIGNATURE), "not signed with the key"),
        (lambda: (HELD, CSR, "directory", TIME + 1, SIGNATURE), "not signed with the key"),
        (lambda: (HELD, CSR, "directory", TIME, SIGNATURE[:-1]), "not signed with the key"),
        (lambda: (HELD, CSR, "directory", TIME, b""), "not signed with the key"),
        (lambda: _signed_by(OTHER, CSR), "not signed with the key"),
        (lambda: _signed_by(KEY, make_csr(OTHER)), "for another key"),
        (lambda: _signed_by(KEY, b"nonsense"), "request is malformed"),
        (lambda: (b"nonsense", CSR, "directory", TIME, SIGNATURE), "not in PEM"),
    ],
    ids=[
        "other-certificate",
        "other-request",
        "other-third-party",
        "other-time",
        "cut-signature",
        "no-signature",
        "other-signer",
        "other-key",
        "no-request",
        "no-certificate",
    ],
)
def test_a_request_that_was_changed_or_is_anothers_is_not(
    change: Callable[[], tuple[bytes, bytes, str, int, bytes]], said: str
) -> None:
    with pytest.raises(CertificateError, match=said):
        check_late_request(*change())


def _signed_by(key: object, request: bytes) -> tuple[bytes, bytes, str, int, bytes]:
    signature = sign_late_request(key, HELD, request, "directory", TIME)  # type: ignore[arg-type]
    return HELD, request, "directory", TIME, signature
