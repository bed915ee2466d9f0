"""Check ID tokens of an issuer (OpenID Connect), which enrol client hosts in the place of enrolment tokens."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

from cryptography.hazmat.primitives.asymmetric import ec

from coterie.config.services import OidcSettings
from coterie.crypto.id_tokens import id_token_nonce, subject_hash, subject_name
from coterie.errors import CertificateError, PreflightError
from coterie_thirdparty.issuer_keys import IssuerKeys

__all__ = ["IdTokens", "TokenSubject"]

_MOST_CHARACTERS = 16 * 1024
_MOST_OF_SUBJECT = 255
_LEAST_RSA_BITS = 2048
_KEY_TYPES: Mapping[str, tuple[str, str | None]] = MappingProxyType(
    {"RS256": ("RSA", None), "ES256": ("EC", "P-256"), "EdDSA": ("OKP", "Ed25519")}
)
"""Type and curve of the keys of each algorithm that is taken; a key never serves another algorithm."""
_REQUIRED = ("iss", "aud", "sub", "exp", "iat", "nonce")


class TokenSubject(NamedTuple):
    """The holder of an ID token."""

    names: tuple[str, ...]
    """Names that the holder's devices may have."""
    digest: str
    """Beginning of the hash of issuer and subject, hexadecimal, for records."""


class IdTokens:
    """Checks ID tokens of the configured issuer.

    Parameters
    ----------
    settings : OidcSettings
        The issuer, and what its tokens must carry.
    keys : IssuerKeys
        The issuer's keys.

    Raises
    ------
    PreflightError
        PyJWT is not installed.
    """

    def __init__(self, settings: OidcSettings, keys: IssuerKeys) -> None:
        try:
            import jwt
        except ModuleNotFoundError as error:
            raise PreflightError(
                "enrolment by ID tokens ([oidc]) needs the package PyJWT",
                hint="pip install 'coterie[oidc]', or take the table out of the configuration",
            ) from error
        self._jwt = jwt
        self._settings = settings
        self._keys = keys

    @property
    def issuer(self) -> str:
        """Address of the issuer."""
        return self._settings.issuer

    @property
    def participants(self) -> int:
        """Most participants of one device."""
        return self._settings.participants

    async def check(self, token: str, key: ec.EllipticCurvePublicKey) -> TokenSubject:
        """Return the subject of an ID token that was made for a key.

        Raises
        ------
        CertificateError
            Says what is wrong; nothing of the token is in the message.
        PeerError
            The issuer's keys cannot be had.
        """
        nonce = id_token_nonce(key)
        claims = await self._verified(token)
        if claims["nonce"] != nonce:
            raise CertificateError(
                "this ID token was made for another key: its nonce is not that of the key which asks for a certificate",
                hint="ask the issuer for one with the nonce that `coterie certs oidc-nonce` prints",
            )
        subject = claims.get(self._settings.subject_claim)
        if not _names_somebody(subject):
            raise CertificateError(
                f"the claim {self._settings.subject_claim} of this ID token names nobody, expected a text of 1 to "
                f"{_MOST_OF_SUBJECT} characters"
            )
        names = (
            subject_name(self.issuer, subject, device) for device in range(1, self._settings.devices + 1)
        )
        return TokenSubject(tuple(names), subject_hash(self.issuer, subject).hex()[:16])

    async def _verified(self, token: str) -> Mapping[str, Any]:
        """Return the claims of a token after checks of signature, issuer, audience, times and required claims."""
        jwt, settings = self._jwt, self._settings
        if len(token) > _MOST_CHARACTERS:
            raise CertificateError(f"an ID token of more than {_MOST_CHARACTERS} characters")
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise CertificateError("this ID token cannot be read, expected a signed JWT") from None
        algorithm = header.get("alg")
        if not isinstance(algorithm, str) or algorithm not in _KEY_TYPES:
            raise CertificateError(
                f"this ID token is signed by an algorithm that is not taken, expected {', '.join(_KEY_TYPES)}"
            )
        key = await self._key(header.get("kid"), algorithm)
        # Messages of the library are not passed on: some quote the token.
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=settings.audience,
                issuer=settings.issuer,
                leeway=settings.leeway_s,
                options={"require": [*_REQUIRED, *settings.claims]},
            )
        except jwt.MissingRequiredClaimError as error:
            raise CertificateError(f"this ID token lacks the claim {error.claim}") from None
        except jwt.ExpiredSignatureError:
            raise CertificateError(
                "this ID token has expired", hint="ask the issuer for another, with the same nonce"
            ) from None
        except jwt.ImmatureSignatureError:
            raise CertificateError(
                "this ID token is not valid yet", hint="is the clock of the third party right?"
            ) from None
        except jwt.InvalidIssuerError:
            raise CertificateError(
                f"this ID token is of another issuer, expected {settings.issuer}"
            ) from None
        except jwt.InvalidAudienceError:
            raise CertificateError(
                f"this ID token is for another audience, expected {settings.audience}"
            ) from None
        except jwt.InvalidSignatureError:
            raise CertificateError("the signature of this ID token is not the issuer's") from None
        except (jwt.PyJWTError, ArithmeticError, ValueError, RecursionError):
            raise CertificateError("this ID token cannot be read, expected a signed JWT") from None
        self._check_claims(claims)
        return claims

    async def _key(self, key_id: object, algorithm: str) -> Any:
        if not isinstance(key_id, str):
            raise CertificateError("this ID token does not name its key (kid)")
        found = await self._keys.find(key_id)
        if found is None:
            raise CertificateError("the issuer has no key of the id (kid) that this ID token names")
        kind, curve = _KEY_TYPES[algorithm]
        fits = (
            found.get("kty") == kind
            and "d" not in found
            and (curve is None or found.get("crv") == curve)
            and found.get("alg", algorithm) == algorithm
            and found.get("use", "sig") == "sig"
        )
        if not fits:
            raise CertificateError(
                "the key that this ID token names is not one for signatures by its algorithm"
            )
        try:
            key = self._jwt.PyJWK(dict(found), algorithm=algorithm)
        except self._jwt.PyJWTError:
            raise CertificateError("the key that this ID token names cannot be read") from None
        if kind == "RSA" and key.key.key_size < _LEAST_RSA_BITS:
            raise CertificateError(f"the issuer's key has less than {_LEAST_RSA_BITS} bits")
        return key

    def _check_claims(self, claims: Mapping[str, Any]) -> None:
        audience = claims["aud"]
        several = isinstance(audience, list) and len(audience) > 1
        if several and claims.get("azp") != self._settings.audience:
            raise CertificateError(
                f"this ID token has several audiences and was not issued to {self._settings.audience} (claim azp)"
            )
        for name, wanted in self._settings.claims.items():
            held = claims[name]
            values = held if isinstance(held, list) else [held]
            # True is no 1: kinds are compared, too.
            if not any(type(value) is type(wanted) and value == wanted for value in values):
                raise CertificateError(f"the claim {name} of this ID token is not the required one")


def _names_somebody(subject: object) -> TypeGuard[str]:
    """Return whether a claim is a text that can be a name: lone halves of surrogate pairs are in no Unicode text."""
    return (
        isinstance(subject, str)
        and 0 < len(subject) <= _MOST_OF_SUBJECT
        and not any("\ud800" <= character <= "\udfff" for character in subject)
    )
