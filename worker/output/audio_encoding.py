"""Files of sounds, and their waveforms as thumbnails."""

import itertools
from dataclasses import dataclass
from io import BytesIO

import av
import numpy as np
import numpy.typing as npt
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from PIL import Image

from shared.job import Job
from shared.tasks import OutputFormat
from worker.engine.outputs import Audio
from worker.output.image_encoding import SOFTWARE, parameters_json

WAVEFORM_SIZE = (512, 128)
_WAVE_COLOUR = (99, 102, 241, 255)

_CONTAINERS = {
    OutputFormat.WAV: ("wav", "pcm_s16le", "s16"),
    OutputFormat.FLAC: ("flac", "flac", "s16"),
    OutputFormat.MP3: ("mp3", "libmp3lame", "fltp"),
    OutputFormat.OPUS: ("ogg", "libopus", "flt"),
}
_RATES = {  # that a codec takes; others take any
    OutputFormat.MP3: (44100, 48000, 32000, 24000, 22050, 16000, 12000, 11025, 8000),
    OutputFormat.OPUS: (48000,),  # as every player decodes it
}
_BITRATES = {  # kbit/s of two channels, from the lowest quality to the highest
    OutputFormat.MP3: (64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    OutputFormat.OPUS: (32, 48, 64, 80, 96, 112, 128, 160, 192, 256),
}


@dataclass(frozen=True)
class SoundFile:
    """A file of a sound, and a PNG of its waveform."""

    data: bytes
    waveform: bytes
    duration_s: float
    sample_rate: int
    channels: int
    waveform_size: tuple[int, int] = WAVEFORM_SIZE


def encode_audio(sound: Audio, job: Job, index: int) -> SoundFile:
    """Return sound `index` of `job`, with the job's parameters when `job.embed_parameters` is set.

    It has the model's sample rate, or the next one that the format has, and at most two channels. Samples of WAV and
    FLAC have 16 bits.
    """
    form, file = job.output_format, BytesIO()
    container_name, codec, sample_format = _CONTAINERS[form]
    samples = sound.samples[:2]
    rates = _RATES.get(form, (sound.rate,))
    rate = sound.rate if sound.rate in rates else min((one for one in rates if one > sound.rate), default=max(rates))
    layout = "mono" if len(samples) == 1 else "stereo"
    with av.open(file, "w", format=container_name) as container:
        if job.embed_parameters:
            container.metadata.update({"comment": parameters_json(job, index), "encoded_by": SOFTWARE})
        stream: AudioStream = container.add_stream(codec, rate=rate)  # type: ignore[assignment]
        stream.codec_context.layout = layout
        if form in _BITRATES:
            stream.codec_context.bit_rate = bitrate(form, job.output_quality, len(samples))
        resampler = AudioResampler(
            format=sample_format, layout=layout, rate=rate, frame_size=stream.codec_context.frame_size or None
        )
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=layout)
        frame.sample_rate = sound.rate
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return SoundFile(file.getvalue(), waveform(samples), sound.duration_s, rate, len(samples))


def bitrate(form: OutputFormat, quality: int, channels: int) -> int:
    """Return bits per second for a quality of 1 to 100: 90 is hard to tell from the original."""
    rates = _BITRATES[form]
    return 1000 * rates[min(len(rates) - 1, quality * len(rates) // 101)] // (2 if channels == 1 else 1)


def waveform(samples: npt.NDArray[np.float32]) -> bytes:
    """Return a transparent PNG of the loudness over time: each column from its lowest to its highest sample."""
    width, height = WAVEFORM_SIZE
    edges = np.linspace(0, samples.shape[-1], width + 1).astype(int)
    rows = np.arange(height)[:, None]
    lowest, highest = np.zeros(width), np.zeros(width)
    for column, (start, end) in enumerate(itertools.pairwise(edges)):
        part = samples[:, start : max(end, start + 1)]
        lowest[column], highest[column] = (part.min(), part.max()) if part.size else (0.0, 0.0)
    middle = (height - 1) / 2
    filled = (rows >= np.floor(middle - highest * middle)) & (rows <= np.ceil(middle - lowest * middle))
    pixels = np.zeros((height, width, 4), np.uint8)
    pixels[filled] = _WAVE_COLOUR
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return file.getvalue()
