"""Operators' keys: which plans a party takes as signed, and which files it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from coterie.crypto.operator_key import OperatorKeys, save_operator_keys, sign_run
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CertificateError

FIRST, SECOND, STRANGER = (Ed25519PrivateKey.generate() for _ in range(3))
HASH = bytes(range(32))


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def test_a_plan_is_accepted_from_each_operator_of_the_file_and_from_nobody_else(tmp_path: Path) -> None:
    save_operator_keys(tmp_path / "operator.pub", [public(FIRST), public(SECOND)])
    accepted = OperatorKeys.load(tmp_path / "operator.pub")
    assert accepted.keys == (public(FIRST), public(SECOND))
    for key in (FIRST, SECOND):
        accepted.verify("run", HASH, sign_run(key, "run", HASH))
    with pytest.raises(
        VerificationError, match="not signed by an operator whom this party accepts"
    ) as refused:
        accepted.verify("run", HASH, sign_run(STRANGER, "run", HASH))
    assert refused.value.reason is Reason.BAD_SIGNATURE


@pytest.mark.parametrize(
    ("run", "plan", "signature"),
    [
        ("other", HASH, sign_run(FIRST, "run", HASH)),
        ("run", bytes(32), sign_run(FIRST, "run", HASH)),
        ("run", HASH, bytes(64)),
        ("run", HASH, sign_run(FIRST, "run", HASH)[:-1]),
        ("run", HASH, b""),
        ("run", HASH, FIRST.sign(HASH)),
    ],
    ids=["another run", "another plan", "zeros", "cut off", "nothing", "over the hash alone"],
)
def test_a_signature_of_something_else_is_none(run: str, plan: bytes, signature: bytes) -> None:
    with pytest.raises(VerificationError):
        OperatorKeys((public(FIRST),)).verify(run, plan, signature)


@pytest.mark.parametrize(
    "text",
    ["", "no key", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"],
    ids=["empty", "text", "a block"],
)
def test_a_file_without_keys_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "operator.pub"
    file.write_text(text)
    with pytest.raises(CertificateError, match=r"operator\.pub holds"):
        OperatorKeys.load(file)


def test_a_key_of_another_kind_and_a_missing_file_are_named(tmp_path: Path) -> None:
    file = tmp_path / "operator.pub"
    other = generate_private_key(SECP256R1()).public_key()
    save_operator_keys(file, [public(FIRST)])
    file.write_bytes(file.read_bytes() + other.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with pytest.raises(CertificateError, match="no Ed25519 public key"):
        OperatorKeys.load(file)
    with pytest.raises(CertificateError, match="cannot read the operators' public keys") as missing:
        OperatorKeys.load(tmp_path / "gone.pub")
    assert "operator.pub" in (missing.value.hint or "")
