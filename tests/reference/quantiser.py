"""From values to codes and back (docs/spec/contributions.md); single precision is made from double."""

import math
import struct

from .primitives import Refused

MODULUS = 1 << 32


def single(value):
    """Return the IEEE 754 single precision number nearest to a value."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def levels(segment):
    """Return the largest absolute quantised value."""
    return (1 << (segment["bits"] - 1)) - 1


def size(segments):
    """Return the length of the vector."""
    return sum(math.prod(one["shape"]) for one in segments)


def quantise(values, segment, draws):
    """Return centred codes, and how many values were clipped.

    The product of two single precision numbers, rounded to double and then to single precision, is their product
    rounded once: double precision has more than twice the digits.  What is left after the whole part is exact in both.
    """
    most = levels(segment)
    nearest = single if segment["bits"] <= 16 else float
    factor = nearest(most / segment["bound"])
    found, clipped = [], 0
    for value, draw in zip(values, draws, strict=True):
        scaled = nearest(nearest(value) * factor)
        if not math.isfinite(scaled):
            raise Refused("a value that is no finite number")
        if abs(scaled) > most:
            clipped += 1
            if not segment["clip"]:
                raise Refused("a value beyond its bound")
        below = math.floor(scaled)
        found.append(max(-most, min(most, below + (scaled - below > draw))))
    return found, clipped


def codes(steps, segments, users):
    """Return the vector of codes of so many users, from the sum of their centred codes."""
    found, at = [], 0
    for one in segments:
        offset = 1 << (one["bits"] - 1)
        for _ in range(math.prod(one["shape"])):
            found.append((steps[at] + users * offset) % MODULUS)
            at += 1
    return found


def decode(total, segments, users):
    """Return the values of a sum over so many users, by segment; refuses a sum that cannot be."""
    found, at = {}, 0
    for one in segments:
        offset, most = 1 << (one["bits"] - 1), levels(one)
        values = []
        for _ in range(math.prod(one["shape"])):
            code = total[at]
            if not users <= code <= users * (2 * most + 1):
                raise Refused("an impossible sum")
            values.append((code - users * offset) * (one["bound"] / most))
            at += 1
        found[one["name"]] = values
    return found
