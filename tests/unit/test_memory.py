"""Return of freed memory by the C library, seen from inside a process of its own."""

import ctypes
import subprocess
import sys

import pytest

from coterie.process.memory import return_freed_memory

GLIBC = hasattr(ctypes.CDLL(None), "mallopt")

HEAPS = """
import ctypes, sys, tempfile, threading
from coterie.process.memory import return_freed_memory

if sys.argv[1] == "settled":
    assert return_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
together = threading.Barrier(6)


def work():
    together.wait()
    assert libc.malloc(1000)
    together.wait()


threads = [threading.Thread(target=work) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with tempfile.NamedTemporaryFile() as file:
    libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
    libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.fclose.argtypes = [ctypes.c_void_p]
    stream = libc.fopen(file.name.encode(), b"w")
    assert libc.malloc_info(0, stream) == 0
    libc.fclose(stream)
    print(file.read().count(b"<heap "))
"""

FREED = """
import sys
from coterie.process.memory import return_freed_memory


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


if sys.argv[1] == "settled":
    assert return_freed_memory()
# A large block that is freed lets the limits of the usual settings rise.
block = bytearray(24 << 20)
del block
before = resident()
blocks = [bytearray(b"x") * (2 << 20) for _ in range(20)]
assert resident() - before > 30 << 20
blocks.clear()
print(resident() - before)
"""

WRITTEN = """
import os, resource
from coterie.process.memory import return_freed_memory
from coterie.wire.v1 import orchestrator_pb2 as wire

assert return_freed_memory()
payload = os.urandom(179_000)


def write():
    message = wire.SubmitRequest()
    message.chunk.data = payload
    message.more.add().chunk.data = payload
    message.SerializeToString()


for _ in range(5):
    write()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    write()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 20)
"""
"""Pages that are taken anew for each message of two contributions that is written."""


def printed(program, setting):
    done = subprocess.run(
        [sys.executable, "-c", program, setting], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout)


@pytest.mark.skipif(not GLIBC, reason="the C library has no such settings")
def test_threads_share_two_heaps_instead_of_having_one_each():
    assert printed(HEAPS, "settled") <= 2
    assert printed(HEAPS, "usual") > 2


@pytest.mark.skipif(not GLIBC, reason="the C library has no such settings")
def test_large_blocks_go_back_to_the_system_also_after_larger_ones():
    assert printed(FREED, "settled") < 2 << 20
    assert printed(FREED, "usual") > 20 << 20


@pytest.mark.skipif(not GLIBC, reason="the C library has no such settings")
def test_messages_of_contributions_are_written_one_after_the_other_into_the_same_pages():
    assert printed(WRITTEN, "settled") < 20


def test_another_c_library_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert return_freed_memory() is False
