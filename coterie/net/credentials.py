"""TLS files of one process, and the gRPC credentials made from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from coterie.crypto.authority import (
    PeerIdentity,
    authorities,
    issuer_of,
)
from coterie.errors import CertificateError

__all__ = ["TlsFiles"]

_PUT_BACK = (
    "put it back from a backup (`coterie backup` holds it), or delete it and start the service with a new token of "
    "the operator in enrol.token_file"
)


@dataclass(frozen=True)
class TlsFiles:
    """The TLS folder of a process: ``key.pem`` (mode 0600), ``chain.pem`` (its certificate first), ``ca.pem``."""

    folder: Path

    @property
    def key(self) -> Path:
        """File of the process's private key."""
        return self.folder / "key.pem"

    @property
    def chain(self) -> Path:
        """File of the certificate chain."""
        return self.folder / "chain.pem"

    @property
    def authority(self) -> Path:
        """File of the authorities' certificates, one of which must have issued every peer's."""
        return self.folder / "ca.pem"

    def all_authorities(self) -> bytes:
        """Return the authorities in PEM, and those of ``former-ca.pem``, which signed certificates that the log has.

        Raises
        ------
        CertificateError
            A file cannot be read, or is damaged; the message names it.
        """
        former = self.folder / "former-ca.pem"
        found = []
        for path in (self.authority, *([former] if former.is_file() else ())):
            pem = self._read(path)
            try:
                authorities(pem)
            except ValueError as error:
                raise CertificateError(
                    f"{path} is damaged: not a certificate in PEM, or not a whole one",
                    hint="write the certificates of the authorities there again, each from its BEGIN to its END line",
                ) from error
            found.append(pem)
        return b"\n".join(found)

    def complete(self) -> bool:
        """Return whether all three files are there."""
        return self.key.is_file() and self.chain.is_file() and self.authority.is_file()

    def identity(self) -> PeerIdentity:
        """Return role, name and fingerprint of the certificate in use.

        Raises
        ------
        CertificateError
            The file is missing or damaged.
        """
        try:
            return PeerIdentity.from_certificate(self._read(self.chain))
        except CertificateError as error:
            if error.hint:
                raise
            raise CertificateError(f"{self.chain} is damaged: {error.message}", hint=_PUT_BACK) from error

    def damage(self) -> str | None:
        """Return which of the two certificate files is damaged and how; None when both can be read and fit together."""
        try:
            trusted = self._read(self.authority)
            roots = authorities(trusted)
        except ValueError:
            return f"{self.authority} is damaged: not a certificate in PEM, or not a whole one"
        try:
            chain = self._read(self.chain)
            PeerIdentity.from_certificate(chain)
            certificate, *others = x509.load_pem_x509_certificates(chain)
            try:
                issuer_of(certificate, trusted)
            except CertificateError as error:
                return f"{self.chain} is damaged, or not of the authority in {self.authority.name}: {error.message}"
            if any(one not in roots for one in others) or chain.count(b"-----BEGIN") != 1 + len(others):
                return f"{self.chain} is damaged after its first certificate"
        except CertificateError as error:
            return f"{self.chain} is damaged: {error.message}"
        except (InvalidSignature, ValueError, TypeError):
            return f"{self.chain} is damaged, or not of the authority in {self.authority.name}"
        return None

    def server_credentials(self, *, require_client: bool = True) -> grpc.ServerCredentials:
        """Return a server's credentials; the next handshake uses a renewed certificate, and other authorities.

        Parameters
        ----------
        require_client : bool
            False only for enrolment, where the caller has no certificate yet.
        """

        def written() -> tuple[int, int]:
            return self.chain.stat().st_mtime_ns, self.authority.stat().st_mtime_ns

        def configuration() -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration(
                [(self._read(self.key), self._read(self.chain))], root_certificates=self._read(self.authority)
            )

        held = written()
        initial = configuration()

        def renewed() -> Any:
            # None stands for "no change"; gRPC asks before each handshake.
            nonlocal held
            try:
                modified = written()
                if modified == held:
                    return None
                # Files that are half written, or authorities that would not trust this very certificate, are left.
                own = x509.load_pem_x509_certificate(self._read(self.chain))
                issuer_of(own, self._read(self.authority))
                made = configuration()
            except (OSError, ValueError, CertificateError):
                return None
            held = modified
            return made

        return grpc.dynamic_ssl_server_credentials(
            initial, renewed, require_client_authentication=require_client
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return a client's credentials, with its certificate."""
        return grpc.ssl_channel_credentials(
            root_certificates=self._read(self.authority),
            private_key=self._read(self.key),
            certificate_chain=self._read(self.chain),
        )

    @staticmethod
    def _read(path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise CertificateError(
                f"cannot read {path}: {error.strerror}", hint="enrol first: `coterie certs --help`"
            ) from error
