"""The orientation in a file's EXIF block: the only metadata that is read, and the only one that is kept.

Pillow's reader logs each broken entry, and one block can have 65,535 of them.
"""

import struct

_TAG = 0x0112
_SHORT, _LONG = 3, 4
_MAX_ENTRIES = 1000  # cameras write about 30 into the first directory, sorted by tag
_PREFIX = b"Exif\0\0"
_HEAD_BYTES = 8
_ENTRY_BYTES = 12
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}

UPRIGHT = 1
SIDEWAYS = (5, 6, 7, 8)


def read_orientation(block: bytes | memoryview) -> int:
    """Return the orientation of an EXIF block, 1 to 8; upright if there is none or the block is damaged."""
    exif = memoryview(block)
    if bytes(exif[: len(_PREFIX)]) == _PREFIX:  # in JPEGs, and in the WebPs of some encoders
        exif = exif[len(_PREFIX) :]
    order = _BYTE_ORDERS.get(bytes(exif[:4]))
    if order is None or len(exif) < _HEAD_BYTES:
        return UPRIGHT
    (directory,) = struct.unpack_from(f"{order}I", exif, 4)
    if directory + 2 > len(exif):
        return UPRIGHT
    (entries,) = struct.unpack_from(f"{order}H", exif, directory)
    for index in range(min(entries, _MAX_ENTRIES)):
        at = directory + 2 + index * _ENTRY_BYTES
        if at + _ENTRY_BYTES > len(exif):
            break
        tag, kind, count = struct.unpack_from(f"{order}HHI", exif, at)
        if tag == _TAG and kind in (_SHORT, _LONG) and count == 1:
            (value,) = struct.unpack_from(f"{order}{'H' if kind == _SHORT else 'I'}", exif, at + 8)
            return value if 1 <= value <= 8 else UPRIGHT
    return UPRIGHT


def orientation_block(orientation: int) -> bytes:
    """Return an EXIF block, without prefix, that holds nothing but the orientation."""
    head = struct.pack(">4sIH", b"MM\0*", _HEAD_BYTES, 1)
    return head + struct.pack(">HHIHHI", _TAG, _SHORT, 1, orientation, 0, 0)
