"""Messages that nobody should send: drawn from the contract's descriptors, some of them then damaged byte by byte.

What is drawn depends on the seed and the number of the message alone, so that each can be made again.
"""

import hashlib
import random
import struct
from dataclasses import dataclass

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor

CANARY = b"CANARY-4fe1"
"""Stands in fields of bytes, where what is private is; no answer and no line of a log may hold it."""

NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    100,
    1000,
    65_536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53,
    2**63 - 1,
    2**64 - 1,
    -1,
    -(2**31),
    -(2**63),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "",
    "x",
    "run",
    "\u0000",
    "\u202e\u00e9\U0001f600",
    "../../etc/passwd",
    "'; DROP TABLE runs; --",
    "a" * 64,
    "%s%n{0}",
    "{}",
    '{"a":1}',
)
RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
ENDING = {"hold_ms": (0, 0, 1, 5)}
"""Fields that would make a call last: only little of it."""


@dataclass
class Known:
    """True values of the services, by the name of the field, which make a message almost right."""

    values: dict[str, tuple]
    """Value of a field by its name, or by ``Message.field``; then no other value is drawn."""


class Draw:
    """Draws one message.

    Parameters
    ----------
    seed : str
    known : Known
    """

    def __init__(self, seed, known):
        self.rng = random.Random(seed)
        self.known = known

    def payload(self, method):
        """Return the messages of a request as bytes: one, or several of a stream."""
        rng = self.rng
        count = rng.choice((0, 1, 1, 2, 3)) if method.client_streaming else 1
        parts = [self.message(method.input_type).SerializeToString() for _ in range(count)]
        return [self.damaged(part) if rng.random() < 0.4 else part for part in parts]

    def message(self, descriptor, depth=0):
        found = message_factory.GetMessageClass(descriptor)()
        rng = self.rng
        if descriptor.name == "Tensor" and rng.random() < 0.7:
            return self.tensor(found)
        for field in descriptor.fields:
            if rng.random() < (0.15 if depth < 4 else 0.9):
                continue
            self.fill(found, field, depth)
        if descriptor.name == "Chunk" and rng.random() < 0.8:
            found.offset, found.last = 0, True
        if descriptor.name == "SubmitRequest" and rng.random() < 0.8:
            found.chunk.data = self.submitted()
            found.chunk.offset, found.chunk.last = 0, True
            found.sha256 = hashlib.sha256(found.chunk.data).digest()
        return found

    def submitted(self):
        """Return what might be the payload of a submission."""
        submissions = self.known.values["submissions"]
        data = self.message(self.rng.choice(submissions)).SerializeToString()
        return self.damaged(data) if self.rng.random() < 0.3 else data

    def tensor(self, found):
        rng = self.rng
        rows, columns = rng.choice((0, 1, 2, 3)), rng.choice((1, 2, 3, 4))
        found.dtype = rng.choice((1, 1, 1, 3, 3, 2, 4))
        found.shape.extend([rows] if rng.random() < 0.5 else [rows, columns])
        size = {1: 4, 2: 8, 3: 4, 4: 1}[found.dtype]
        length = size
        for axis in found.shape:
            length *= axis
        kind = {1: "f", 2: "d", 3: "I", 4: "B"}[found.dtype]
        drawn = [rng.choice(FLOATS[:6] if kind in "fd" else NUMBERS[:6]) for _ in range(length // size)]
        found.data = struct.pack(
            f"<{len(drawn)}{kind}",
            *(1.0 if abs(one) > 1e30 else one for one in drawn) if kind in "fd" else drawn,
        )
        if rng.random() < 0.2:
            found.data += CANARY
        return found

    def fill(self, found, field, depth):
        rng = self.rng
        if field.is_repeated:
            held = getattr(found, field.name)
            for _ in range(rng.choice((0, 1, 1, 2, 5)) if depth < 4 else 0):
                if field.message_type is not None:
                    held.append(self.message(field.message_type, depth + 1))
                else:
                    held.append(self.value(field))
        elif field.message_type is not None:
            if depth < 5:
                getattr(found, field.name).CopyFrom(self.message(field.message_type, depth + 1))
        else:
            setattr(found, field.name, self.value(field))

    def value(self, field):
        rng, known = self.rng, self.known.values
        kind = {FieldDescriptor.TYPE_BYTES: bytes, FieldDescriptor.TYPE_STRING: str}.get(field.type, int)
        exact = known.get(f"{field.containing_type.name}.{field.name}")
        if exact is not None:
            return rng.choice(exact)
        near = [one for one in known.get(field.name, ()) if isinstance(one, kind)]
        if near and rng.random() < 0.8:
            return rng.choice(near)
        if field.name in ENDING:
            return rng.choice(ENDING[field.name])
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_ENUM:
                return rng.choice([*(one.number for one in field.enum_type.values), 99])
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                drawn = rng.choice(FLOATS)
                return drawn if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE or abs(drawn) < 1e38 else 0.5
            case FieldDescriptor.CPPTYPE_STRING:
                if field.type == FieldDescriptor.TYPE_BYTES:
                    return rng.choice(
                        (
                            b"",
                            CANARY,
                            rng.randbytes(32),
                            rng.randbytes(64),
                            rng.randbytes(12),
                            CANARY * 3,
                            rng.randbytes(200),
                        )
                    )
                return rng.choice(TEXTS)
            case _:
                least, most = RANGES[field.cpp_type]
                return rng.choice([one for one in NUMBERS if least <= one <= most])

    def damaged(self, data):
        """Return bytes with a few of them changed."""
        rng, data = self.rng, bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(6):
                case 0:
                    data[at : at + 1] = bytes([rng.randrange(256)])
                case 1:
                    del data[at:]
                case 2:
                    data[at:at] = rng.randbytes(rng.randrange(1, 9))
                case 3:
                    data[at:at] = data[: rng.randrange(len(data) + 1)]
                case 4:
                    # A length that is not there, or a number without end.
                    data[at:at] = b"\xff" * rng.choice((1, 5, 10, 11))
                case 5:
                    # Messages in messages in messages.
                    data = bytearray(b"\x0a" + bytes([min(len(data), 127)]) + data)
        return bytes(data[: 1 << 18])
