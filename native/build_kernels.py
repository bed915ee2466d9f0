"""Describes the extension module `coterie_native._kernels` to cffi: its declarations are those of ``c/kernels.h``."""

import os
from pathlib import Path

from cffi import FFI

_HERE = Path(__file__).parent

_WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Wno-sign-conversion",
    "-Wno-unused-parameter",
    "-Wno-psabi",
]

# No option names this machine's processor: every way is compiled, and chosen where it runs.  -std=c11 alone would keep
# products and sums apart, and the gradients' fused multiply-add instructions unused; nothing here reads errno.
OPTIONS = ["-O3", "-std=c11", "-ffp-contract=fast", "-fno-math-errno"]

ffibuilder = FFI()
ffibuilder.cdef((_HERE / "c" / "kernels.h").read_text().split("/* begin */")[1].split("/* end */")[0])
ffibuilder.set_source(
    "coterie_native._kernels",
    '#include "kernels.h"',
    sources=["c/masks.c", "c/ncf.c", "c/quantise.c", "c/steps.c"],
    include_dirs=["c"],
    libraries=["m"],
    depends=["c/kernels.h", "c/masks_way.h", "c/ncf_way.h", "c/quantise_way.h", "c/steps.h"],
    extra_compile_args=[*OPTIONS, *_WARNINGS, *os.environ.get("COTERIE_NATIVE_CFLAGS", "").split()],
    extra_link_args=os.environ.get("COTERIE_NATIVE_LDFLAGS", "").split(),
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
