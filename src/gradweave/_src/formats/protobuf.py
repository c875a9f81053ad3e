"""Protocol buffers' wire format, as far as writing needs it: no schema compiler, no dependency."""

from collections.abc import Iterable

VARINT, LENGTH_DELIMITED = 0, 2


def varint(number: int) -> bytes:
    """Encode a number with seven bits to a byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:  # noqa: PLR2004
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def number_field(field: int, number: int) -> bytes:
    """Encode a field with a whole number that is not negative, a Boolean or an enum's value."""
    return varint(field << 3 | VARINT) + varint(number)


def numbers_field(field: int, numbers: Iterable[int]) -> bytes:
    """Encode a repeated number, packed as version 3 writes it; nothing where there is none."""
    packed = b"".join(map(varint, numbers))
    return bytes_field(field, packed) if packed else b""


def text_field(field: int, text: str) -> bytes:
    return bytes_field(field, text.encode())


def bytes_field(field: int, content: bytes) -> bytes:
    """Encode a field with bytes, or with a message inside of another one."""
    return varint(field << 3 | LENGTH_DELIMITED) + delimited(content)


def delimited(message: bytes) -> bytes:
    """Return the message with its length before it, as messages stand in a stream."""
    return varint(len(message)) + message
