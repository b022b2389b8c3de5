"""Tasks of models, what they make, and the formats in which files of it are stored."""

from collections.abc import Mapping
from enum import StrEnum

LATENTS_TYPE = "application/safetensors"
"""Content type of latents."""

VIDEO_TYPES = ("video/mp4", "video/quicktime")
"""Content types of input videos."""

GLB_TYPE = "model/gltf-binary"
"""Content type of meshes."""


class Medium(StrEnum):
    """What a task makes."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"
    MESH = "mesh"


class Task(StrEnum):
    """Tasks of a model. Images with a strength are noised; images to edit condition the model."""

    TEXT_TO_IMAGE = "text_to_image"
    IMAGE_TO_IMAGE = "image_to_image"
    INPAINT = "inpaint"
    EDIT = "edit"
    UPSCALE = "upscale"
    TEXT_TO_VIDEO = "text_to_video"
    IMAGE_TO_VIDEO = "image_to_video"
    VIDEO_TO_VIDEO = "video_to_video"
    EXTEND_VIDEO = "extend_video"
    """The result begins with a video, and goes on from it."""
    UPSCALE_VIDEO = "upscale_video"
    """The result is a video in longer sides."""
    ANIMATE = "animate"
    """The person of an image moves as the one of a video does."""
    TEXT_TO_AUDIO = "text_to_audio"
    AUDIO_TO_AUDIO = "audio_to_audio"
    AUDIO_INPAINT = "audio_inpaint"
    IMAGE_TO_MESH = "image_to_mesh"

    @property
    def medium(self) -> Medium:
        if self in (Task.TEXT_TO_AUDIO, Task.AUDIO_TO_AUDIO, Task.AUDIO_INPAINT):
            return Medium.AUDIO
        if self is Task.IMAGE_TO_MESH:
            return Medium.MESH
        is_video = self.takes_video or self in (Task.TEXT_TO_VIDEO, Task.IMAGE_TO_VIDEO)
        return Medium.VIDEO if is_video else Medium.IMAGE

    @property
    def makes_video(self) -> bool:
        return self.medium is Medium.VIDEO

    @property
    def makes_audio(self) -> bool:
        return self.medium is Medium.AUDIO

    @property
    def makes_mesh(self) -> bool:
        return self.medium is Medium.MESH

    @property
    def takes_image(self) -> bool:
        without = self in (Task.TEXT_TO_IMAGE, Task.TEXT_TO_VIDEO) or (self.takes_video and self is not Task.ANIMATE)
        return not self.makes_audio and not without

    @property
    def takes_video(self) -> bool:
        return self in (Task.VIDEO_TO_VIDEO, Task.EXTEND_VIDEO, Task.UPSCALE_VIDEO, Task.ANIMATE)

    @property
    def takes_audio(self) -> bool:
        return self in (Task.AUDIO_TO_AUDIO, Task.AUDIO_INPAINT)

    @property
    def upscales(self) -> bool:
        return self in (Task.UPSCALE, Task.UPSCALE_VIDEO)

    @property
    def has_strength(self) -> bool:
        return self in (Task.IMAGE_TO_IMAGE, Task.INPAINT, Task.VIDEO_TO_VIDEO, Task.AUDIO_TO_AUDIO)

    @property
    def takes_controls(self) -> bool:
        return self in (Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE, Task.INPAINT)


class OutputFormat(StrEnum):
    PNG = "png"
    JPEG = "jpeg"
    WEBP = "webp"
    MP4 = "mp4"
    WAV = "wav"
    FLAC = "flac"
    MP3 = "mp3"
    OPUS = "opus"
    GLB = "glb"
    LATENT = "latent"
    """Not decoded, for the job that continues; the name is that of diffusers' `output_type`."""

    @property
    def medium(self) -> Medium:
        if self in AUDIO_TYPES:
            return Medium.AUDIO
        if self is OutputFormat.GLB:
            return Medium.MESH
        return Medium.VIDEO if self is OutputFormat.MP4 else Medium.IMAGE

    @property
    def content_type(self) -> str:
        others = {
            OutputFormat.MP4: "video/mp4",
            OutputFormat.GLB: GLB_TYPE,
            OutputFormat.LATENT: LATENTS_TYPE,
            **AUDIO_TYPES,
        }
        return others.get(self, f"image/{self.value}")

    @property
    def suffix(self) -> str:
        """The end of the names of files, after the dot."""
        own = self in AUDIO_TYPES or self is OutputFormat.GLB
        return self.value if own else self.content_type.rpartition("/")[2]

    @property
    def preview_format(self) -> "OutputFormat":
        """Format of previews: that of the image; of all others, the smallest."""
        without = (OutputFormat.MP4, OutputFormat.GLB, OutputFormat.LATENT)
        return OutputFormat.WEBP if self in without else self


AUDIO_TYPES: Mapping[OutputFormat, str] = {
    OutputFormat.WAV: "audio/wav",
    OutputFormat.FLAC: "audio/flac",
    OutputFormat.MP3: "audio/mpeg",
    OutputFormat.OPUS: "audio/ogg",
}
"""Content types of the formats of sounds; Opus is in an Ogg container."""

# Lossless, as PNG is; every player, library and model reads WAV.
DEFAULT_FORMATS: Mapping[Medium, OutputFormat] = {
    Medium.IMAGE: OutputFormat.PNG,
    Medium.VIDEO: OutputFormat.MP4,
    Medium.AUDIO: OutputFormat.WAV,
    Medium.MESH: OutputFormat.GLB,
}
