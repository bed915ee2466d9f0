"""As much of protobuf's binary form as the protocol needs: messages as dicts, by tables of their fields.

A table maps a name to ``(number, kind)``.  Kinds: ``uint``, ``int``, ``bool``, ``bytes``, ``text``, ``float``,
``double``, ``one of`` (bytes that may be absent), ``[uint]``, ``[int]``, ``[text]``, ``[bytes]``, a table (a message
that may be absent), or a list with one table (many messages).
"""

import struct


class Malformed(Exception):  # noqa: N818 - says what the bytes are
    """Bytes that are no message."""


def write(table, message):
    """Return a message as bytes: fields by ascending number, what has its default left out."""
    unknown = message.keys() - table.keys()
    if unknown:
        raise KeyError(f"no such fields: {unknown}")
    found = b""
    for name, (number, kind) in sorted(table.items(), key=lambda entry: entry[1][0]):
        value = message.get(name)
        if not value and not (kind == "one of" and value is not None) and not isinstance(kind, dict):
            continue
        if value is None:
            continue
        if kind in ("uint", "int", "bool"):
            found += _varint(number << 3) + _varint(int(value))
        elif kind in ("bytes", "one of"):
            found += _delimited(number, value)
        elif kind == "text":
            found += _delimited(number, value.encode("utf-8"))
        elif kind == "float":
            found += _varint(number << 3 | 5) + struct.pack("<f", value)
        elif kind == "double":
            found += _varint(number << 3 | 1) + struct.pack("<d", value)
        elif kind in ("[uint]", "[int]"):
            found += _delimited(number, b"".join(_varint(each) for each in value))
        elif kind == "[text]":
            found += b"".join(_delimited(number, each.encode("utf-8")) for each in value)
        elif kind == "[bytes]":
            found += b"".join(_delimited(number, each) for each in value)
        elif isinstance(kind, list):
            found += b"".join(_delimited(number, write(kind[0], each)) for each in value)
        else:
            found += _delimited(number, write(kind, value))
    return found


def read(table, data):
    """Return the message that bytes are; every field of the table is there, unknown ones are skipped."""
    by_number = {number: (name, kind) for name, (number, kind) in table.items()}
    message = {name: _default(kind) for name, (_, kind) in table.items()}
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise Malformed("field 0")
        value, at = _read_value(data, at, wire)
        if number in by_number:
            name, kind = by_number[number]
            message[name] = _converted(kind, wire, value, message[name])
    return message


def _default(kind):
    if isinstance(kind, dict) or kind == "one of":
        return None
    if isinstance(kind, list) or kind.startswith("["):
        return []
    return {"bytes": b"", "text": "", "bool": False, "float": 0.0, "double": 0.0}.get(kind, 0)


def _converted(kind, wire, value, held):
    expected = {"uint": 0, "int": 0, "bool": 0, "float": 5, "double": 1}
    if isinstance(kind, list):
        return [*held, read(kind[0], _bytes(wire, value))]
    if isinstance(kind, dict):
        found = read(kind, _bytes(wire, value))
        if held is None:
            return found
        # A message that comes twice is merged; nobody sends it so.
        raise Malformed("a message twice")
    if kind in ("[uint]", "[int]"):
        if wire == 0:
            return [*held, _number(kind[1:-1], value)]
        packed, at, found = _bytes(wire, value), 0, list(held)
        while at < len(packed):
            each, at = _read_varint(packed, at)
            found.append(_number(kind[1:-1], each))
        return found
    if kind == "[text]":
        return [*held, _text(_bytes(wire, value))]
    if kind == "[bytes]":
        return [*held, _bytes(wire, value)]
    if kind in ("bytes", "one of"):
        return _bytes(wire, value)
    if kind == "text":
        return _text(_bytes(wire, value))
    if wire != expected[kind]:
        raise Malformed(f"wire type {wire} for {kind}")
    if kind == "bool":
        return bool(value)
    if kind in ("float", "double"):
        return struct.unpack("<f" if kind == "float" else "<d", value)[0]
    return _number(kind, value)


def _number(kind, value):
    return value - (1 << 64) if kind == "int" and value >= 1 << 63 else value


def _bytes(wire, value):
    if wire != 2:
        raise Malformed(f"wire type {wire} for bytes")
    return value


def _text(value):
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise Malformed("text that is no UTF-8") from None


def _varint(value):
    value &= (1 << 64) - 1
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def _delimited(number, value):
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _read_varint(data, at):
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise Malformed("a number that does not end")
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value & ((1 << 64) - 1), at


def _read_value(data, at, wire):
    if wire == 0:
        return _read_varint(data, at)
    if wire == 2:
        length, at = _read_varint(data, at)
    elif wire in (1, 5):
        length = 8 if wire == 1 else 4
    else:
        raise Malformed(f"wire type {wire}")
    if at + length > len(data):
        raise Malformed("a field that is cut off")
    return bytes(data[at : at + length]), at + length
