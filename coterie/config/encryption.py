"""Configuration of the encrypted sum."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from coterie.config.base import Model
from coterie.crypto.key_record import KeyTerms

__all__ = ["EncryptionSettings"]

_LEAST_BITS = 2048


class EncryptionSettings(Model):
    """The Paillier key of an encrypted sum, and who decrypts."""

    bits: int = Field(
        3072,
        ge=1024,
        le=8192,
        multiple_of=16,
        description="Length of the key's modulus; 3072 stand for 128 bits.",
    )
    comparison: bool = Field(
        False,
        description="Whether the run compares with a paper: only then a key may have fewer than 2048 bits. Such a key "
        "protects nobody.",
    )
    obfuscators: Literal["public", "short"] = Field(
        "public",
        description="How contributors hide their values: by exponents of half the key's length, or of 512 bits, which "
        "is four times as fast and assumes more.",
    )
    holders: int = Field(
        3,
        ge=1,
        le=32,
        description="Decrypting clients: they hold the secret key together, and decrypt a part of each sum each. With "
        "secure_sum 'shared-key' client hosts hold it, and there are none.",
    )
    sparse: bool = Field(
        False,
        description="Whether contributions to training leave out ciphertexts without anything in them: FedMF's "
        "PartText. It costs less, and shows the server near which items each user has something.",
    )
    rotate_every: int = Field(
        0, ge=0, description="Rounds after which those who hold the key make another one; 0 for never."
    )

    @model_validator(mode="after")
    def _long_enough(self) -> Self:
        if self.bits < _LEAST_BITS and not self.comparison:
            raise ValueError(
                f"encryption.bits {self.bits}: keys of fewer than {_LEAST_BITS} bits are for comparisons with papers "
                "only (encryption.comparison = true)"
            )
        return self

    @property
    def terms(self) -> KeyTerms:
        """What the run asks of its keys."""
        return KeyTerms(bits=self.bits, comparison=self.comparison)
