"""The images and the video of one request: stored one after the other, and checked together."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from api.jobs.input_store import KINDS, InputStore, check_reference, kind_of
from api.jobs.request import JobRequest
from shared.errors import Faults, InputRejected, InvalidRequest
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.job import InputRef

_LARGEST_FILES, _LARGEST_IMAGES = 4, 2  # of the largest size that a job can have, by bytes and by pixels
URLS_S = 30.0
"""Time for all image URLs of one request; a settings' limit keeps the timeout of one within it."""


@dataclass(frozen=True)
class Inputs:
    """The stored images of a request: those of `image` or `images`, its mask, its last image, its control images; and
    its video and its sound."""

    images: tuple[InputRef, ...] = ()
    mask: InputRef | None = None
    last_image: InputRef | None = None
    controls: tuple[InputRef, ...] = ()
    video: InputRef | None = None
    face_video: InputRef | None = None
    audio: InputRef | None = None


def reference_faults(request: JobRequest) -> Iterator[InvalidRequest]:
    """Yield the faults of texts that can name no image, whatever is stored."""
    for param, value in request.references.items():
        try:
            if isinstance(value, str):
                check_reference(value, param)
        except InvalidRequest as error:
            yield error


async def store_inputs(request: JobRequest, store: InputStore) -> Inputs:
    """Store the images of a request, one after the other so that only one is in memory.

    Raises `InvalidRequest` with the faults of all of them.
    """
    if not request.references:
        return Inputs()
    guard = FetchGuard(FetchRules.for_inputs(store.settings), tenant=store.tenant, until_s=time.monotonic() + URLS_S)
    store = replace(store, guard=guard)
    refs: dict[str, InputRef] = {}
    faults = Faults()
    for param, value in request.references.items():
        with faults.collected():
            refs[param] = await store.resolve(value, param)
            check_kind(refs[param], param)
    faults.check()
    inputs = Inputs(
        images=tuple(refs[param] for param in request.image_values),
        mask=refs.get("mask"),
        last_image=refs.get("last_image"),
        controls=tuple(refs[f"controls.{at}.image"] for at in range(len(request.controls))),
        video=refs.get("video"),
        face_video=refs.get("face_video"),
        audio=refs.get("audio"),
    )
    check_input_sizes(inputs, store.settings.max_input_bytes, store.settings.max_input_pixels)
    return inputs


def check_kind(ref: InputRef, param: str) -> None:
    """Raise `InputRejected` for a stored file of another kind than the field takes."""
    if ref.is_latents and param != "image":
        raise InputRejected(f"{param}: latents can only be an image to continue from", param=param)
    wanted = kind_of(param)
    if ref.kind not in (wanted, "latents"):
        remedy = "send an MP4 or MOV" if wanted == "video" else f"send it as {ref.kind}"
        raise InputRejected(f"{param}: it is {KINDS[ref.kind]}, not {KINDS[wanted]}; {remedy}", param=param)


def check_input_sizes(inputs: Inputs, max_bytes: int, max_pixels: int) -> None:
    """Raise `InputRejected` for images that together take a worker too much memory or time.

    It holds the files of all jobs of a batch, and decodes 10 megapixels a second on a busy machine.
    """
    all_refs = (*inputs.images, inputs.mask, inputs.last_image, *inputs.controls, inputs.video, inputs.face_video)
    refs = [ref for ref in all_refs if ref is not None]
    totals = (
        ("bytes", sum(ref.bytes for ref in refs), _LARGEST_FILES * max_bytes),
        ("pixels", sum(ref.width * ref.height for ref in refs), _LARGEST_IMAGES * max_pixels),
    )
    for unit, total, most in totals:
        if total > most:
            raise InputRejected(f"the images have {total} {unit} in total; at most {most} are allowed", param="images")


def check_proportions(inputs: Inputs) -> None:
    """Raise `InvalidRequest` unless mask and image have the same proportions: both are cropped to the job's size."""
    if inputs.mask is None or not inputs.images:
        return
    mask, image = inputs.mask, inputs.images[0]
    # One pixel of tolerance: the sides of a mask made at another scale are rounded.
    tolerance = max(image.width, image.height, mask.width, mask.height)
    if abs(mask.width * image.height - mask.height * image.width) > tolerance:
        raise InvalidRequest(
            f"mask is {mask.width}x{mask.height} and the image {image.width}x{image.height}; "
            "they must have the same proportions",
            param="mask",
        )
