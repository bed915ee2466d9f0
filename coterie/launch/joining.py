"""Joining of a federation by invitation: a party lays out its folder, makes its keys there, and enrols."""

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
"""Keys of paths that joining creates itself; no file of these is copied from beside the invitation."""
_LATER = ("encryption.roster", "expansion.roster", "latents.roster")
"""Keys of files that may be missing at joining: a roster names parties that have joined, so it comes later."""
_DIALLED = ("cos", "data-owner")
_PORT = 7443
_METRICS = "127.0.0.1:9464"
_DIAGNOSIS_S = 5.0

Enrol = Callable[[Any, TlsFiles], Awaitable[None]]
"""Enrolment of a service: called with its settings and the files for its key and certificate."""


@dataclass(frozen=True)
class Joined:
    """The result of joining: a party's configuration and certificate."""

    config: Path
    """File of the party's configuration."""
    settings: Any
    """The configuration, loaded and validated."""
    tls: TlsFiles
    """The party's key and certificate."""
    copied: tuple[str, ...]
    """Names of the configured files that are in the folder now, copied from beside the invitation."""
    missing: tuple[Path, ...] = ()
    """Configured files that have to be added before the party can serve."""


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

    After an interruption the same invitation with the same folder continues the enrolment.

    Parameters
    ----------
    invitation : Invitation
    source : Path
        Folder of the invitation's file, in which the files that the invitation names are looked for.
    into : Path
        The party's folder: new, empty, or left by an interrupted enrolment with this invitation.
    enrol : callable
        Enrols a service of this role.
    sets : sequence of str
        The party's own ``key=value`` settings, which override the invitation.
    timeout_s : float
        How long to try to reach the third party, seconds.

    Raises
    ------
    ConfigError
        Invitation and ``sets`` make no valid configuration, or a file that the invitation names is missing.
    PreflightError
        The folder holds other files, or cannot be written.
    CertificateError
        The invitation is not valid now, or the third party refuses it.
    PeerError
        The third party cannot be reached, or another party answers at its address.
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
    """Return the settings of an invitation as lines ``key = value``, for people to read before they accept it."""
    return [f"{key} = {value}" for key, value in _flat(invitation.settings)]


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _values(invitation: Invitation, timeout_s: float) -> dict[str, Any]:
    """Return an invited party's configuration, with paths relative to its folder."""
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
    """Make the folder, or check that it is empty or holds this invitation's token; remove a new one on failure."""
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
    """Yield key and file name of each file that the invitation names."""
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
    """Return the configuration to write, with paths from ``--set`` made absolute."""
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
        # A hint about tokens would mislead here: the party needs another invitation.
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
