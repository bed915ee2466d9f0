"""``coterie certs``: make the authority, tokens, invitations, rosters, passwords; show, enrol, revoke certificates."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from coterie.cli.exits import exits
from coterie.cli.options import JsonOption, SetOption
from coterie.cli.output import Output
from coterie.errors import CertificateError, ConfigError, CryptoError, PeerError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from coterie.config.base import Peer
    from coterie.net.channel import Channel
    from coterie.net.credentials import TlsFiles

__all__ = ["app"]

app = typer.Typer(help="Make and revoke certificates, tokens, invitations and rosters.", no_args_is_help=True)

_TOKENS = "tokens.jsonl"
_SHOWN = ("chain.pem", "tls/chain.pem", "state/tls/chain.pem", "ca.pem")
"""Places of a certificate in a folder; `show` prints the first that exists."""
_DIGEST_BYTES = 32

M = TypeVar("M", bound="BaseModel")
T = TypeVar("T")

StateArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="State folder of the third party.")]
NameOption = Annotated[str, typer.Option("--thirdparty", metavar="NAME", help="Name of the third party.")]
OperatorTlsOption = Annotated[
    Path,
    typer.Option("--tls", metavar="FOLDER", help="TLS folder of an operator: key.pem, chain.pem, ca.pem."),
]
AddressOption = Annotated[
    str, typer.Option("--address", metavar="HOST:PORT", help="Address of the third party.")
]


@app.command(epilog=exits(CertificateError))
def init(
    state: StateArgument,
    name: Annotated[
        str, typer.Option(metavar="TEXT", help="Name of the authority in its certificate.")
    ] = "Coterie authority",
    as_json: JsonOption = False,
) -> None:
    """Make a certificate authority and the directory's key.

    Not needed as a rule: a third party without an authority makes one when it starts.
    """
    from coterie.store.authority import create_secrets

    secrets = create_secrets(state, name)
    certificate = state / "ca.pem"
    fingerprint = _fingerprint(secrets.authority.certificate_pem)
    output = Output("certs init", as_json=as_json)
    output.say(f"authority   {certificate}", f"fingerprint {fingerprint}")
    output.say("hand ca.pem to every party; keep the other files of the folder private")
    output.finish(
        {"ca": certificate, "fingerprint": fingerprint, "directory_key": secrets.directory_key.hex()}
    )


@app.command(epilog=exits(CertificateError))
def token(
    state: Annotated[Path, typer.Option(metavar="FOLDER", help="State folder of the third party.")],
    role: Annotated[
        str,
        typer.Option(
            metavar="ROLE", help="cos, data-owner, client, decrypting-client, thirdparty or operator."
        ),
    ],
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the party, a DNS label; unique within its role.")
    ],
    participants: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Most participants (users, data owners) that the party may speak for."
        ),
    ] = 0,
    hours: Annotated[
        float, typer.Option(metavar="HOURS", min=0.01, help="Validity of the token, hours.")
    ] = 24.0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the token, mode 0600. Absent: ROLE-NAME.token."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a one-time token with which a party enrols.

    The third party keeps only the token's hash. Give the file to the party and name it in `enrol.token_file`.
    """
    from coterie.crypto.authority import new_token
    from coterie.crypto.keyfile import write_private_file
    from coterie.store.tokens import append_token

    expiry = int(time.time() + hours * 3600)
    secret, record = new_token(role, name, expiry, participants)
    file = out or Path(f"{role}-{name}.token")
    if file.exists():
        raise CertificateError(
            f"{file} is there already", hint="remove it, or choose another file with --out"
        )
    if not state.is_dir():
        raise CertificateError(f"there is no folder {state}", hint="make the authority: `coterie certs init`")
    # The record first: the third party refuses a token without a record.
    append_token(state / _TOKENS, record)
    write_private_file(file, f"{secret}\n".encode())
    output = Output("certs token", as_json=as_json)
    output.say(f"token for {role}/{name} in {file}, to be redeemed within {hours:g} h")
    output.finish({"file": file, "role": role, "name": name, "participants": participants, "expiry": expiry})


@app.command(epilog=exits(ConfigError, CertificateError))
def invite(
    state: Annotated[Path, typer.Option(metavar="FOLDER", help="State folder of the third party.")],
    role: Annotated[
        str, typer.Option(metavar="ROLE", help="cos, data-owner, client, decrypting-client or operator.")
    ],
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the party, a DNS label; unique within its role.")
    ],
    enrolment: Annotated[
        str, typer.Option("--enrol", metavar="HOST:PORT", help="Enrolment address of the third party.")
    ],
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the third party.")],
    cos: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Address of the orchestration server (COS); not for the COS itself."
        ),
    ] = None,
    cos_name: Annotated[str, typer.Option(metavar="NAME", help="Name of the orchestration server.")] = "cos",
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Id of the run to take part in.")] = None,
    participants: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Most participants (users, data owners) that the party may speak for."
        ),
    ] = 0,
    hours: Annotated[
        float, typer.Option(metavar="HOURS", min=0.01, help="Validity of the invitation, hours.")
    ] = 24.0,
    thirdparty: NameOption = "directory",
    sets: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File for the invitation, mode 0600. Absent: ROLE-NAME.invitation."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write an invitation for a party on another machine.

    It holds the authority's certificate, addresses and names, and a one-time token. --set adds keys to the party's
    configuration; files among them are named without a folder and sent beside the invitation. The party joins with
    `coterie enrol`. Send the file over a trusted channel, and tell the authority's fingerprint over another one.
    """
    from coterie.config.base import EnrolSettings, Peer
    from coterie.config.load import tree_of
    from coterie.launch.authority import held_operator_keys
    from coterie.launch.invitation import invite as invite_party
    from coterie.launch.parties import OPERATOR_SIGNS

    if role == "thirdparty":
        raise CertificateError(
            "a third party is not invited: it makes its own certificate",
            hint="start it on its own state folder: `coterie serve thirdparty`",
        )
    _checked(
        EnrolSettings,
        {"address": "--enrol", "name": "--thirdparty"},
        {"address": enrolment, "name": thirdparty, "ca_file": state, "token_file": state},
    )
    if (cos is None) != (role == "cos"):
        raise ConfigError(
            f"--cos {cos!r}: the COS does not call itself"
            if cos is not None
            else "--cos is missing: expected HOST:PORT, as in 10.0.0.2:7443"
        )
    peers = [("thirdparty", "--address", address, thirdparty)]
    peers += [("cos", "--cos", cos, cos_name)] if cos is not None else []
    settings: dict[str, Any] = {}
    for key, option, place, peer in peers:
        _checked(Peer, {"address": option, "name": f"--{key}"}, {"address": place, "name": peer})
        settings[key] = {"address": place, "name": peer}
    if run is not None:
        settings["run"] = run
    if role == "operator":
        settings |= {"order": "order.json", "signs": OPERATOR_SIGNS}
    elif role != "cos" and (keys := held_operator_keys(state)):
        settings["operator_keys"] = keys
    file = out or Path(f"{role}-{name}.invitation")
    if file.exists():
        raise CertificateError(
            f"{file} is there already", hint="remove it, or choose another file with --out"
        )
    made = invite_party(
        state,
        role,
        name,
        participants,
        enrol=(enrolment, thirdparty),
        settings=tree_of(settings, sets or ()),
        hours=hours,
    )
    made.save(file)
    output = Output("certs invite", as_json=as_json)
    output.say(
        f"invitation for {role}/{name} in {file}, to be used once within {hours:g} h",
        f"fingerprint {made.fingerprint} (tell it over another way)",
    )
    output.finish(
        {
            "file": file,
            "role": role,
            "name": name,
            "participants": participants,
            "expiry": made.expiry,
            "fingerprint": made.fingerprint,
        }
    )


@app.command(epilog=exits(CertificateError))
def show(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="Certificate (PEM), or the folder of a party or authority."),
    ],
    as_json: JsonOption = False,
) -> None:
    """Print role, name, validity and fingerprint of a certificate."""
    from cryptography import x509

    from coterie.crypto.authority import PeerIdentity

    file = next((path / name for name in _SHOWN if (path / name).is_file()), path)
    if file.is_dir():
        raise CertificateError(f"{file} holds no certificate; expected one of {', '.join(_SHOWN)}")
    try:
        pem = file.read_bytes()
        certificate = x509.load_pem_x509_certificate(pem)
    except OSError as error:
        raise CertificateError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise CertificateError(f"{file} is no certificate in PEM") from error
    try:
        peer = PeerIdentity.from_certificate(pem)
        role, name = peer.role, peer.name
    except CertificateError:
        if certificate.subject != certificate.issuer:
            raise
        role, name = "authority", certificate.subject.rfc4514_string()
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    valid = begin.timestamp() <= time.time() < end.timestamp()
    output = Output("certs show", as_json=as_json)
    output.say(
        f"role        {role}",
        f"name        {name}",
        f"valid       {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC{'' if valid else ' (not now)'}",
        f"fingerprint {_fingerprint(pem)}",
        f"signed by   {certificate.issuer.rfc4514_string()}",
    )
    output.finish(
        {
            "role": role,
            "name": name,
            "not_before": begin.isoformat(),
            "not_after": end.isoformat(),
            "valid": valid,
            "fingerprint": _fingerprint(pem),
            "issuer": certificate.issuer.rfc4514_string(),
        }
    )


@app.command(epilog=exits(ConfigError, CertificateError, PeerError))
def enrol(
    state: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help="State folder for key and certificate; the folder tls in it is for --tls of other commands.",
        ),
    ],
    role: Annotated[str, typer.Option(metavar="ROLE", help="Role that the token was made for.")],
    name: Annotated[str, typer.Option(metavar="NAME", help="Name that the token was made for.")],
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Enrolment address of the third party.")],
    ca: Annotated[Path, typer.Option(metavar="FILE", help="File with the authority's certificate, ca.pem.")],
    token_file: Annotated[Path, typer.Option("--token", metavar="FILE", help="File with the token.")],
    thirdparty: NameOption = "directory",
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Longest time to keep trying.")
    ] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Exchange an enrolment token for a certificate.

    For operators; services do so themselves when they start.
    """
    from coterie.config.base import EnrolSettings, ServiceSettings
    from coterie.net.credentials import TlsFiles
    from coterie.net.enrolment import IDENTITIES
    from coterie.net.enrolment import enrol as enrol_party
    from coterie.telemetry.logs import configure

    given = {"address": "--address", "name": "--thirdparty"}
    point = _checked(
        EnrolSettings,
        given,
        {
            "address": address,
            "name": thirdparty,
            "ca_file": ca,
            "token_file": token_file,
            "timeout_s": timeout,
        },
    )
    settings = _checked(
        ServiceSettings,
        {"name": "--name"},
        # The address is required and not used: only services listen.
        {"name": name, "state": state, "listen": "127.0.0.1:0", "enrol": point},
    )
    if (state / IDENTITIES).exists():
        # This command enrols no participants, so the service's would be lost.
        raise CertificateError(
            f"{state} is the folder of a service that speaks for participants, which enrols by itself",
            hint="put the token into its enrol.token_file; where it runs it takes it up",
        )
    configure("warning", service=f"{role}/{name}")
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    tls = TlsFiles(state / "tls")
    asyncio.run(enrol_party(role, settings, tls, ()))
    peer = tls.identity()
    output = Output("certs enrol", as_json=as_json)
    output.say(f"{peer} is enrolled; its certificate is in {tls.folder}")
    output.finish(
        {"role": peer.role, "name": peer.name, "tls": tls.folder, "fingerprint": peer.fingerprint.hex()}
    )


@app.command(epilog=exits(ConfigError, CertificateError, PeerError))
def revoke(
    tls: OperatorTlsOption,
    address: AddressOption,
    thirdparty: NameOption = "directory",
    certificate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|FINGERPRINT", help="Certificate to revoke, or its SHA-256. May be repeated."
        ),
    ] = None,
    participant: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Id of a participant, 64 hexadecimal digits. May be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke certificates and participants, at once and for good."""
    from coterie.net.credentials import TlsFiles

    peer = _third_party(address, thirdparty)
    certificates = [_certificate_digest(text) for text in certificate or ()]
    participants = [_digest(text, "a participant's id") for text in participant or ()]
    if not certificates and not participants:
        raise typer.BadParameter("nothing to revoke: give --certificate or --participant")
    revision = asyncio.run(_revoke(TlsFiles(tls), peer, participants, certificates))
    output = Output("certs revoke", as_json=as_json)
    output.say(
        f"revoked {len(certificates)} certificates and {len(participants)} participants "
        f"from revision {revision} of the directory"
    )
    output.finish(
        {"revision": revision, "certificates": len(certificates), "participants": len(participants)}
    )


@app.command("rotate-graph", epilog=exits(ConfigError, CertificateError, PeerError))
def rotate_graph(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of the run, as `coterie operate` shows it.")],
    tls: OperatorTlsOption,
    address: AddressOption,
    thirdparty: NameOption = "directory",
    as_json: JsonOption = False,
) -> None:
    """Have the key of a run's graph expansion replaced.

    Hosts make the key of the next epoch before they publish or ask again, and their users publish anew under it.
    What was published under old keys tells nothing of the new one. The same again, before they have, changes nothing.
    """
    from coterie.crypto.authority import validate_name
    from coterie.net.credentials import TlsFiles

    validate_name(run)
    peer = _third_party(address, thirdparty)
    epoch = asyncio.run(_rotate_graph(TlsFiles(tls), peer, run))
    output = Output("certs rotate-graph", as_json=as_json)
    output.say(
        f"the graph key of {run} is replaced by that of epoch {epoch} before hosts publish or ask again"
    )
    output.finish({"run": run, "epoch": epoch})


@app.command("roster-key", epilog=exits(CertificateError))
def roster_key(
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="File for the key, mode 0600; FILE.pub gets its public half.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Make the operator's key for signing rosters.

    The key decides who may hold the secret of encrypted sums: keep it where no service runs. Its public half, FILE.pub,
    goes to every party that checks rosters, and into the third party's state folder as roster.pub.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from coterie.crypto.identity import save_signing_key
    from coterie.crypto.roster import save_roster_key

    public = out.with_name(f"{out.name}.pub")
    for file in (out, public):
        if file.exists():
            raise CertificateError(
                f"{file} is there already",
                hint="rosters signed by another key are refused; remove it, or choose another file with --out",
            )
    key = Ed25519PrivateKey.generate()
    save_signing_key(out, key)
    save_roster_key(public, key.public_key().public_bytes_raw())
    output = Output("certs roster-key", as_json=as_json)
    output.say(f"key    {out} (keep it offline)", f"public {public} (for every client and the third party)")
    output.finish({"key": out, "public": public, "roster_key": key.public_key().public_bytes_raw().hex()})


@app.command("operator-key", epilog=exits(CertificateError))
def operator_key(
    out: Annotated[Path, typer.Option(metavar="FILE", help="File for the key, mode 0600.")],
    as_json: JsonOption = False,
) -> None:
    """Make an operator's key, which signs the plans of runs.

    Every party has the public half among its operator_keys, and takes part in no run that none of them signed.
    `coterie bootstrap` makes a key of its own; this command makes one for a second operator, or to replace it.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from coterie.crypto.identity import save_signing_key
    from coterie.crypto.operator_key import public_text

    if out.exists():
        raise CertificateError(f"{out} is there already", hint="remove it, or choose another file with --out")
    key = Ed25519PrivateKey.generate()
    save_signing_key(out, key)
    public = public_text(key)
    output = Output("certs operator-key", as_json=as_json)
    output.say(
        f"key    {out} (`signs` of the operator)", f"public {public} (for `operator_keys` of every party)"
    )
    output.finish({"key": out, "public": public})


@app.command("oidc-nonce", epilog=exits(ConfigError, CertificateError))
def oidc_nonce(
    state: Annotated[
        Path, typer.Option(metavar="FOLDER", help="State folder of the client host; made if it is not there.")
    ],
    issuer: Annotated[
        str | None, typer.Option(metavar="URL", help="The issuer, to be told the name of the client host.")
    ] = None,
    subject: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The subject at the issuer, as its claim `sub` says.")
    ] = None,
    device: Annotated[
        int, typer.Option(metavar="N", min=1, max=99, help="Number of the device of this subject.")
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Print the nonce of an ID token that enrols a client host.

    The nonce names the key in the state folder, which is made when absent, so that the token enrols no other. Put the
    token into the file that `enrol.token_file` names. With --issuer and --subject the name of the host is printed, too.
    """
    from coterie.crypto.authority import load_tls_key, new_tls_key, save_tls_key
    from coterie.crypto.id_tokens import id_token_nonce, subject_name
    from coterie.net.credentials import TlsFiles

    if (issuer is None) != (subject is None):
        raise ConfigError("the name follows from --issuer and --subject together, and one is missing")
    tls = TlsFiles(state / "tls")
    if not tls.key.exists():
        try:
            tls.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise CertificateError(f"cannot make {tls.folder}: {error.strerror}") from error
        save_tls_key(tls.key, new_tls_key())
    nonce = id_token_nonce(load_tls_key(tls.key).public_key())
    name = None if issuer is None or subject is None else subject_name(issuer, subject, device)
    output = Output("certs oidc-nonce", as_json=as_json)
    output.say(f"nonce {nonce}")
    if name is not None:
        output.say(f"name  {name}")
    output.finish({"nonce": nonce, "key": tls.key, "name": name})


@app.command(epilog=exits(ConfigError))
def password(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Password file; made if it is not there.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the person.")],
    as_json: JsonOption = False,
) -> None:
    """Set a person's password for an open page.

    Such a page is reached from other machines, as by `coterie run --page`. Asks for the password twice on a terminal,
    and else reads it as a line of standard input. The file holds a hash of it and is for its owner alone; a line of the
    same name is replaced.
    """
    from coterie.web.passwords import save_password

    if sys.stdin.isatty():
        given = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        given = sys.stdin.readline().rstrip("\n")
    save_password(file, name, given)
    output = Output("certs password", as_json=as_json)
    output.say(f"{file} has a password of {name}")
    output.finish({"file": file, "name": name})


@app.command(epilog=exits(CertificateError, CryptoError))
def roster(
    key: Annotated[
        Path, typer.Option(metavar="FILE", help="File with the operator's key, made by `roster-key`.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="File for the roster; an existing one is replaced.")
    ],
    member: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Id of a participant, 64 hexadecimal digits. May be repeated."),
    ] = None,
    members: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with further ids, one a line.")
    ] = None,
    run: Annotated[
        str, typer.Option(metavar="RUN", help="Id of the run that the roster is for. Absent: every run.")
    ] = "",
    purpose: Annotated[
        str, typer.Option(metavar="WORDS", help="Kind of secret that the members may be sent.")
    ] = "paillier",
    days: Annotated[
        float, typer.Option(metavar="DAYS", min=0.001, help="Validity of the roster, days.")
    ] = 90.0,
    as_json: JsonOption = False,
) -> None:
    """Sign a roster, the list of who may hold a shared key.

    The shared key is the Paillier key of encrypted sums; its holders can read contributions under it. Put the roster
    beside the configuration of each member and of every party that encrypts. `coterie certs participants` prints ids.
    """
    from coterie.crypto.authority import validate_name
    from coterie.crypto.identity import load_signing_key
    from coterie.crypto.roster import Roster

    if run:
        validate_name(run)
    ids = [_digest(text, "a participant's id") for text in (*(member or ()), *_lines(members))]
    if not ids:
        raise typer.BadParameter("nobody to list: give --member or --members")
    issued = int(time.time())
    signed = Roster.sign(
        load_signing_key(key), ids, issued, issued + max(1, int(days * 86400)), purpose=purpose, run=run
    )
    signed.save(out)
    output = Output("certs roster", as_json=as_json)
    output.say(
        f"roster of {len(ids)} participants for {purpose}, {f'run {run}' if run else 'every run'}, "
        f"in {out}, valid for {days:g} days"
    )
    output.finish(
        {
            "file": out,
            "purpose": purpose,
            "run": run,
            "members": [one.hex() for one in signed.members],
            "issued": signed.issued,
            "expiry": signed.expiry,
        }
    )


@app.command(epilog=exits(CertificateError))
def participants(
    state: Annotated[Path, typer.Argument(metavar="FOLDER", help="State folder of an enrolled party.")],
    as_json: JsonOption = False,
) -> None:
    """Print the ids of a party's participants, one a line.

    For a host that holds the key of encrypted sums, its id as a key holder comes last.
    """
    from coterie.net.enrolment import saved_bundles

    ids = [bundle.participant_id.hex() for bundle in saved_bundles(state)]
    output = Output("certs participants", as_json=as_json)
    output.say(*ids)
    output.finish({"participants": ids})


def _lines(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        return file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise CertificateError(f"cannot read {file}: {error}") from error


def _third_party(address: str, name: str) -> Peer:
    """Return the third party that options name."""
    from coterie.config.base import Peer

    return _checked(
        Peer, {"address": "--address", "name": "--thirdparty"}, {"address": address, "name": name}
    )


async def _revoke(tls: TlsFiles, peer: Peer, participants: list[bytes], certificates: list[bytes]) -> int:
    from coterie.wire.v1.thirdparty_pb2 import RevokeRequest, RevokeResponse
    from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryStub

    request = RevokeRequest(participants=participants, certificates=certificates)

    async def revoke(channel: Channel) -> RevokeResponse:
        response: RevokeResponse = await channel.stub(lambda inner: KeyDirectoryStub(inner)).Revoke(request)
        return response

    return (await _asked(tls, peer, revoke)).revision


async def _rotate_graph(tls: TlsFiles, peer: Peer, run: str) -> int:
    from coterie.wire.v1.expansion_pb2 import ReplaceGraphKeyRequest, ReplaceGraphKeyResponse
    from coterie.wire.v1.expansion_pb2_grpc import GraphExpansionStub

    request = ReplaceGraphKeyRequest(run_id=run)

    async def replace(channel: Channel) -> ReplaceGraphKeyResponse:
        stub: Any = channel.stub(lambda inner: GraphExpansionStub(inner))
        response: ReplaceGraphKeyResponse = await stub.ReplaceGraphKey(request)
        return response

    return (await _asked(tls, peer, replace)).epoch


async def _asked(tls: TlsFiles, peer: Peer, ask: Callable[[Channel], Awaitable[T]]) -> T:
    """Return what the third party answers an operator."""
    import grpc

    from coterie.crypto.authority import logical_name
    from coterie.net.channel import connect
    from coterie.net.meter import Meter
    from coterie.net.retry import Retry
    from coterie.net.status import from_rpc_error

    channel = connect(
        peer.address,
        tls.channel_credentials(),
        tls_name=logical_name("thirdparty", peer.name),
        peer=f"thirdparty/{peer.name}",
        meter=Meter(),
    )
    try:
        return await Retry(limit_s=10.0)(lambda: ask(channel))
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, channel.peer) from error
    finally:
        await channel.close()


def _checked(model: type[M], options: Mapping[str, str], values: Mapping[str, Any]) -> M:
    """Return validated settings; an error names the option that gave the wrong value."""
    from pydantic import ValidationError

    from coterie.config.key_paths import expectation_at

    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        option = options.get(str(first["loc"][0]), str(first["loc"][0]))
        if first["type"] == "value_error":
            raise ConfigError(f"{option} {first['ctx']['error']}") from error
        expected = expectation_at(model, first["loc"]) or first["msg"]
        raise ConfigError(f"{option} {first['input']!r}: expected {expected}") from error


def _fingerprint(pem: bytes) -> str:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    return x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex()


def _certificate_digest(text: str) -> bytes:
    path = Path(text)
    if not path.is_file():
        return _digest(text, "a certificate's fingerprint, or a file")
    try:
        return bytes.fromhex(_fingerprint(path.read_bytes()))
    except ValueError as error:
        raise CertificateError(f"{path} is no certificate in PEM") from error


def _digest(text: str, what: str) -> bytes:
    try:
        digest = bytes.fromhex(text.replace(":", ""))
    except ValueError:
        digest = b""
    if len(digest) != _DIGEST_BYTES:
        raise CertificateError(
            f"{text[:80]!r} is not {what}, expected {2 * _DIGEST_BYTES} hexadecimal digits"
        )
    return digest
