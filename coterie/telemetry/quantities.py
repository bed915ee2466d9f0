"""Formatting of numbers for reports: few digits, a unit, and a dash for a value that was not measured."""

from __future__ import annotations

import math
from numbers import Real

__all__ = [
    "ABSENT",
    "MINUS",
    "count",
    "duration",
    "finite",
    "measure",
    "percent",
    "signed",
    "significant",
    "volume",
]

ABSENT = "\N{EN DASH}"
"""Text in place of a number that the report does not hold."""
MINUS = "\N{MINUS SIGN}"


def finite(value: object) -> float | None:
    """Return the value as a float; None when it is no finite number.

    A value that was not measured may be absent, null or NaN in a report; all three mean the same.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def count(value: object) -> str:
    """Return a number as text, rounded to a whole number, with separators of thousands.

    >>> count(100000)
    '100,000'
    """
    number = finite(value)
    return ABSENT if number is None else _minus(f"{round(number):,}")


def significant(value: object, digits: int = 3) -> str:
    """Return a number as text with ``digits`` significant digits, never in exponent form.

    >>> significant(0.012345), significant(1234.5), significant(2.0)
    ('0.0123', '1,234', '2.00')
    """
    number = finite(value)
    if number is None:
        return ABSENT
    if number == 0:
        return "0"
    # The exponent after rounding: 9.999 has one more digit before the point than its logarithm says.
    exponent = int(f"{number:.{digits - 1}e}".partition("e")[2])
    decimals = max(0, digits - 1 - exponent)
    return _minus(f"{number:,.{min(decimals, 9)}f}")


def measure(value: object) -> str:
    """Return a metric as text, with four decimals below 10 and two from there.

    >>> measure(0.21344), measure(12.3456)
    ('0.2134', '12.35')
    """
    number = finite(value)
    if number is None:
        return ABSENT
    decimals = 4 if abs(number) < 10 else 2
    return _minus(f"{number:,.{decimals}f}")


def signed(value: object, digits: int = 3) -> str:
    """Return a difference as text, with its sign and ``digits`` decimals.

    >>> signed(0.13), signed(-0.5, 1), signed(-0.0001)
    ('+0.130', '−0.5', '0.000')
    """
    number = finite(value)
    if number is None:
        return ABSENT
    text = f"{number:+.{digits}f}"
    return text[1:] if not text.strip("+-0.") else _minus(text)


def percent(share: object) -> str:
    """Return a share as a percentage, with two decimals below 10% and one below 100%.

    >>> percent(0.01523), percent(0.257), percent(1.0)
    ('1.52%', '25.7%', '100%')
    """
    number = finite(share)
    if number is None:
        return ABSENT
    points = 100 * number
    if abs(points) < 10:
        return _minus(f"{points:.2f}%") if points else "0%"
    return _minus(f"{points:.1f}%" if abs(points) < 99.95 else f"{points:.0f}%")


def volume(size: object) -> str:
    """Return a number of bytes as text in the decimal unit that fits.

    >>> volume(999), volume(67_200_000)
    ('999 B', '67.2 MB')
    """
    number = finite(size)
    if number is None:
        return ABSENT
    for unit in ("B", "kB", "MB", "GB"):
        # 999.5 would be rounded to "1,000", so it belongs to the next unit.
        if abs(number) < 999.5:
            return f"{count(number) if unit == 'B' else significant(number)} {unit}"
        number /= 1000
    return f"{significant(number)} TB"


def duration(seconds: object) -> str:
    """Return a duration as text in one or two units that fit.

    >>> duration(0.0042), duration(12.34), duration(252), duration(3840)
    ('4.20 ms', '12.3 s', '4 min 12 s', '1 h 04 min')
    """
    number = finite(seconds)
    if number is None:
        return ABSENT
    if number == 0:
        return "0 s"
    if abs(number) < 0.9995:
        return f"{significant(1000 * number)} ms"
    if abs(number) < 59.95:
        return f"{significant(number)} s"
    sign, whole = (MINUS if number < 0 else ""), round(abs(number))
    if whole < 3600:
        return f"{sign}{whole // 60} min {whole % 60:02d} s"
    minutes = round(whole / 60)
    return f"{sign}{minutes // 60} h {minutes % 60:02d} min"


def _minus(text: str) -> str:
    return text.replace("-", MINUS)
