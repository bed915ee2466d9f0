"""TLS material of one process, as files, and the gRPC credentials made from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from coterie.crypto.authority import PeerIdentity
from coterie.errors import CertificateError

__all__ = ["TlsFiles"]


@dataclass(frozen=True)
class TlsFiles:
    """A folder with ``key.pem`` (mode 0600), ``chain.pem`` (certificate, then the authority's) and ``ca.pem``."""

    folder: Path

    @property
    def key(self) -> Path:
        """Private key of the process."""
        return self.folder / "key.pem"

    @property
    def chain(self) -> Path:
        """Certificate chain."""
        return self.folder / "chain.pem"

    @property
    def authority(self) -> Path:
        """Certificate of the authority that every peer's certificate must come from."""
        return self.folder / "ca.pem"

    def complete(self) -> bool:
        """Whether all three files are there."""
        return self.key.is_file() and self.chain.is_file() and self.authority.is_file()

    def identity(self) -> PeerIdentity:
        """Role, name and fingerprint of the certificate in use."""
        return PeerIdentity.from_certificate(self._read(self.chain))

    def server_credentials(self, *, require_client: bool = True) -> grpc.ServerCredentials:
        """Credentials of a server; a renewed certificate is taken up at the next handshake.

        Parameters
        ----------
        require_client : bool
            False only for enrolment, where the caller has no certificate yet.
        """

        def configuration() -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration(
                [(self._read(self.key), self._read(self.chain))], root_certificates=self._read(self.authority)
            )

        held = self.chain.stat().st_mtime_ns
        initial = configuration()

        def renewed() -> Any:
            # None stands for "no change"; gRPC asks before each handshake.
            nonlocal held
            modified = self.chain.stat().st_mtime_ns
            if modified == held:
                return None
            held = modified
            return configuration()

        return grpc.dynamic_ssl_server_credentials(
            initial, renewed, require_client_authentication=require_client
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a client that shows its certificate."""
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
