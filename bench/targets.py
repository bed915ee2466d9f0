"""Ratios that rows should reach, by class of processor."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["CLASSES", "processor_class", "target"]

CLASSES = ("avx512", "avx2-vaes", "avx2", "arm64", "other")
"""Classes of processors: x86-64 with AVX-512 and VAES, with AVX2 and VAES, with AVX2; arm64; all others."""

# OpenSSL has code of its own for VAES with AVX-512 only, so there is more to gain elsewhere.
_TARGETS: Mapping[str, Mapping[str, float]] = {
    "masked.mask.64k": {"avx512": 7, "avx2-vaes": 7, "avx2": 4.5},
    "masked.mask.1m": {"avx512": 12, "avx2-vaes": 12, "avx2": 10},
    "masked.member.20": dict.fromkeys(CLASSES, 20),
    "masked.unmask.20": dict.fromkeys(CLASSES, 300),
    "masked.member.100": dict.fromkeys(CLASSES, 110),
    "masked.unmask.100": dict.fromkeys(CLASSES, 1200),
}


def processor_class(flags: frozenset[str], architecture: str) -> str:
    """Return the class of a processor.

    Parameters
    ----------
    flags : frozenset of str
        Instruction sets, as the Linux kernel names them.
    architecture : str
        As `platform.machine` returns it.
    """
    if architecture in ("aarch64", "arm64"):
        return "arm64"
    if architecture not in ("x86_64", "AMD64") or "avx2" not in flags:
        return "other"
    if "vaes" not in flags:
        return "avx2"
    return "avx512" if {"avx512f", "avx512bw"} <= flags else "avx2-vaes"


def target(row: str, kind: str) -> float | None:
    """Return the ratio that a row should reach on a class of processors; None where none is set."""
    return _TARGETS.get(row, {}).get(kind)
