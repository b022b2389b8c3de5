"""Formats of input audio: the structure of a file is checked without decoding it, and its metadata are dropped.

Of Ogg files only the pages are read: they keep their comments.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shared.inputs.formats import FormatFault, damaged

MOST_CHANNELS = 8
RATES = (8_000, 192_000)


@dataclass(frozen=True)
class StrippedAudio:
    """A sound file; `content_type` is that of its format."""

    content_type: str
    duration_s: float
    sample_rate: int
    channels: int
    data: bytes


def audio_format(data: bytes) -> str | None:
    """Return the format that the first bytes of a file name, None for any other file."""
    if data.startswith(b"RIFF") and data[8:12] == b"WAVE":
        return "wav"
    if data.startswith(b"fLaC"):
        return "flac"
    if data.startswith(b"OggS"):
        return "ogg"
    is_mp3 = data.startswith(b"ID3") or (len(data) > 2 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2)
    return "mp3" if is_mp3 else None


def strip(data: bytes, kind: str) -> StrippedAudio:
    """Return a sound of a format of `audio_format`, or raise `FormatFault`."""
    try:
        found = _READERS[kind](data)
    except (struct.error, IndexError) as error:
        raise damaged("it ends too early") from error
    if not RATES[0] <= found.sample_rate <= RATES[1]:
        raise FormatFault(f"has {found.sample_rate} samples a second; {RATES[0]} to {RATES[1]} are allowed")
    if not 1 <= found.channels <= MOST_CHANNELS:
        raise FormatFault(f"has {found.channels} channels; 1 to {MOST_CHANNELS} are allowed")
    if found.duration_s <= 0:
        raise FormatFault("has no samples")
    return found


_WAV_BITS = {1: (8, 16, 24, 32, 64), 3: (32, 64)}  # of integers and floats


def _wav(data: bytes) -> StrippedAudio:
    at, form, samples = 12, b"", b""
    while at + 8 <= len(data) and not samples:
        name, size = data[at : at + 4], struct.unpack_from("<I", data, at + 4)[0]
        body = data[at + 8 : at + 8 + size]
        if name == b"fmt ":
            form = body
        elif name == b"data":  # a file that was streamed has no size, or one that is too large
            samples = body
        at += 8 + size + size % 2
    if len(form) < 16:
        raise damaged("it has no format")
    tag, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", form)
    if tag == 0xFFFE and len(form) >= 26:  # extensible: the first two bytes of its GUID
        tag = struct.unpack_from("<H", form, 24)[0]
    if bits not in _WAV_BITS.get(tag, ()) or not rate or block != channels * bits // 8 or not block:
        raise FormatFault("is not plain PCM of integers or floats")
    samples = samples[: len(samples) // block * block]
    body = b"".join((b"fmt ", struct.pack("<I", len(form)), form, b"data", struct.pack("<I", len(samples)), samples))
    file = b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body
    return StrippedAudio("audio/wav", len(samples) / block / rate, rate, channels, file)


_STREAM_INFO, _SEEK_TABLE = 0, 3


def _flac(data: bytes) -> StrippedAudio:
    at, kept, last = 4, list[tuple[int, bytes]](), False
    while not last:
        last, kind = bool(data[at] & 0x80), data[at] & 0x7F
        size = int.from_bytes(data[at + 1 : at + 4], "big")
        body = data[at + 4 : at + 4 + size]
        if len(body) != size:
            raise damaged("a block of metadata ends too early")
        if kind in (_STREAM_INFO, _SEEK_TABLE):
            kept.append((kind, body))
        at += 4 + size
    if not kept or kept[0][0] != _STREAM_INFO or len(kept[0][1]) != 34:
        raise damaged("it has no stream information")
    packed = int.from_bytes(kept[0][1][10:18], "big")
    rate, channels, samples = packed >> 44, (packed >> 41 & 7) + 1, packed & (1 << 36) - 1
    if not samples or not rate:
        raise FormatFault("does not say how long it is")
    blocks = [
        bytes([kind | (0x80 if number == len(kept) - 1 else 0)]) + len(body).to_bytes(3, "big") + body
        for number, (kind, body) in enumerate(kept)
    ]
    return StrippedAudio("audio/flac", samples / rate, rate, channels, b"".join((b"fLaC", *blocks, data[at:])))


_BITRATES = {  # kbit/s of layer III, by version
    1: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_MP3_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}


def _mp3(data: bytes) -> StrippedAudio:
    at = 0
    if data.startswith(b"ID3"):
        size = data[6] << 21 | data[7] << 14 | data[8] << 7 | data[9]
        at = 10 + size + (10 if data[5] & 0x10 else 0)
    start, samples, rate, channels = at, 0, 0, 0
    while (frame := _mp3_frame(data, at)) is not None:
        length, of_frame, rate, channels = frame
        samples += of_frame
        at += length
    if not samples:
        raise damaged("it has no frames of layer III")
    return StrippedAudio("audio/mpeg", samples / rate, rate, channels, data[start:at])


def _mp3_frame(data: bytes, at: int) -> tuple[int, int, int, int] | None:
    """Return length, samples, rate and channels of the frame at a place; None where there is none."""
    head = data[at : at + 4]
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:  # the sync word, and layer III
        return None
    version, bits, rate_index = head[1] >> 3 & 3, head[2] >> 4, head[2] >> 2 & 3
    if version not in _MP3_RATES or bits in (0, 15) or rate_index == 3:
        return None
    is_first, rate = version == 3, _MP3_RATES[version][rate_index]
    samples = 1152 if is_first else 576
    length = samples // 8 * 1000 * _BITRATES[1 if is_first else 2][bits] // rate + (head[2] >> 1 & 1)
    return (length, samples, rate, 1 if head[3] >> 6 == 3 else 2) if at + length <= len(data) else None


_OPUS_RATE = 48_000


def _ogg(data: bytes) -> StrippedAudio:
    at, granule, first = 0, 0, b""
    while data[at : at + 4] == b"OggS":
        lacing = data[at + 27 : at + 27 + data[at + 26]]
        body = at + 27 + len(lacing)
        first = first or data[body : body + sum(lacing)]
        position = struct.unpack_from("<q", data, at + 6)[0]
        granule = max(granule, position)
        at = body + sum(lacing)
    if at > len(data):
        raise damaged("a page ends too early")
    if first.startswith(b"OpusHead"):
        channels, skipped = first[9], struct.unpack_from("<H", first, 10)[0]
        return StrippedAudio("audio/ogg", (granule - skipped) / _OPUS_RATE, _OPUS_RATE, channels, data[:at])
    if first.startswith(b"\x01vorbis"):
        channels, rate = struct.unpack_from("<BI", first, 11)
        return StrippedAudio("audio/ogg", granule / max(1, rate), rate, channels, data[:at])
    raise FormatFault("holds neither Opus nor Vorbis")


_READERS: Mapping[str, Callable[[bytes], StrippedAudio]] = {"wav": _wav, "flac": _flac, "mp3": _mp3, "ogg": _ogg}
