"""Download of a published data set from its publisher, with verification and unpacking."""

from __future__ import annotations

import hashlib
import http.client
import re
import stat
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, Protocol

from coterie.errors import DataError, nearest

__all__ = ["PUBLISHED", "Opener", "Publication", "Readable", "fetch"]

_TIMEOUT_S = 30.0
_LARGEST_ARCHIVE = 64 << 20
_LARGEST_UNPACKED = 512 << 20
_LARGEST_CHECKSUM = 4096
_CHUNK = 1 << 16
_MD5 = re.compile(r"\b[0-9a-fA-F]{32}\b")


@dataclass(frozen=True)
class Publication:
    """A published data set: its address, digest and proof of a complete folder.

    Parameters
    ----------
    url : str
        Address of the zip archive, whose one folder has the data set's name.
    md5 : str or None
        Published digest of an archive that does not change; None for one that does: it is read from ``<url>.md5``.
    proof : str
        A file of the data set, whose presence shows that a folder is complete.
    """

    url: str
    md5: str | None
    proof: str


_GROUPLENS = "https://files.grouplens.org/datasets/movielens"

PUBLISHED = {
    "ml-100k": Publication(f"{_GROUPLENS}/ml-100k.zip", "0e33842e24a9c977be4e0107933c0723", "u.data"),
    "ml-1m": Publication(f"{_GROUPLENS}/ml-1m.zip", "c4d9eecfca2ab87c1945afe126590906", "ratings.dat"),
    "ml-latest-small": Publication(f"{_GROUPLENS}/ml-latest-small.zip", None, "ratings.csv"),
}
"""Data sets that can be fetched, by name.

Publishers offer MD5, which detects broken downloads; TLS authenticates the sender.
"""


class Readable(Protocol):
    """A response body."""

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes, none at the end."""
        ...


Opener = Callable[[str, float], AbstractContextManager[Readable]]
"""Opens a URL with a timeout in seconds; raises OSError where it cannot."""


def fetch(
    name: str,
    target: Path,
    *,
    url: str | None = None,
    md5: str | None = None,
    opener: Opener | None = None,
) -> Path:
    """Download, verify and unpack a data set, unless it is already there.

    Parameters
    ----------
    name : str
        One of `PUBLISHED`.
    target : Path
        Folder that gets the folder ``name``; made if it does not exist.
    url : str, optional
        Another address of the same archive, ``https`` only.
    md5 : str, optional
        Expected digest of the archive, 32 hexadecimal digits, instead of the published one.
    opener : callable, optional
        How a URL is opened; by default over HTTPS with verified certificates.

    Returns
    -------
    Path
        ``target / name``.

    Raises
    ------
    DataError
        Unknown name, no network, an archive that is too large, differs from its checksum or would write
        outside its folder; says how to place the files by hand.
    """
    publication = PUBLISHED.get(name)
    if publication is None:
        guess = nearest(name, PUBLISHED)
        raise DataError(
            f"data set {name!r} cannot be fetched; expected one of {', '.join(PUBLISHED)}",
            hint=f"did you mean {guess!r}?" if guess else None,
        )
    folder = target / name
    if (folder / publication.proof).is_file():
        return folder
    if folder.exists():
        raise DataError(
            f"{folder} exists without {publication.proof}; expected no such folder, or a complete one"
        )
    source = url or publication.url
    if urllib.parse.urlsplit(source).scheme != "https":
        raise DataError(f"{source!r} is no https address; expected https://...")
    if md5 is not None and not _MD5.fullmatch(md5):
        raise DataError(f"md5 is {md5!r}; expected 32 hexadecimal digits")
    opener = opener or _open_https
    by_hand = f"download {source} elsewhere and unpack it so that {folder / publication.proof} exists"
    target.mkdir(parents=True, exist_ok=True)
    # Within the target, so that the last step is a rename on one file system and a folder appears whole.
    with tempfile.TemporaryDirectory(dir=target, prefix=".fetch-") as scratch:
        archive = Path(scratch) / "archive.zip"
        expected = md5 or publication.md5 or _published_md5(f"{source}.md5", opener, by_hand)
        found = _download(source, archive, opener, by_hand)
        if found != expected.lower():
            raise DataError(
                f"{source} has MD5 {found}; expected {expected.lower()}", hint="fetch again, or " + by_hand
            )
        unpacked = Path(scratch) / "unpacked"
        _unpack(archive, unpacked, source)
        if not (unpacked / name / publication.proof).is_file():
            raise DataError(
                f"{source} does not hold {name}/{publication.proof}; expected the archive of {name}"
            )
        (unpacked / name).rename(folder)
    return folder


class _HttpsRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but never to an address without TLS."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if urllib.parse.urlsplit(newurl).scheme != "https":
            raise urllib.error.URLError(f"redirected to {newurl!r}, which is no https address")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open_https(url: str, timeout: float) -> AbstractContextManager[Readable]:
    # Not urlopen: it would also serve file:, ftp: and http: addresses.
    director = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPSHandler(),
        _HttpsRedirects(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        director.add_handler(handler)
    response: AbstractContextManager[Readable] = director.open(url, timeout=timeout)
    return response


def _published_md5(url: str, opener: Opener, by_hand: str) -> str:
    try:
        with opener(url, _TIMEOUT_S) as response:
            text = response.read(_LARGEST_CHECKSUM).decode("ascii", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"cannot read the checksum {url}: {error}", hint=f"give the MD5 of the archive, or {by_hand}"
        ) from error
    if (found := _MD5.search(text)) is None:
        raise DataError(f"{url} holds no MD5; expected 32 hexadecimal digits", hint=by_hand)
    return found[0].lower()


def _download(url: str, path: Path, opener: Opener, by_hand: str) -> str:
    """Write what the URL holds to a file and return its MD5."""
    digest = hashlib.md5(usedforsecurity=False)
    size = 0
    try:
        with opener(url, _TIMEOUT_S) as response, path.open("wb") as file:
            while chunk := response.read(_CHUNK):
                size += len(chunk)
                if size > _LARGEST_ARCHIVE:
                    raise DataError(
                        f"{url} is larger than {_LARGEST_ARCHIVE >> 20} MiB; expected the archive"
                    )
                digest.update(chunk)
                file.write(chunk)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"cannot download {url}: {error}", hint=by_hand) from error
    return digest.hexdigest()


def _unpack(archive: Path, folder: Path, source: str) -> None:
    """Extract regular files only, within the folder only, up to a total size counted while they unpack."""
    left = _LARGEST_UNPACKED
    try:
        with zipfile.ZipFile(archive) as content:
            for member in content.infolist():
                if member.is_dir():
                    continue
                path = _safe_path(member, folder, source)
                path.parent.mkdir(parents=True, exist_ok=True)
                with content.open(member) as packed, path.open("xb") as file:
                    left -= _copied(packed, file, left, source)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise DataError(f"{source} is no readable zip archive: {error}") from error
    except FileExistsError as error:
        raise DataError(f"{source} holds {error.filename!r} twice; expected each file once") from error


def _safe_path(member: zipfile.ZipInfo, folder: Path, source: str) -> Path:
    inside = PurePosixPath(member.filename)
    mode = member.external_attr >> 16
    if (
        inside.is_absolute()
        or ".." in inside.parts
        or "\\" in member.filename
        or ":" in member.filename
        or (stat.S_IFMT(mode) not in (0, stat.S_IFREG))
    ):
        raise DataError(f"{source} holds {member.filename!r}; expected plain files inside one folder")
    return folder.joinpath(*inside.parts)


def _copied(packed: IO[bytes], file: BinaryIO, limit: int, source: str) -> int:
    """Copy at most ``limit`` bytes and return how many: the sizes in the archive's index may lie."""
    size = 0
    while chunk := packed.read(_CHUNK):
        size += len(chunk)
        if size > limit:
            raise DataError(
                f"{source} unpacks to more than {_LARGEST_UNPACKED >> 20} MiB; expected the data set"
            )
        file.write(chunk)
    return size
