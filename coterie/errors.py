"""The errors that users of Coterie see, with the exit codes of the commands.

One class per kind of problem.  A message says what was wrong, which value, and what would be right; ``hint`` says
what to do next.  Exit codes are grouped by range and documented in ``docs/exit-codes/``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CertificateError",
    "ConfigError",
    "CoterieError",
    "CryptoError",
    "DataError",
    "PeerError",
    "PreflightError",
    "RunError",
    "StoreError",
    "nearest",
]


class CoterieError(Exception):
    """Base of all errors that are meant to be read by a person.

    Parameters
    ----------
    message : str
        Says what was wrong, and which value.
    hint : str, optional
        Advice on what to do next.
    """

    exit_code: int = 1
    """Process exit status of a command that ends with this error."""
    code: str = "error"
    """Stable machine-readable name, used in the ``--json`` envelope."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(CoterieError):
    """A configuration file, environment variable or ``--set`` that cannot be used."""

    exit_code = 10
    code = "config"


class PreflightError(CoterieError):
    """A missing prerequisite of a run: a port, a store, a certificate, a peer."""

    exit_code = 11
    code = "preflight"


class DataError(CoterieError):
    """A data set that cannot be read, or whose content is out of range."""

    exit_code = 20
    code = "data"


class CertificateError(CoterieError):
    """A certificate, token or key that is missing, expired, of the wrong role or malformed."""

    exit_code = 30
    code = "certificate"


class CryptoError(CoterieError):
    """A sealed record, signature or key agreement that does not verify."""

    exit_code = 31
    code = "crypto"


class StoreError(CoterieError):
    """A store that cannot be opened, written or read.

    Parameters
    ----------
    message, hint
        As for `CoterieError`.
    trouble : str
        ``"full"`` when there is no room, ``"away"`` when the store does not answer or takes no writes now: both are
        transient, and the same request may be repeated.  Empty for permanent failures.
    """

    exit_code = 40
    code = "store"

    def __init__(self, message: str, *, hint: str | None = None, trouble: str = "") -> None:
        super().__init__(message, hint=hint)
        self.trouble = trouble


class PeerError(CoterieError):
    """A peer that cannot be reached, or that refused a request."""

    exit_code = 50
    code = "peer"


class RunError(CoterieError):
    """A training run that ended without a result."""

    exit_code = 60
    code = "run"


def nearest(value: str, choices: Iterable[str]) -> str | None:
    """Return the choice most like ``value``; None when no choice is similar.

    >>> nearest("epoch", ["epochs", "theta"])
    'epochs'
    """
    found = difflib.get_close_matches(value, list(choices), n=1, cutoff=0.6)
    return found[0] if found else None
