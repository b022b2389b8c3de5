"""Decodes of large videos and of meshes in pieces, so that other calls run in between."""

import copy
from collections.abc import Iterator
from typing import Any

import torch

from shared.architectures.registry import DIVISIBLE
from shared.job import Job
from worker.engine.fusion.module_proxy import ModuleProxy, SharedMethod

# Pixels decoded together: the activations of a VAE grow with the pixels of all rows.
MAX_DECODE_PIXELS = 4 * 1024 * 1024

# Seconds of sounds decoded together: the last layers of a VAE hold some 100 channels of each sample, so 48 kHz take
# half a gigabyte for each layer.
MAX_DECODE_S = 30.0


IN_CHUNKS = "geo_decoder"
"""The component that decodes a mesh in chunks of points, of which each call is a piece."""


def decode_limit(job: Job) -> int:
    """Return how many images, videos or sounds of a job's size can be decoded together; large ones by themselves."""
    if job.duration_s is not None:
        return max(1, int(MAX_DECODE_S / job.duration_s))
    return max(1, MAX_DECODE_PIXELS // (job.width * job.height * job.frames))


class DecoderPieces(torch.nn.Module):
    """The decoder of a VAE, which decodes a video piece by piece: by latent frames or by tiles."""

    def __init__(self, decoder: torch.nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """Decode a piece; if that fails, the lists of cached frames are as before, for another try."""
        lists = {name: list(value) for name, value in kwargs.items() if isinstance(value, list)}
        output = self.decoder(*args, **(kwargs | lists))
        for name, value in lists.items():
            kwargs[name][:] = value
        return output


def decoder_pieces(vae: torch.nn.Module | None) -> SharedMethod | None:
    """Return the method that decodes a piece of a video; None if the VAE cannot be divided."""
    decoder = getattr(vae, "decoder", None)
    if type(vae).__name__ not in DIVISIBLE or not isinstance(decoder, torch.nn.Module):
        return None
    pieces = SharedMethod("vae", "decode", DecoderPieces(decoder))
    pieces.fills_lists = True  # with the frames that the next piece needs
    return pieces


class _DecoderProxy(ModuleProxy):
    def modules(self) -> Iterator[torch.nn.Module]:
        """Yield the decoder's modules: VAEs count them."""
        return iter(self._module.modules())


def is_piece(method: SharedMethod) -> bool:
    """Return whether each call of a method is a piece of a decode."""
    return method.component == IN_CHUNKS or isinstance(method.module, DecoderPieces)


def divide_decodes(vae: ModuleProxy, pieces: SharedMethod) -> ModuleProxy:
    """Return a stand-in for a VAE: its own code decodes videos in the image task, which parks at each of the `pieces`.

    So other calls run between two pieces. That code has a copy of the VAE, as it keeps frames between the pieces.
    """
    own: Any = copy.copy(vae._module)
    own.__dict__["decoder"] = _DecoderProxy(own.decoder, {"forward": pieces}, vae.device, vae.dtype)

    def decode(*args: Any, **kwargs: Any) -> Any:
        latents = next(iter((*args, *kwargs.values())))
        is_video = latents.ndim == 5 and latents.shape[2] > 1
        return (own if is_video else vae).decode(*args, **kwargs)

    divided = ModuleProxy(vae._module, {}, vae.device, vae.dtype)
    divided.__dict__.update(vae.__dict__ | {"decode": decode})
    return divided
