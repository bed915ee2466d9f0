"""Exit statuses in the help of commands."""

from __future__ import annotations

from coterie.errors import (
    CertificateError,
    ConfigError,
    CoterieError,
    CryptoError,
    DataError,
    PeerError,
    PreflightError,
    RunError,
    StoreError,
)

__all__ = ["exits"]

_MEANINGS: dict[type[CoterieError], str] = {
    ConfigError: "a wrong configuration",
    PreflightError: "something needed that is not there",
    DataError: "a data set that cannot be used",
    CertificateError: "a certificate, token or key that cannot be used",
    CryptoError: "something signed or sealed that does not verify, or cannot be signed",
    StoreError: "a store that cannot be used",
    PeerError: "a peer that does not answer or refuses",
    RunError: "a run without a result",
}


def exits(*errors: type[CoterieError], interrupted: bool = False) -> str:
    """Return a sentence that lists a command's exit statuses, for its help.

    Parameters
    ----------
    *errors : type of CoterieError
        Errors with which the command may end; success and a wrong command line are always listed.
    interrupted : bool
        Whether the command runs long enough to be interrupted from the keyboard.
    """
    found = ["0 when done", "2 for a wrong command line"]
    found += [f"{error.exit_code} for {_MEANINGS[error]}" for error in sorted(errors, key=_status)]
    if interrupted:
        found.append("130 when interrupted")
    return f"Exit status: {', '.join(found)}; docs/exit-codes/ has more on each."


def _status(error: type[CoterieError]) -> int:
    return error.exit_code
