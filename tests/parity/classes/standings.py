"""Whether jobs of a pipeline class share forwards, and why not: decided from facts, and from what is declared here."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from parity.classes.facts import Facts


class Kind(StrEnum):
    FUSED = "fused"
    UNFUSED = "unfused"
    NOT_SERVED = "not served"


class Standing(NamedTuple):
    """`why` is the evidence of a fused class, and the reason of any other."""

    kind: Kind
    why: str


CHANGES_DENOISER = "it changes its denoiser, which jobs share, during its call"
OWN_CACHE = "its denoiser keeps keys and values between the steps of one call"
ONE_VIDEO = "its denoiser takes the packed tokens of one video"
UNTRIED = "its denoiser has no stacking rules and no row: it is fused only if inferred rules pass the self-check"

DEPRECATED = "deprecated in diffusers, and not tested: it runs if its denoiser does"
NO_TASK = "its call takes the inputs of no task"
NO_PROMPT = "its call takes no prompt, or under another name"
CONTROL_NET = "its kind of control net has no stacking rules"
OTHER_STAGE = "it is one of several stages, and takes or returns embeddings or latents"
VIDEO_INPUT = "it needs videos of another kind than that of a job: several, masked or preprocessed"
REPEATS = "its result has the frames of the video that it goes on from twice"
SOUND = "it makes sound only"
TEXT = "it makes text only"
OTHER_OUTPUT = "it makes neither images nor videos: meshes, maps or molecules"
REFINES = "it refines a finished image or video in its own size"
TWO_IMAGES = "it needs two images: that of the first stage, and the one that was changed there"
ROUNDS_IMAGE = "it scales the image to multiples of 32 pixels before it enlarges it"
OTHER_CALL = "another method must be called first"
LISTED_IMAGES = "its call takes lists of images under another name"

# Only what facts do not show.
DECLARED: Mapping[str, tuple[str, ...]] = {
    SOUND: ("DanceDiffusionPipeline",),
    TEXT: ("DiffusionGemmaPipeline", "LLaDA2Pipeline"),
    OTHER_OUTPUT: (
        *("MarigoldDepthPipeline", "MarigoldIntrinsicsPipeline", "MarigoldNormalsPipeline"),
        *("RFD4ProteinaPipeline", "ShapEImg2ImgPipeline", "ShapEPipeline"),
    ),
    REFINES: ("HunyuanImageRefinerPipeline", "SanaWMLTX2Refiner"),
    TWO_IMAGES: ("IFImg2ImgSuperResolutionPipeline", "IFInpaintingSuperResolutionPipeline"),
    ROUNDS_IMAGE: ("LDMSuperResolutionPipeline",),
    VIDEO_INPUT: (
        *("CogVideoXFunControlPipeline", "EasyAnimateControlPipeline", "EasyAnimateInpaintPipeline"),
        *("LTX2DFRTemporalRefinePipeline", "LTX2HDRPipeline", "VideoToVideoSDPipeline"),
    ),
    REPEATS: ("SkyReelsV2DiffusionForcingVideoToVideoPipeline",),
    OTHER_STAGE: ("LTX2VideoDiffusionDecodePipeline",),
    OTHER_CALL: ("LEditsPPPipelineStableDiffusion", "LEditsPPPipelineStableDiffusionXL"),
    LISTED_IMAGES: ("JoyImageEditPlusPipeline",),
}
UNFUSED: Mapping[str, tuple[str, ...]] = {
    CHANGES_DENOISER: ("StableDiffusionSAGPipeline",),
    OWN_CACHE: (
        "AnyFlowFARPipeline",
        "Flux2KleinKVPipeline",
        "WanAnimate2ModularPipeline",
        "WanAnimate2DistilledModularPipeline",
    ),
    ONE_VIDEO: ("Cosmos3DistilledModularPipeline", "Cosmos3OmniModularPipeline", "Cosmos3OmniPipeline"),
}
# Parts of models of other classes: what proves that their jobs share forwards.
PARTS: Mapping[str, str] = {"FluxPriorReduxPipeline": "a control: `tests/integration/weights/test_redux.py`"}
_NOT_SERVED = {name: reason for reason, names in DECLARED.items() for name in names}
_UNFUSED = {name: reason for reason, names in UNFUSED.items() for name in names}


def standing_of(facts: Facts) -> Standing:
    """Return the standing of a class. A row of a grid counts more than that the class is deprecated."""
    if facts.name in PARTS:
        return Standing(Kind.FUSED, PARTS[facts.name])
    reason = _not_served(facts)
    if reason is not None:
        return Standing(Kind.NOT_SERVED, reason)
    if facts.changes_denoiser or facts.name in _UNFUSED or (facts.row is not None and not facts.row.fused):
        return Standing(Kind.UNFUSED, _UNFUSED.get(facts.name, CHANGES_DENOISER))
    if facts.row is not None:
        return Standing(Kind.FUSED, f"[row]({facts.row.page})")
    if facts.ruled:
        return Standing(Kind.FUSED, f"rules of {' and '.join(dict.fromkeys(facts.ruled))}")
    return Standing(Kind.UNFUSED, UNTRIED)


def _not_served(facts: Facts) -> str | None:
    if facts.packages:
        return f"it needs {' and '.join(facts.packages)}, which workers lack"
    if facts.fault is not None:
        return facts.fault
    if facts.name in _NOT_SERVED:
        return _NOT_SERVED[facts.name]
    if facts.row is not None or facts.chosen_for_controls:
        return None
    reasons = (
        (facts.deprecated, DEPRECATED),
        ("Prior" in facts.name or any(_is_of_other_stage(one) for one in facts.inputs), OTHER_STAGE),
        (any("video" in one for one in facts.inputs), VIDEO_INPUT),
        (bool(facts.inputs), f"it needs {', '.join(facts.inputs)}, for which requests have no field"),
        (facts.control_net, CONTROL_NET),
        (not facts.tasks, NO_TASK),
        (not facts.takes_prompt and not facts.needs_image, NO_PROMPT),
    )
    return next((reason for holds, reason in reasons if holds), None)


def _is_of_other_stage(argument: str) -> bool:
    return argument.endswith(("embeds", "embeddings", "latents"))
