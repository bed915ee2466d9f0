"""Record of a run's life in its folder: when it began, whether it still goes on, how it ended, and the data it read.

The launcher writes ``run.json`` before anything else and again at the end, and holds a lock on the folder meanwhile.
A record that says "running" while nobody holds the lock is that of a launcher that was killed.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coterie.config.run import RunSettings
from coterie.data.whole_file import whole_file
from coterie.errors import CoterieError, DataError, RunError
from coterie.process.runtime import alone_in, in_use
from coterie.studies.saved_settings import SAVED_SETTINGS

__all__ = ["RUN_RECORD", "Ending", "RunRecord", "changed_file", "files_of", "kept_record", "now", "recorded"]

RUN_RECORD = "run.json"
"""Name of the file, in the folder of the run."""

_FORMAT = 1

Ending = Literal["running", "finished", "failed", "interrupted"]


class RunRecord(BaseModel):
    """Content of ``run.json``."""

    model_config = ConfigDict(frozen=True)

    format: int = _FORMAT
    run_id: str
    coterie: str = Field(default_factory=lambda: importlib.metadata.version("coterie"))
    """Version that began the run."""
    in_process: bool = False
    started: str
    """ISO 8601, UTC."""
    taken_up: tuple[str, ...] = ()
    """Times at which an interrupted run was taken up."""
    ended: str = ""
    status: Ending = "running"
    reason: str = ""
    """Message of the error with which a run failed."""
    files: dict[str, str] = {}
    """SHA-256 of each file that the run reads, by absolute path."""

    def again(self) -> RunRecord:
        """Return the record of the run as it is taken up now."""
        changed = {"taken_up": (*self.taken_up, now()), "ended": "", "status": "running", "reason": ""}
        return self.model_copy(update=changed)

    def write(self, folder: Path) -> None:
        """Write the record into the folder of the run."""
        with whole_file(folder / RUN_RECORD) as beside:
            beside.write_text(self.model_dump_json(indent=1))


def kept_record(folder: Path) -> RunRecord | None:
    """Return the record of a run's folder; None for runs of releases that kept none.

    Raises
    ------
    RunError
        The record cannot be read, or a newer release wrote it.
    """
    path = folder / RUN_RECORD
    try:
        content = json.loads(path.read_bytes())
        if isinstance(content, dict) and isinstance(made := content.get("format"), int) and made > _FORMAT:
            raise RunError(
                f"{path} is of format {made}; this release of Coterie reads {_FORMAT}",
                hint=f"the run is of Coterie {content.get('coterie', 'of a later release')}: use that release",
            )
        return RunRecord.model_validate(content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, ValidationError) as error:
        raise RunError(f"{path} is no record of a run: {error}") from error


def now() -> str:
    """Return the present time, ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


@contextlib.contextmanager
def recorded(record: RunRecord, folder: Path) -> Iterator[None]:
    """Keep a run's record while it goes on, and write how it ended.

    Parameters
    ----------
    record : RunRecord
    folder : Path
        Folder of the run, which exists.

    Raises
    ------
    RunError
        Another process works on the run.
    """
    if in_use(folder):
        raise RunError(f"run {record.run_id} is still going", hint=f"another process works in {folder}")
    with alone_in(folder):
        record.write(folder)
        status, reason = "interrupted", ""
        try:
            yield
            status = "finished"
        except CoterieError as error:
            status, reason = "failed", error.message
            raise
        except Exception as error:
            status, reason = "failed", f"unexpected {type(error).__name__}: {error}"
            raise
        finally:
            ended: dict[str, Any] = {"status": status, "reason": reason, "ended": now()}
            # A full disk must not hide the error that it caused.
            with contextlib.suppress(OSError):
                record.model_copy(update=ended).write(folder)


# --- files that a run reads --------------------------------------------------------------------------------------


def files_of(settings: RunSettings) -> dict[str, str]:
    """Return the SHA-256 of each file that the settings of a run name, by absolute path.

    Of a folder these are all files directly in it and one floor below, without those of runs in it.

    Raises
    ------
    DataError
        A file cannot be read.
    """
    return {str(file): _sha256(file) for file in _files(settings)}


def changed_file(record: RunRecord, settings: RunSettings) -> str | None:
    """Return what has become of the files of a run since it began, in words; None while all are as they were.

    Parameters
    ----------
    record : RunRecord
    settings : RunSettings
        Settings of the run, with absolute paths.

    Raises
    ------
    DataError
        A file cannot be read.
    """
    for name, digest in record.files.items():
        path = Path(name)
        if not path.is_file():
            return f"{path} is gone"
        if _sha256(path) != digest:
            return f"{path} has changed"
    if not record.files:
        return None
    for path in _files(settings):
        # Beside runs other things come and go, such as exports.
        if str(path) not in record.files and path.parent != settings.output.absolute():
            return f"{path} is new"
    return None


def _files(settings: RunSettings) -> Iterator[Path]:
    """Yield the absolute paths of the files that settings name."""
    runs = settings.output.absolute()
    for path in _named(settings.model_copy(update={"output": None})):
        whole = path.absolute()
        if whole.is_file():
            yield whole
            continue
        for file in sorted({*whole.glob("*"), *whole.glob("*/*")}):
            beside_runs = file.parent == runs != whole
            of_run = file.parent != whole and file.parent.parent == runs and _is_run(file.parent)
            if file.is_file() and not beside_runs and not of_run:
                yield file


def _is_run(folder: Path) -> bool:
    """Whether a folder among the runs is one of a run; its files come and go."""
    return any((folder / name).exists() for name in (RUN_RECORD, SAVED_SETTINGS))


def _named(value: Any) -> Iterator[Path]:
    """Yield the paths in settings."""
    match value:
        case Path():
            yield value
        case BaseModel():
            for name in type(value).model_fields:
                yield from _named(getattr(value, name))
        case tuple() | list():
            for one in value:
                yield from _named(one)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
