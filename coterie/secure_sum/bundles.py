"""Conversion of key bundles between their wire messages and the type that can be verified."""

from __future__ import annotations

from coterie.crypto.identity import Bundle
from coterie.errors import CryptoError
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.common_pb2 import KeyBundle

__all__ = ["bundle_from_wire", "bundle_to_wire"]


def bundle_to_wire(bundle: Bundle) -> KeyBundle:
    """Return the message for a bundle."""
    return KeyBundle(
        signing_public=bundle.signing_public,
        agreement_public=bundle.agreement_public,
        version=bundle.version,
        not_before=bundle.not_before,
        not_after=bundle.not_after,
        signature=bundle.signature,
        countersignature=bundle.countersignature,
        party=bundle.party,
    )


def bundle_from_wire(message: KeyBundle) -> Bundle:
    """Return the bundle of a message, unverified.

    Raises
    ------
    Refusal
        BAD_SIGNATURE when a field has the wrong length.
    """
    try:
        return Bundle(
            signing_public=message.signing_public,
            agreement_public=message.agreement_public,
            version=message.version,
            not_before=message.not_before,
            not_after=message.not_after,
            signature=message.signature,
            countersignature=message.countersignature,
            party=message.party,
        )
    except CryptoError as error:
        raise Refusal(ErrorReason.ERROR_REASON_BAD_SIGNATURE, error.message, field="bundle") from error
