"""Small volumes in memory, for services whose disk is to be full."""

import contextlib
import os
import subprocess

import pytest


@contextlib.contextmanager
def small_volume(folder, size):
    """Mount a volume of a fixed size in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a volume in memory needs the rights of root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder):
    """Write a file until nothing more fits; return it."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        room = os.statvfs(folder)
        # Most of it at once, and the rest in pieces that leave no room for anything.
        with contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, room.f_bavail - 16) * room.f_frsize)
        file.seek(0, os.SEEK_END)
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(512))
    return ballast
