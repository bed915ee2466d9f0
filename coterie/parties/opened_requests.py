"""Sealed requests of users at the third party, which the COS relays without their senders: checked, opened, parsed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from coterie.crypto.graph_requests import (
    AnswerKey,
    Kind,
    SealingSecret,
    UploadPlace,
    open_request,
    upload_id_of,
)
from coterie.crypto.verification import VerificationError
from coterie.parties.request_checks import check_run, refusal_of
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import expansion_pb2 as wire

__all__ = ["OpenedRequest", "check_request", "open_sealed", "parsed"]

M = TypeVar("M", bound=Message)

_ID = 32
_KEY_ID = 8
_MOST_SEALED = 1 << 20


class OpenedRequest(NamedTuple):
    """A sealed request that opened."""

    place: UploadPlace
    content: bytes
    answer: AnswerKey


def check_request(request: wire.SealedRequest) -> None:
    """Check the form of a sealed request.

    Raises
    ------
    Refusal
        INVALID_FIELD or TOO_LARGE.
    """
    check_run(request.run_id, "request.run_id")
    if not 1 <= request.epoch < 1 << 31:
        raise _invalid("request.epoch", f"epoch {request.epoch}", "1 to 2^31 - 1")
    for field, length in (("upload_id", _ID), ("key_id", _KEY_ID)):
        held = len(getattr(request, field))
        if held != length:
            raise _invalid(f"request.{field}", f"{held} bytes", f"{length} bytes")
    if len(request.sealed) > _MOST_SEALED:
        raise Refusal(
            ErrorReason.ERROR_REASON_TOO_LARGE,
            f"a sealed request of {len(request.sealed)} bytes",
            field="request.sealed",
            expected=f"at most {_MOST_SEALED} bytes",
        )


def open_sealed(
    kind: Kind, request: wire.SealedRequest, find: Callable[[bytes], SealingSecret]
) -> OpenedRequest:
    """Open a request of a kind, whose form was checked; ``find`` gives a sealing key by its id.

    Raises
    ------
    Refusal
        UNKNOWN_PREKEY for a key that is not held, NOT_AUTHENTIC or INVALID_FIELD when it does not open.
    """
    place = UploadPlace(request.run_id, request.epoch, request.upload_id)
    try:
        content, answer = open_request(kind, place, find(request.key_id), request.sealed)
    except VerificationError as error:
        raise refusal_of(error, "request.sealed", "a request sealed for this call and upload") from error
    return OpenedRequest(place, content, answer)


def parsed(cls: type[M], opened: OpenedRequest) -> M:
    """Parse the content of a request, and check that its secret is the upload's.

    Raises
    ------
    Refusal
        INVALID_FIELD, or NOT_AUTHENTIC for another upload's secret.
    """
    try:
        content = cls.FromString(opened.content)
    except DecodeError:
        raise _invalid("request.sealed", "content that does not parse", f"a {cls.DESCRIPTOR.name}") from None
    try:
        same = upload_id_of(content.secret) == opened.place.upload_id  # type: ignore[attr-defined]
    except VerificationError as error:
        raise refusal_of(error, "secret", "32 bytes") from error
    if not same:
        raise Refusal(
            ErrorReason.ERROR_REASON_NOT_AUTHENTIC,
            "the secret is not that of the upload's id",
            field="secret",
            expected="the secret that the upload was published with",
        )
    return content


def _invalid(field: str, message: str, expected: str) -> Refusal:
    return Refusal(ErrorReason.ERROR_REASON_INVALID_FIELD, message, field=field, expected=expected)
