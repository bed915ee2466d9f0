"""A store of objects at an address of ``fsspec``: S3 and the like, or a folder that machines share.

An object is written once, under a name that nobody had before, and read back before its writer names it anywhere: no
service, also one that another has replaced, can change what another one wrote.  Every call runs in a thread of its own
and has a time limit, so that a store that hangs holds nobody up.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from coterie.errors import ConfigError, StoreError
from coterie.store.trouble import trouble_of

__all__ = ["ObjectAddress", "ObjectStore", "Stored", "age_s", "object_name"]

T = TypeVar("T")

_MOST_HANGING = 8
"""Calls that a store has not answered in time, and that may still do so, after which no more are made."""
_FOLDERS = ("sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs", "arrow_hdfs", "webdav")
"""Protocols beside files whose folders have to be made."""
_MADE = re.compile(r"-([0-9a-f]{12})-[0-9a-f]{16}$")
_SECRET = re.compile(r"SECRET|KEY|TOKEN|PASS|CREDENTIAL|CONNECTION|SAS|FSSPEC")
_LEAST_SECRET = 6
_SAID = 200
"""Characters of a store's own error that are repeated."""


class Stored(NamedTuple):
    """An object as a row of the database names it."""

    name: str
    """Its path below the store's address."""
    size: int
    sha256: bytes


@dataclass(frozen=True)
class ObjectAddress:
    """Address of a store of objects.

    Parameters
    ----------
    url : str
        ``PROTOCOL://PLACE/FOLDER`` with a protocol of fsspec, without a password.
    options_file : Path, optional
        A JSON object with options of the protocol's implementation, such as an endpoint or keys.
    timeout_s : float
        Longest time for one call of the store, seconds.
    """

    url: str
    options_file: Path | None = None
    timeout_s: float = 60.0

    def open(self) -> ObjectStore:
        """Return the store; nothing is asked of it yet.

        Raises
        ------
        ConfigError
            The URL or the options cannot be used, or a package is not installed.
        """
        protocol = self._protocol()
        options = self._options()
        try:
            import fsspec
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ConfigError(
                "a store of objects (objects.url) needs the package fsspec", hint="install coterie[objects]"
            ) from error
        try:
            fsspec.get_filesystem_class(protocol)
            # Listings must not be those of before, as another machine writes, too.
            system, root = url_to_fs(
                self.url, **{"use_listings_cache": False, "skip_instance_cache": True, **options}
            )
        except ImportError as error:
            raise ConfigError(
                f"objects.url begins with {protocol}://, which needs another package: {error}",
                hint="install the implementation of fsspec that this names, such as s3fs, gcsfs or adlfs",
            ) from error
        except ValueError as error:
            if "not known" not in str(error):
                raise ConfigError("objects.url or its options cannot be used: " + _type(error)) from None
            raise ConfigError(
                f"objects.url begins with {protocol}://, which fsspec does not know",
                hint="file:///FOLDER, s3://BUCKET/FOLDER, gs://BUCKET/FOLDER and abfs://CONTAINER/FOLDER are known",
            ) from None
        except Exception as error:
            # Errors of implementations may repeat their options.
            raise ConfigError("objects.url or its options cannot be used: " + _type(error)) from None
        return ObjectStore(system, root.rstrip("/"), self.url, self.timeout_s, _secrets_in(options))

    def _protocol(self) -> str:
        # Errors never repeat the URL: it may hold a password.
        expected = "PROTOCOL://PLACE/FOLDER is expected, such as s3://BUCKET/FOLDER or file:///FOLDER"
        try:
            parts = urlsplit(self.url)
            # A password with a slash ends the place early: its beginning then is no port.
            secret = parts.password is not None or parts.port == -1
        except ValueError:
            raise ConfigError("objects.url is no URL", hint=expected) from None
        if secret or parts.query or parts.fragment:
            raise ConfigError(
                "objects.url holds a password or a query, which then stand in configurations and process lists",
                hint="leave them out: name a JSON file of mode 0600 as objects.options_file, or use the environment",
            )
        if not parts.scheme or not (parts.netloc or parts.path) or "::" in self.url:
            raise ConfigError("objects.url is no URL", hint=expected)
        if parts.scheme in ("file", "local") and (parts.netloc or not parts.path.startswith("/")):
            raise ConfigError(
                "objects.url names no folder of this machine", hint="file:///FOLDER is expected"
            )
        if parts.scheme == "memory":
            raise ConfigError("objects.url names a store that ends with its process", hint=expected)
        return parts.scheme

    def _options(self) -> dict[str, Any]:
        if self.options_file is None:
            return {}
        try:
            options = json.loads(self.options_file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or _type(error)
            raise ConfigError(f"cannot read objects.options_file {self.options_file}: {reason}") from error
        except ValueError:
            # The decoder's error would be raised with the content.
            raise ConfigError(f"objects.options_file {self.options_file} is no JSON") from None
        if not isinstance(options, dict):
            raise ConfigError(
                f"objects.options_file {self.options_file} is no JSON object",
                hint='{"KEY": VALUE} is expected',
            )
        return options


class _NoFolderError(Exception):
    """The folder of a store of files is not there."""


class ObjectStore:
    """Objects below one address, each written once.

    Parameters
    ----------
    system : fsspec.AbstractFileSystem
    root : str
        Path of the store within the file system.
    url : str
        The store's address, for messages; without secrets.
    timeout_s : float
        Longest time for one call, seconds.
    secrets : collection of str
        What no message may repeat.
    """

    def __init__(self, system: Any, root: str, url: str, timeout_s: float, secrets: Collection[str]) -> None:
        self._system = system
        self._root = root
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._secrets = secrets
        self._hanging = 0
        self._lock = threading.Lock()

    def named(self, name: str) -> str:
        """Return the full address of an object."""
        return f"{self._url}/{name}"

    async def put(self, name: str, content: bytes) -> Stored:
        """Write an object under a name that nobody had before, and read it back.

        Raises
        ------
        StoreError
            The store is away or full, or gave other bytes back; something may be left under the name.
        """

        def write() -> bytes:
            self._write(self._path(name), content)
            return hashlib.sha256(content).digest()

        stored = Stored(name, len(content), await self._call("write", name, write))
        await self.get(stored)
        return stored

    async def get(self, stored: Stored) -> bytes:
        """Return the content of an object.

        Raises
        ------
        StoreError
            The object is lost or damaged, which is permanent, or the store is away.
        """

        def read() -> tuple[bytes, bytes]:
            self._require_folder()
            content: bytes = self._system.cat_file(self._path(stored.name))
            # Here, as it takes long for a large model.
            return content, hashlib.sha256(content).digest()

        content, sha256 = await self._call("read", stored.name, read)
        if len(content) != stored.size:
            raise self._damaged(stored.name, f"it has {len(content)} bytes, expected {stored.size}")
        if sha256 != stored.sha256:
            raise self._damaged(stored.name, "its content does not have its SHA-256")
        return content

    async def remove(self, name: str) -> None:
        """Remove an object; one that is not there is as good as removed.

        Raises
        ------
        StoreError
            The store is away.
        """

        def remove() -> None:
            try:
                self._system.rm_file(self._path(name))
            except FileNotFoundError:
                return

        await self._call("remove", name, remove)

    async def names(self, folder: str) -> list[str]:
        """Return the names of all objects below a folder.

        Raises
        ------
        StoreError
            The store is away.
        """

        def find() -> list[str]:
            self._system.invalidate_cache()
            try:
                found = self._system.find(self._path(folder))
            except FileNotFoundError:
                return []
            beginning = self._root.lstrip("/") + "/"
            return sorted(path.lstrip("/").removeprefix(beginning) for path in found)

        return await self._call("list", folder, find)

    async def try_out(self) -> None:
        """Write an object, read it, list it and remove it.

        Raises
        ------
        StoreError
            One of these fails.
        """
        name = f"preflight/{secrets.token_hex(8)}"
        try:
            await self.put(name, secrets.token_bytes(64))
            if name not in await self.names("preflight"):
                raise StoreError(f"the store of objects does not list {self.named(name)}, which it has")
        except StoreError:
            with contextlib.suppress(StoreError):
                await self.remove(name)
            raise
        await self.remove(name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _write(self, path: str, content: bytes) -> None:
        local = self._is_local()
        self._require_folder()
        protocols = self._system.protocol
        if local or any(
            one in _FOLDERS for one in ([protocols] if isinstance(protocols, str) else protocols)
        ):
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        if not local:
            self._system.pipe_file(path, content)
            return
        place = Path(path)
        try:
            self._system.pipe_file(path, content)
            # The row that names the object must not be more durable than the object.
            for one in (place, *list(place.parents)[:3]):
                _sync(one)
        except BaseException:
            # On a full disk, a partial file would take the space that is left.
            place.unlink(missing_ok=True)
            raise

    def _is_local(self) -> bool:
        from fsspec.implementations.local import LocalFileSystem

        return isinstance(self._system, LocalFileSystem)

    def _require_folder(self) -> None:
        """Require the folder of a store of files: it is not there while its file system is not mounted."""
        if self._is_local() and not Path(self._root).is_dir():
            raise _NoFolderError

    async def _call(self, what: str, name: str, work: Callable[[], T]) -> T:
        """Run a call of the store in a thread, within the time limit.

        Threads are daemons of their own: one that hangs takes no place of other work, and keeps no process from ending.
        """
        if self._hanging >= _MOST_HANGING:
            raise StoreError(
                f"the store of objects does not answer: {self._hanging} calls to {self._url} hang",
                trouble="away",
            )
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        over = threading.Event()

        def settle(result: T | None, error: Exception | None) -> None:
            if done.cancelled() or done.done():
                return
            if error is None:
                done.set_result(result)  # type: ignore[arg-type]
            else:
                done.set_exception(error)

        def run() -> None:
            result, error = None, None
            try:
                result = work()
            except Exception as failed:
                error = failed
            with self._lock:
                if over.is_set():
                    self._hanging -= 1
                    return
                over.set()
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:
                # The loop has ended: nobody waits any more.
                return

        threading.Thread(target=run, name="objects", daemon=True).start()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await done
        except TimeoutError as error:
            if done.done() and not done.cancelled():
                raise self._failed(what, name, error) from error
            raise StoreError(
                f"the store of objects has not answered for {self._timeout_s:g} s: cannot {what} {self.named(name)}",
                trouble="away",
            ) from error
        except Exception as error:
            raise self._failed(what, name, error) from error
        finally:
            with self._lock:
                # Given up before its end, also by a caller that was cancelled.
                if not over.is_set():
                    over.set()
                    self._hanging += 1

    def _failed(self, what: str, name: str, error: Exception) -> StoreError:
        if isinstance(error, _NoFolderError):
            return StoreError(
                f"the store of objects cannot {what} {self.named(name)}: the folder of objects.url is not there",
                hint="mount its file system, or make the folder",
                trouble="away",
            )
        if isinstance(error, FileNotFoundError) and what == "read":
            return StoreError(
                f"the object {self.named(name)} is lost: the store has none of this name",
                hint=_PUT_BACK,
            )
        trouble, reason = "away", self._said(error)
        if isinstance(error, OSError) and error.errno and error.strerror == os.strerror(error.errno):
            # Implementations put words of their own there, with a number that says little.
            trouble, reason = trouble_of(error) or "away", error.strerror
        told = StoreError(
            f"the store of objects cannot {what} {self.named(name)}: {reason}",
            hint="free space there" if trouble == "full" else None,
            trouble=trouble,
        )
        told.__cause__ = error
        return told

    def _said(self, error: Exception) -> str:
        """Return a store's own words without secrets: addresses with signatures, users and keys may be among them."""
        said = str(error)
        # First, as what follows could leave a part of one.
        for secret in self._secrets:
            said = said.replace(secret, "...")
        said = re.sub(r"://[^/@\s]*@", "://", re.sub(r"\?\S+", "?...", said))
        said = " ".join(said.split())[:_SAID]
        return f"{_type(error)}: {said}" if said else _type(error)

    def _damaged(self, name: str, why: str) -> StoreError:
        return StoreError(f"the object {self.named(name)} is damaged: {why}", hint=_PUT_BACK)


_PUT_BACK = "put it back from a copy or an earlier version of the bucket, or restore database and objects of one moment"


def object_name(folder: str, stem: str) -> str:
    """Return a name in a folder that nobody had before; it says when it was made, and ends in 64 random bits."""
    return f"{folder}/{stem}-{int(time.time()):012x}-{secrets.token_hex(8)}"


def age_s(name: str) -> float | None:
    """Return how long ago a name of `object_name` was made, seconds; None for another name."""
    made = _MADE.search(name)
    return None if made is None else time.time() - int(made[1], 16)


def _secrets_in(options: dict[str, Any]) -> list[str]:
    """Return the values that no message may repeat: those of options, and of credentials in the environment."""
    found = set(_texts(options))
    for name, value in os.environ.items():
        if not _SECRET.search(name.upper()):
            continue
        with contextlib.suppress(ValueError):
            found.update(_texts(json.loads(value)))
        found.add(value)
    return sorted((one for one in found if len(one) >= _LEAST_SECRET), key=len, reverse=True)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)


def _sync(path: Path) -> None:
    held = os.open(path, os.O_RDONLY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def _type(error: BaseException) -> str:
    return type(error).__name__
