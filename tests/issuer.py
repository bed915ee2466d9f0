"""An issuer of ID tokens (OpenID Connect) for tests: its keys over HTTPS on loopback, and the tokens that it signs."""

import base64
import ipaddress
import json
import ssl
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

AUDIENCE = "coterie"


def keys_of_all_kinds() -> dict[str, tuple[str, Any]]:
    """Draw a key for each algorithm, by its id."""
    return {
        "rsa": ("RS256", rsa.generate_private_key(public_exponent=65537, key_size=2048)),
        "ec": ("ES256", ec.generate_private_key(ec.SECP256R1())),
        "ed": ("EdDSA", ed25519.Ed25519PrivateKey.generate()),
    }


def jwk(key_id: str, algorithm: str, key: Any) -> dict[str, Any]:
    """Return the public half of a key as an issuer serves it."""
    held = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)
    return {**held, "kid": key_id, "alg": algorithm, "use": "sig"}


class Issuer:
    """Serves its keys at `jwks_url`, whose certificate is in `ca_file`; `content` is what it answers with."""

    def __init__(self, folder: Path) -> None:
        self.keys = keys_of_all_kinds()
        self.fetches = 0
        self.status = 200
        self.content = self.jwks()
        self.ca_file = folder / "issuer.pem"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._certificate(folder), folder / "issuer.key")
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.fetches += 1
                self.send_response(issuer.status)
                if issuer.status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(issuer.content)))
                self.end_headers()
                self.wfile.write(issuer.content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.url = f"https://127.0.0.1:{self._server.server_address[1]}"
        self.jwks_url = f"{self.url}/keys"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def jwks(self) -> bytes:
        listed = [jwk(key_id, *held) for key_id, held in self.keys.items()]
        return json.dumps({"keys": listed}).encode()

    def section(self, **others: Any) -> dict[str, Any]:
        """Return the third party's settings for this issuer."""
        return {
            "issuer": self.url,
            "audience": AUDIENCE,
            "jwks_url": self.jwks_url,
            "jwks_ca_file": self.ca_file,
            **others,
        }

    def token(self, nonce: str, *, key_id: str = "ec", without: str = "", **claims: Any) -> str:
        """Sign an ID token of the subject anna; claims are added or replace others, one may be left out."""
        now = int(time.time())
        content = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "anna",
            "iat": now,
            "exp": now + 600,
            "nonce": nonce,
            **claims,
        }
        content.pop(without, None)
        algorithm, key = self.keys[key_id]
        return jwt.encode(content, key, algorithm, headers={"kid": key_id})

    def public_pem(self, key_id: str) -> bytes:
        return (
            self.keys[key_id][1]
            .public_key()
            .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )

    def _certificate(self, folder: Path) -> Path:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "issuer")])
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
                critical=False,
            )
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        self.ca_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (folder / "issuer.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return self.ca_file


def unsigned(token: str, header: dict[str, Any], signature: bytes = b"") -> str:
    """Return a token with another header and signature."""
    parts = [json.dumps(header).encode(), None, signature]
    encoded = [
        None if part is None else base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts
    ]
    return f"{encoded[0]}.{token.split('.')[1]}.{encoded[2]}"
