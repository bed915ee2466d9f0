"""A store of objects for tests, on the real disk, whose faults a file in its folder says: it is slow, full or away.

Processes find it as the protocol ``faulty`` once they have imported this module, which `ENVIRONMENT` has them do.
"""

import contextlib
import errno
import json
import os
import time
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

FAULTS = "faults.json"
SECRET = "a key that no log may have"  # pragma: allowlist secret


class FaultyFileSystem(LocalFileSystem):
    """Files below a folder; each call first does what the file of faults beside it says."""

    protocol = ("faulty",)

    def __init__(self, key="", **options):
        super().__init__(**options)
        self.key = key

    @classmethod
    def _strip_protocol(cls, path):
        path = str(path)
        return super()._strip_protocol(path.removeprefix("faulty://"))

    def _fault(self, path, call):
        for folder in Path(path).parents:
            with contextlib.suppress(OSError):
                fault = json.loads((folder / FAULTS).read_text())
                break
        else:
            return
        if call not in fault.get("calls", [call]):
            return
        time.sleep(fault.get("slow_s", 0))
        if fault.get("full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        # As implementations do, with all that they know.
        said = f"no answer from https://user:{self.key}@host/{path}?signature={self.key}"
        if fault.get("away"):
            raise RuntimeError(said)
        if fault.get("broken"):
            # As s3fs does for each error whose kind it does not know.
            raise OSError(errno.EIO, said)

    def pipe_file(self, path, value, **options):
        self._fault(path, "write")
        super().pipe_file(path, value, **options)

    def cat_file(self, path, **options):
        self._fault(path, "read")
        return super().cat_file(path, **options)

    def find(self, path, **options):
        self._fault(path + "/any", "list")
        return [one for one in super().find(path, **options) if not one.endswith(FAULTS)]


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


def set_faults(folder, **faults):
    """Have a store fail in a way from now on; in none without faults.  The file is there whole, or not at all."""
    beside = folder / f"{FAULTS}.new"
    beside.write_text(json.dumps(faults))
    beside.replace(folder / FAULTS)
