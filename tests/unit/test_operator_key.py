"""Operators' keys: which plans a party takes as signed, and which texts are keys."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ValidationError

from coterie.config.services import ClientSettings
from coterie.crypto.operator_key import OperatorKeys, public_text, sign_run
from coterie.crypto.verification import Reason, VerificationError

FIRST, SECOND, STRANGER = (Ed25519PrivateKey.generate() for _ in range(3))
HASH = bytes(range(32))


def test_a_plan_is_accepted_from_each_operator_that_is_known_and_from_nobody_else() -> None:
    accepted = OperatorKeys.parse([public_text(FIRST), public_text(SECOND)])
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
        OperatorKeys.parse([public_text(FIRST)]).verify(run, plan, signature)


@pytest.mark.parametrize(
    "text", ["", "ab" * 31, "ab" * 33, "xy" * 32], ids=["empty", "short", "long", "no digits"]
)
def test_what_is_no_key_is_refused_where_it_stands(text: str) -> None:
    with pytest.raises(ValueError, match=r"hexadecimal"):
        OperatorKeys.parse([text])
    peer = {"address": "127.0.0.1:1", "name": "a"}
    given = {"name": "h", "state": "state", "listen": "127.0.0.1:0", "cos": peer, "thirdparty": peer}
    for keys in ([text], []):
        with pytest.raises(ValidationError, match="operator_keys"):
            ClientSettings.model_validate({**given, "operator_keys": keys})
