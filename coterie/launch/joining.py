"""A party joins a federation by an invitation: its folder is laid out, its keys are made in it, and it enrols."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from coterie.config.load import Loaded, load, tree_of
from coterie.config.operate import OperateSettings
from coterie.config.services import settings_model
from coterie.crypto.keyfile import write_private_file
from coterie.errors import CertificateError, ConfigError, PeerError, PreflightError
from coterie.launch.children import toml
from coterie.launch.invitation import Invitation
from coterie.launch.preflight_trust import check_enrolment
from coterie.net.credentials import TlsFiles

__all__ = ["CONFIG", "Joined", "join", "reads"]

CONFIG = "config.toml"
"""Name of a party's configuration in its folder."""

_TOKEN = "token"  # noqa: S105 - the name of a file
_AUTHORITY = "ca.pem"
_OWN = ("state", "output", "enrol.ca_file", "enrol.token_file")
"""Paths of a configuration that are made here, and not brought."""
_LATER = ("encryption.roster",)
"""Files that may come after a party has joined: a roster names those who have."""
_DIALLED = ("cos", "data-owner")
_PORT = 7443
_METRICS = "127.0.0.1:9464"
_DIAGNOSIS_S = 5.0

Enrol = Callable[[Any, TlsFiles], Awaitable[None]]
"""What a service does to enrol: its settings, and where its key and certificate go."""


@dataclass(frozen=True)
class Joined:
    """A party that has joined."""

    config: Path
    """Its configuration."""
    settings: Any
    """What that says."""
    tls: TlsFiles
    """Its key and certificate."""
    copied: tuple[str, ...]
    """Names of the files that were taken from beside the invitation."""
    missing: tuple[Path, ...] = ()
    """Files that have to come before the party can serve."""


async def join(
    invitation: Invitation,
    source: Path,
    into: Path,
    enrol: Enrol,
    *,
    sets: Sequence[str] = (),
    timeout_s: float = 60.0,
) -> Joined:
    """Lay out a party's folder, make its keys there, and enrol.

    Where an enrolment was interrupted, the same invitation into the same folder goes on with it.

    Parameters
    ----------
    invitation : Invitation
    source : Path
        Folder of the invitation's file, where the files that it names are looked for.
    into : Path
        The party's folder: new, empty, or of an enrolment by this invitation.
    enrol : callable
        How a service of this role enrols.
    sets : sequence of str
        ``key=value`` of the party's own, stronger than the invitation.
    timeout_s : float
        How long to try to reach the third party, seconds.

    Raises
    ------
    ConfigError
        What the invitation and ``sets`` say makes no configuration, or a file that it names is missing.
    PreflightError
        The folder is in use, or cannot be written.
    CertificateError
        The invitation does not hold, or the third party refuses it.
    PeerError
        The third party cannot be reached, or is another one.
    """
    invitation.check_time(time.time())
    values = _values(invitation, timeout_s)
    _settings(invitation.role, None, values, sets)  # before anything is written
    with _laid_out(into, invitation):
        loaded = _settings(invitation.role, into, values, sets)
        brought = dict(_brought(loaded, into))
        _require(brought, source, into)
        for name in brought.values():
            if not (into / name).exists() and (source / name).exists():
                shutil.copyfile(source / name, into / name)
                (into / name).chmod(0o600)
        write_private_file(into / CONFIG, toml(_written(loaded, values, sets)).encode())
        write_private_file(into / _AUTHORITY, invitation.authority.encode())
        write_private_file(into / _TOKEN, f"{invitation.token}\n".encode())
    settings = loaded.settings
    tls = TlsFiles(into / "state" / "tls")
    tls.folder.parent.mkdir(exist_ok=True, mode=0o700)
    await _enrol(invitation, settings, tls, enrol)
    held = (into / "state" / "directory.key").read_bytes()
    if held.hex() != invitation.directory_key:
        raise CertificateError(
            "the directory that answered is not the one that signed the invitation",
            hint=f"remove {into}, and {invitation.ask_again}",
        )
    names = sorted(set(brought.values()))
    missing = tuple(into / name for name in names if not (into / name).exists())
    copied = tuple(name for name in names if into / name not in missing)
    return Joined(into / CONFIG, settings, tls, copied, missing)


def reads(invitation: Invitation) -> list[str]:
    """Return what an invitation sets, a line each, for people to read before they rely on it."""
    return [f"{key} = {value}" for key, value in _flat(invitation.settings)]


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _values(invitation: Invitation, timeout_s: float) -> dict[str, Any]:
    """Return the configuration as the invitation has it, paths from the party's folder."""
    if invitation.role == "operator":
        own = {"state": "state", "output": "report"}
    else:
        # Nobody dials a user's device or a key holder; the others listen on every address.
        host = "0.0.0.0" if invitation.role in _DIALLED else "127.0.0.1"  # noqa: S104
        own = {"state": "state", "listen": f"{host}:{_PORT}", "metrics": _METRICS}
    enrol = {
        "address": invitation.enrol_address,
        "name": invitation.enrol_name,
        "ca_file": _AUTHORITY,
        "token_file": _TOKEN,
        "timeout_s": timeout_s,
    }
    return {"name": invitation.name, **own, **invitation.settings, "enrol": enrol}


def _settings(role: str, folder: Path | None, values: Mapping[str, Any], sets: Sequence[str]) -> Loaded[Any]:
    model: type[BaseModel] = OperateSettings if role == "operator" else settings_model(role)
    return load(model, None, sets=sets, environ={}, relative_to=folder, base=values)


@contextlib.contextmanager
def _laid_out(folder: Path, invitation: Invitation) -> Iterator[None]:
    """Make the folder, or check that it is this party's; remove it again when nothing came of it."""
    token = folder / _TOKEN
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        empty = not any(folder.iterdir())
        same = not empty and token.is_file() and token.read_bytes().strip() == invitation.token.encode()
    except OSError as error:
        raise PreflightError(f"cannot use the folder {folder}: {error.strerror}") from error
    if not empty and not same:
        raise PreflightError(
            f"the folder {folder} is not empty, and not of this invitation",
            hint="give every party a folder of its own, which need not exist",
        )
    try:
        yield
    except BaseException as error:
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise PreflightError(f"cannot write {error.filename}: {error.strerror}") from error
        raise


def _brought(loaded: Loaded[Any], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield key and name of the files that the invitation names."""
    for key, value in loaded.values.items():
        if isinstance(value, Path) and loaded.origin[key] == "file" and key not in _OWN:
            name = value.relative_to(folder) if value.is_relative_to(folder) else value
            if len(name.parts) != 1 or name.is_absolute() or name.parts[0] == "..":
                raise ConfigError(
                    f"the invitation names the file {key} = {str(name)!r}, expected a name alone"
                )
            yield key, str(name)


def _require(brought: Mapping[str, str], source: Path, into: Path) -> None:
    for key, name in brought.items():
        if key not in _LATER and not (into / name).exists() and not (source / name).is_file():
            raise ConfigError(
                f"the invitation names the file {key} = {name!r}, which is not beside it in {source}",
                hint=f"put it there, or name another: --set {key}=PATH",
            )


def _written(loaded: Loaded[Any], values: Mapping[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """Return the configuration to keep: paths of the party's own no longer depend on where it was called."""
    tree = tree_of(values, sets)
    for key, value in loaded.values.items():
        if isinstance(value, Path) and loaded.origin[key] == "--set":
            place: Any = tree
            *above, last = [int(part) if part.isdecimal() else part for part in key.split(".")]
            for part in above:
                place = place[part]
            place[last] = str(value.absolute())
    return tree


async def _enrol(invitation: Invitation, settings: Any, tls: TlsFiles, enrol: Enrol) -> None:
    try:
        await enrol(settings, tls)
    except CertificateError as error:
        # What is to be done about a token is said of an invitation here.
        hint = invitation.ask_again if "token" in error.message else error.hint
        raise CertificateError(error.message, hint=hint) from error
    except PeerError as error:
        if type(error) is not PeerError:
            raise
        finding = await check_enrolment(settings.enrol, _DIAGNOSIS_S)
        if finding.status != "fail":
            raise
        raise PeerError(
            f"{invitation.party} cannot enrol: {finding.problem}",
            hint="is the third party started, the address right, and no firewall between? "
            "Then the same command goes on where it was",
        ) from error
