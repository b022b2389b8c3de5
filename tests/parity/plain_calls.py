"""How a user of diffusers calls each pipeline for a job, by its documented signature: none of the engine's own code."""

from __future__ import annotations

import io
import wave
from typing import Any

import av
import diffusers
import families
import numpy as np
import torch
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from harness.engine import input_files
from PIL import Image, ImageOps

from shared.job import Job
from shared.job_fields import CallFields
from shared.tasks import Task

# The class that does a task with the modules of a model of another class.
_OF_TASKS = {
    Task.IMAGE_TO_IMAGE: {
        "StableDiffusionPipeline": "StableDiffusionImg2ImgPipeline",
        "StableDiffusionXLPipeline": "StableDiffusionXLImg2ImgPipeline",
        "StableDiffusion3Pipeline": "StableDiffusion3Img2ImgPipeline",
        "FluxPipeline": "FluxImg2ImgPipeline",
        "FluxControlPipeline": "FluxControlImg2ImgPipeline",
        "ZImagePipeline": "ZImageImg2ImgPipeline",
        "QwenImagePipeline": "QwenImageImg2ImgPipeline",
    },
    Task.INPAINT: {
        "StableDiffusionPipeline": "StableDiffusionInpaintPipeline",
        "StableDiffusionXLPipeline": "StableDiffusionXLInpaintPipeline",
        "StableDiffusionXLImg2ImgPipeline": "StableDiffusionXLInpaintPipeline",
        "StableDiffusion3Pipeline": "StableDiffusion3InpaintPipeline",
        "FluxPipeline": "FluxInpaintPipeline",
        "FluxControlPipeline": "FluxControlInpaintPipeline",
        "FluxKontextPipeline": "FluxKontextInpaintPipeline",
        "Flux2KleinPipeline": "Flux2KleinInpaintPipeline",
        "ZImagePipeline": "ZImageInpaintPipeline",
        "QwenImagePipeline": "QwenImageInpaintPipeline",
    },
    Task.AUDIO_TO_AUDIO: {"StableAudio3Pipeline": "StableAudio3AudioToAudioPipeline"},
    Task.AUDIO_INPAINT: {"StableAudio3Pipeline": "StableAudio3InpaintPipeline"},
    Task.TEXT_TO_VIDEO: {"WanImageToVideoPipeline": "WanPipeline"},
    Task.IMAGE_TO_VIDEO: {
        "WanPipeline": "WanImageToVideoPipeline",
        "LTX2Pipeline": "LTX2ImageToVideoPipeline",
        "LTX2ConditionPipeline": "LTX2ImageToVideoPipeline",
    },
    Task.VIDEO_TO_VIDEO: {
        "WanPipeline": "WanVideoToVideoPipeline",
        "LTX2Pipeline": "LTX2InContextPipeline",
        "CogVideoXPipeline": "CogVideoXVideoToVideoPipeline",
        "AnimateDiffPipeline": "AnimateDiffVideoToVideoPipeline",
    },
}

VIDEO_UPSCALES = {"LTXLatentUpsamplePipeline": 2, "LTX2LatentUpsamplePipeline": 2, "Kandinsky6SRPipeline": 2.25}
"""How many times as long the sides of a video get by default; LTX's calls name its size before."""

_OWN_STEPS = (
    *("LTXLatentUpsamplePipeline", "LTX2LatentUpsamplePipeline"),
    "HeliosPyramidPipeline",
    "HeliosPyramidModularPipeline",
    "EchoModularPipeline",
    "Cosmos3DistilledModularPipeline",
)
_WITHOUT_PROMPT = ("StableDiffusionImageVariationPipeline", "StableVideoDiffusionPipeline", *VIDEO_UPSCALES)
_CONTROL = "controlnet_conditioning_scale control_guidance_start control_guidance_end"
# What a call takes besides prompt, steps and generator.
CALLS = {
    # Sounds
    "AceStepPipeline": (
        "audio_duration guidance_scale src_audio task_type repainting_start repainting_end audio_cover_strength"
    ),
    "StableAudioPipeline": (
        "audio_end_in_s guidance_scale negative_prompt initial_audio_waveforms initial_audio_sampling_rate"
    ),
    "MiniMaxMusic3ModularPipeline": "audio_duration",
    "LongCatAudioDiTPipeline": "audio_duration_s guidance_scale negative_prompt",
    "StableAudio3Pipeline": "duration guidance_scale negative_prompt",
    "StableAudio3AudioToAudioPipeline": "duration audio init_noise_level",
    "StableAudio3InpaintPipeline": "duration audio mask_start_seconds mask_end_seconds",
    # Stable Diffusion
    "StableDiffusionPipeline": "height width guidance_scale negative_prompt ip_adapter_image",
    "StableDiffusionImg2ImgPipeline": "image strength guidance_scale negative_prompt",
    "StableDiffusionInpaintPipeline": "image mask_image height width strength guidance_scale negative_prompt",
    "StableDiffusionXLPipeline": "height width guidance_scale negative_prompt ip_adapter_image",
    "StableDiffusionXLImg2ImgPipeline": "image strength guidance_scale negative_prompt",
    "StableDiffusionXLInpaintPipeline": "image mask_image height width strength guidance_scale negative_prompt",
    "StableDiffusion3Pipeline": "height width guidance_scale negative_prompt",
    "StableDiffusion3Img2ImgPipeline": "height width image strength guidance_scale negative_prompt",
    "StableDiffusion3InpaintPipeline": "image mask_image height width strength guidance_scale negative_prompt",
    "StableDiffusionInstructPix2PixPipeline": "image guidance_scale negative_prompt",
    "StableDiffusionXLInstructPix2PixPipeline": "image height width guidance_scale negative_prompt",
    "StableDiffusionImageVariationPipeline": "image height width guidance_scale",
    "StableDiffusionSAGPipeline": "height width guidance_scale negative_prompt",
    "StableDiffusionPanoramaPipeline": "height width guidance_scale negative_prompt",
    "StableDiffusionPAGPipeline": "height width guidance_scale negative_prompt",
    "StableDiffusionXLPAGPipeline": "height width guidance_scale negative_prompt",
    "StableDiffusion3PAGPipeline": "height width guidance_scale negative_prompt",
    "LatentConsistencyModelPipeline": "height width guidance_scale",
    # FLUX: the scale of the distilled guidance; a negative prompt counts only with a true_cfg_scale above 1
    "FluxPipeline": "negative_prompt height width guidance_scale",
    "FluxImg2ImgPipeline": "negative_prompt image height width strength guidance_scale",
    "FluxInpaintPipeline": "negative_prompt image mask_image height width strength guidance_scale",
    "FluxFillPipeline": "image mask_image height width strength guidance_scale",
    "FluxKontextPipeline": "image negative_prompt height width guidance_scale max_area _auto_resize",
    "FluxKontextInpaintPipeline": (
        "image mask_image negative_prompt height width strength guidance_scale max_area _auto_resize"
    ),
    "FluxControlPipeline": "control_image height width guidance_scale",
    "FluxControlImg2ImgPipeline": "image control_image height width strength guidance_scale",
    "FluxControlInpaintPipeline": "image mask_image control_image height width strength guidance_scale",
    "Flux2Pipeline": "image height width guidance_scale",
    "Flux2KleinPipeline": "image height width guidance_scale",
    "Flux2KleinInpaintPipeline": "image mask_image height width strength guidance_scale",
    # Other images
    "ZImagePipeline": "height width guidance_scale negative_prompt",
    "ZImageOmniPipeline": "height width guidance_scale negative_prompt",
    "ZImageImg2ImgPipeline": "image strength height width guidance_scale negative_prompt",
    "ZImageInpaintPipeline": "image mask_image strength height width guidance_scale negative_prompt",
    "QwenImagePipeline": "negative_prompt true_cfg_scale height width",
    "QwenImageImg2ImgPipeline": "negative_prompt true_cfg_scale image height width strength",
    "QwenImageInpaintPipeline": "negative_prompt true_cfg_scale image mask_image height width strength",
    "QwenImageEditPipeline": "image negative_prompt true_cfg_scale height width",
    "QwenImageEditPlusPipeline": "image negative_prompt true_cfg_scale height width",
    "QwenImageLayeredPipeline": "image negative_prompt true_cfg_scale layers resolution",
    "QwenImage21Pipeline": "image negative_prompt true_cfg_scale height width",
    "SanaPipeline": "negative_prompt guidance_scale height width",
    "SanaSprintImg2ImgPipeline": "image strength intermediate_timesteps guidance_scale height width",
    "SanaPAGPipeline": "negative_prompt guidance_scale height width",
    "SanaSprintPipeline": "intermediate_timesteps guidance_scale height width",
    "ErnieImagePipeline": "negative_prompt height width guidance_scale",
    "GlmImagePipeline": "height width guidance_scale",
    "PixArtAlphaPipeline": "negative_prompt guidance_scale height width",
    "PixArtSigmaPipeline": "negative_prompt guidance_scale height width",
    "PixArtSigmaPAGPipeline": "negative_prompt guidance_scale height width",
    "AuraFlowPipeline": "negative_prompt guidance_scale height width",
    "LuminaPipeline": "width height guidance_scale negative_prompt",
    "Lumina2Pipeline": "width height guidance_scale negative_prompt",
    "ChromaPipeline": "negative_prompt height width guidance_scale",
    "ChromaImg2ImgPipeline": "negative_prompt image height width guidance_scale strength",
    "HunyuanDiTPipeline": "height width guidance_scale negative_prompt",
    "HunyuanImagePipeline": "negative_prompt height width",
    "HiDreamImagePipeline": "height width guidance_scale negative_prompt",
    "CogView3PlusPipeline": "negative_prompt height width guidance_scale",
    "CogView4ControlPipeline": "control_image negative_prompt height width guidance_scale",
    "CogView4Pipeline": "negative_prompt height width guidance_scale",
    "Cosmos2TextToImagePipeline": "negative_prompt height width guidance_scale",
    "KandinskyCombinedPipeline": "negative_prompt guidance_scale height width",
    "KandinskyV22CombinedPipeline": "negative_prompt guidance_scale height width",
    "Kandinsky3Pipeline": "guidance_scale negative_prompt height width",
    "Kandinsky5T2IPipeline": "negative_prompt height width guidance_scale",
    "IFPipeline": "guidance_scale negative_prompt height width",
    "PRXPipeline": "negative_prompt height width guidance_scale",
    "PRXPixelPipeline": "negative_prompt height width guidance_scale",
    "BriaPipeline": "height width guidance_scale negative_prompt",
    "BriaFiboPipeline": "height width guidance_scale negative_prompt",
    "OvisImagePipeline": "negative_prompt guidance_scale height width",
    "Krea2Pipeline": "negative_prompt height width guidance_scale",
    "DreamLitePipeline": "negative_prompt image height width guidance_scale",
    "DreamLiteMobilePipeline": "image height width guidance_scale",
    "BriaFibo2Pipeline": "negative_prompt height width guidance_scale",
    "Ideogram4Pipeline": "height width guidance_scale guidance_schedule",
    "JoyImageEditPipeline": "image negative_prompt height width guidance_scale",
    "KolorsPipeline": "height width guidance_scale negative_prompt",
    "KolorsImg2ImgPipeline": "image strength height width guidance_scale negative_prompt",
    "LongCatImagePipeline": "negative_prompt height width guidance_scale",
    "NucleusMoEImagePipeline": "negative_prompt height width guidance_scale",
    "OmniGenPipeline": "height width guidance_scale",
    # Modular; with a guider, guidance is its own
    "StableDiffusionXLModularPipeline": "image mask_image height width strength negative_prompt",
    "StableDiffusion3ModularPipeline": "image height width strength negative_prompt",
    "FluxModularPipeline": "image height width strength guidance_scale",
    "QwenImageModularPipeline": "image mask_image height width strength negative_prompt",
    "ZImageModularPipeline": "image height width strength negative_prompt",
    "FluxKontextModularPipeline": "image height width guidance_scale max_area _auto_resize",
    "Flux2ModularPipeline": "image height width guidance_scale",
    "Flux2KleinModularPipeline": "image height width",
    "Flux2KleinBaseModularPipeline": "image height width",
    "QwenImageEditModularPipeline": "image mask_image height width strength negative_prompt",
    "QwenImageEditPlusModularPipeline": "image height width negative_prompt",
    "QwenImageLayeredModularPipeline": "image negative_prompt layers resolution",
    "QwenImage21ModularPipeline": "image height width negative_prompt",
    "QwenImage21TurboModularPipeline": "image height width",
    "Krea2ModularPipeline": "height width negative_prompt",
    "Krea2TurboModularPipeline": "height width",
    "ErnieImageModularPipeline": "height width negative_prompt",
    "AnimaModularPipeline": "image height width strength negative_prompt",
    "Flux3ModularPipeline": "image height width negative_prompt",
    "Flux3DistilledModularPipeline": "image height width",
    "Ideogram4ModularPipeline": "height width guidance_schedule",
    "WanModularPipeline": "negative_prompt height width num_frames",
    "Wan22ModularPipeline": "negative_prompt height width num_frames",
    "WanImage2VideoModularPipeline": "image negative_prompt height width num_frames",
    "Wan22Image2VideoModularPipeline": "image negative_prompt height width num_frames",
    "HunyuanVideo15ModularPipeline": "image negative_prompt height width num_frames",
    "HeliosModularPipeline": "image negative_prompt height width num_frames",
    "HeliosPyramidModularPipeline": ("image negative_prompt height width num_frames pyramid_num_inference_steps_list"),
    "LTXModularPipeline": "image negative_prompt height width num_frames frame_rate",
    "LTX2ModularPipeline": "image negative_prompt height width num_frames frame_rate",
    "LTX25ModularPipeline": "image negative_prompt height width num_frames frame_rate",
    "Cosmos3DistilledModularPipeline": "image height width num_frames fps",
    "Cosmos3OmniModularPipeline": "image negative_prompt height width num_frames fps guidance_scale",
    "MiniMaxH3ModularPipeline": "image height width num_frames",
    "EchoModularPipeline": "image height width num_frames frame_rate",
    # Control nets
    "StableDiffusionControlNetPipeline": f"image height width guidance_scale negative_prompt {_CONTROL}",
    "StableDiffusionControlNetImg2ImgPipeline": (
        f"image control_image height width strength guidance_scale negative_prompt {_CONTROL}"
    ),
    "StableDiffusionControlNetInpaintPipeline": (
        f"image mask_image control_image height width strength guidance_scale negative_prompt {_CONTROL}"
    ),
    "StableDiffusionXLControlNetPipeline": f"image height width guidance_scale negative_prompt {_CONTROL}",
    "StableDiffusionXLControlNetImg2ImgPipeline": (
        f"image control_image height width strength guidance_scale negative_prompt {_CONTROL}"
    ),
    "StableDiffusionXLControlNetInpaintPipeline": (
        f"image mask_image control_image height width strength guidance_scale negative_prompt {_CONTROL}"
    ),
    "StableDiffusionXLControlNetUnionPipeline": (
        f"height width guidance_scale control_image negative_prompt {_CONTROL}"
    ),
    "StableDiffusionXLControlNetUnionImg2ImgPipeline": (
        f"image control_image height width strength guidance_scale negative_prompt {_CONTROL}"
    ),
    "StableDiffusionXLControlNetUnionInpaintPipeline": (
        f"image mask_image control_image height width strength guidance_scale negative_prompt {_CONTROL}"
    ),
    "StableDiffusionAdapterPipeline": "image height width guidance_scale negative_prompt adapter_conditioning_scale",
    "StableDiffusionXLAdapterPipeline": (
        "image height width guidance_scale negative_prompt adapter_conditioning_scale adapter_conditioning_factor"
    ),
    "StableDiffusion3ControlNetPipeline": f"height width guidance_scale control_image negative_prompt {_CONTROL}",
    "FluxControlNetPipeline": f"negative_prompt height width guidance_scale control_image {_CONTROL}",
    "FluxControlNetImg2ImgPipeline": f"image control_image height width strength guidance_scale {_CONTROL}",
    "FluxControlNetInpaintPipeline": f"image mask_image control_image height width strength guidance_scale {_CONTROL}",
    "QwenImageControlNetPipeline": f"negative_prompt true_cfg_scale height width control_image {_CONTROL}",
    "SanaControlNetPipeline": (
        "negative_prompt guidance_scale height width control_image controlnet_conditioning_scale"
    ),
    "HunyuanDiTControlNetPipeline": (
        "negative_prompt guidance_scale height width control_image controlnet_conditioning_scale"
    ),
    # Videos
    "WanPipeline": "negative_prompt height width num_frames guidance_scale",
    "WanImageToVideoPipeline": "image last_image negative_prompt height width num_frames guidance_scale",
    "WanVideoToVideoPipeline": "video negative_prompt height width guidance_scale strength",
    "LucyEditPipeline": "video negative_prompt height width num_frames guidance_scale",
    "CogVideoXVideoToVideoPipeline": "video negative_prompt height width guidance_scale strength",
    "AnimateDiffVideoToVideoPipeline": "video negative_prompt height width guidance_scale strength",
    "WanAnimate2ModularPipeline": "image driving_video negative_prompt height width fps segment_frame_length",
    "WanAnimate2DistilledModularPipeline": "image driving_video negative_prompt height width fps segment_frame_length",
    "WanAnimatePipeline": (
        "image pose_video face_video negative_prompt height width segment_frame_length guidance_scale"
    ),
    "AnyFlowPipeline": "negative_prompt height width num_frames guidance_scale",
    "ChronoEditPipeline": "image negative_prompt height width num_frames guidance_scale",
    "HunyuanVideoFramepackPipeline": ("image last_image negative_prompt height width num_frames guidance_scale"),
    "Kandinsky6TI2VAPipeline": "image negative_prompt height width num_frames frame_rate guidance_scale",
    "EasyAnimatePipeline": "negative_prompt height width num_frames guidance_scale",
    "AnyFlowFARPipeline": "negative_prompt height width num_frames guidance_scale",
    "Cosmos3OmniPipeline": "image negative_prompt height width num_frames fps guidance_scale",
    "LTXConditionPipeline": "conditions image negative_prompt height width num_frames frame_rate guidance_scale",
    "SkyReelsV2DiffusionForcingPipeline": "negative_prompt height width num_frames guidance_scale fps",
    "SkyReelsV2DiffusionForcingImageToVideoPipeline": (
        "image last_image negative_prompt height width num_frames guidance_scale fps"
    ),
    "SanaImageToVideoPipeline": "image negative_prompt guidance_scale height width frames",
    "HunyuanSkyreelsImageToVideoPipeline": "image negative_prompt height width num_frames guidance_scale",
    "LTX2InContextPipeline": "reference_conditions negative_prompt height width num_frames frame_rate guidance_scale",
    "LTX2ConditionPipeline": "conditions negative_prompt height width num_frames frame_rate guidance_scale",
    "StableVideoDiffusionPipeline": "image height width num_frames fps max_guidance_scale",
    "MotifVideoPipeline": "negative_prompt height width num_frames",
    "MotifVideoImage2VideoPipeline": "image negative_prompt height width num_frames",
    "WanVACEPipeline": "video mask negative_prompt height width num_frames guidance_scale",
    "HunyuanVideoPipeline": "negative_prompt height width num_frames guidance_scale",
    "HunyuanVideoImageToVideoPipeline": "image negative_prompt height width num_frames guidance_scale",
    "HunyuanVideo15Pipeline": "negative_prompt height width num_frames",
    "HunyuanVideo15ImageToVideoPipeline": "image negative_prompt num_frames",
    "HeliosPipeline": "image negative_prompt height width num_frames guidance_scale",
    "HeliosPyramidPipeline": (
        "image negative_prompt height width num_frames guidance_scale pyramid_num_inference_steps_list"
    ),
    "LTXPipeline": "negative_prompt height width num_frames frame_rate guidance_scale",
    "LTXImageToVideoPipeline": "image negative_prompt height width num_frames frame_rate guidance_scale",
    "LTX2Pipeline": "negative_prompt height width num_frames frame_rate guidance_scale",
    "LTX2ImageToVideoPipeline": "image negative_prompt height width num_frames frame_rate guidance_scale",
    "Kandinsky5T2VPipeline": "negative_prompt height width num_frames guidance_scale",
    "Kandinsky5I2VPipeline": "image negative_prompt height width num_frames guidance_scale",
    "CogVideoXPipeline": "negative_prompt height width num_frames guidance_scale",
    "CogVideoXImageToVideoPipeline": "image negative_prompt height width num_frames guidance_scale",
    "MochiPipeline": "negative_prompt height width num_frames guidance_scale",
    "SkyReelsV2Pipeline": "negative_prompt height width num_frames guidance_scale",
    "SkyReelsV2ImageToVideoPipeline": "image negative_prompt height width num_frames guidance_scale",
    "SanaVideoPipeline": "negative_prompt guidance_scale height width frames",
    "LattePipeline": "negative_prompt guidance_scale video_length height width",
    "AnimateDiffPipeline": "num_frames height width guidance_scale negative_prompt",
    "AnimateDiffSDXLPipeline": "num_frames height width guidance_scale negative_prompt",
    "AnimateDiffPAGPipeline": "num_frames height width guidance_scale negative_prompt",
    **{name: call for module in families.modules() for name, call in module.CALLS.items()},
}


UPSCALES = {
    "StableDiffusionUpscalePipeline": 4,
    "StableDiffusionLatentUpscalePipeline": 2,
    "IFSuperResolutionPipeline": 4,
    **VIDEO_UPSCALES,
}
"""How many times as long the sides of an image or a video get, as the documentation of diffusers says."""


def pipeline_of(loaded: Any, task: Task) -> Any:
    """Return diffusers' pipeline for a task, of the modules of a model that diffusers has loaded."""
    name = type(loaded).__name__
    other = _OF_TASKS.get(task, {}).get(name, name)
    return loaded if other == name else getattr(diffusers, other).from_pipe(loaded)


def arguments(pipeline: Any, job: Job, index: int) -> dict[str, Any]:
    """Return the arguments of a call for result `index` of a job."""
    name = type(pipeline).__name__
    factor = job.upscale_factor or UPSCALES.get(name, 1)
    small = _source_size(pipeline, job, factor)
    width, height = small if name in VIDEO_UPSCALES else (job.width, job.height)
    values: dict[str, Any] = {
        "height": height,
        "width": width,
        "resolution_scale": factor,
        "guidance_scale": job.guidance_scale,
        "true_cfg_scale": job.guidance_scale,
        "max_guidance_scale": job.guidance_scale,
        # The classic pipeline guides by a list of its own unless there is none.
        "guidance_schedule": None if "guidance_scale" in CALLS[name] else [job.guidance_scale] * job.steps,
        "strength": job.strength,
        "intermediate_timesteps": 1.3 if job.steps == 2 else None,  # as the pipeline's error says
        # Kontext scales to about a megapixel by default.
        "max_area": job.height * job.width,
        "_auto_resize": False,
        "layers": job.layers,
        "resolution": 640,
        **dict.fromkeys(("frame_rate", "fps"), job.fps),
        "pyramid_num_inference_steps_list": [max(1, len(part)) for part in np.array_split(range(job.steps), 3)],
        **dict.fromkeys(("num_frames", "frames", "video_length"), job.frames),
        "segment_frame_length": min(81, job.frames),  # a shorter video does not fill one of the default length
        **_camera(job),
        **_images(job, small),
        **_sounds(job),
        **({} if job.controls else _structure(job)),
        **_controls(job, "control_image" if "control_image" in CALLS[name] else "image"),
    }
    values |= _conditions(name, values["condition_frames"]) if "condition_frames" in values else {}
    blank = " " if "true_cfg_scale" in CALLS[name] and job.guidance_scale > 1 else None  # as Qwen's model cards do
    blank = "" if name == "EasyAnimatePipeline" else blank  # it fails without one
    negative = blank if job.negative_prompt is None else job.negative_prompt
    if negative is not None:
        values["negative_prompt"] = negative
    steps = {} if name in _OWN_STEPS else {"num_inference_steps": job.steps}
    generator = torch.Generator().manual_seed(job.seed + index)
    own = {word: values[word] for word in CALLS[name].split() if word in values}
    own |= {word: value for word in CallFields.model_fields if (value := getattr(job, word)) is not None}
    output_type = "pt" if job.task.makes_audio else "pil"
    prompt = {} if name in _WITHOUT_PROMPT else {"prompt": job.prompt}
    return {**prompt, "generator": generator, "output_type": output_type, **steps, **own, **(job.extra or {})}


def _source_size(pipeline: Any, job: Job, factor: float) -> tuple[int, int]:
    """Return width and height of an image or a video that becomes as large as a job; Kandinsky's call rounds them."""
    step = getattr(pipeline, "vae_scale_factor_spatial", 1) if factor != int(factor) else 1
    return round(job.width / factor / step) * step, round(job.height / factor / step) * step


def _camera(job: Job) -> dict[str, Any]:
    """Return a camera that stands still, for jobs without a path."""
    path = {} if "c2w" in (job.extra or {}) else {"action": f"none-{job.frames - 1}"}
    return {**path, "intrinsics": [job.width / 2, job.width / 2, job.width / 2, job.height / 2]}


def _sounds(job: Job) -> dict[str, Any]:
    """Return the length of a job's sound, and the sound that it starts from, filled with silence."""
    if job.duration_s is None:
        return {}
    names = ("audio_duration", "duration", "audio_end_in_s", "audio_length_in_s", "audio_duration_s")
    values: dict[str, Any] = dict.fromkeys(names, job.duration_s)
    file = input_files(job).audio
    if file is None:
        return values
    with wave.open(io.BytesIO(file)) as sound:
        rate, frames = sound.getframerate(), sound.readframes(sound.getnframes())
    samples = torch.from_numpy(np.frombuffer(frames, "<i2").reshape(-1, 2).T / np.float32(32768))
    samples = torch.nn.functional.pad(samples, (0, round(rate * job.duration_s) - samples.shape[-1]))
    values |= {"src_audio": samples, "audio": samples[None], "initial_audio_waveforms": samples[None]}
    values |= {"initial_audio_sampling_rate": rate}
    start, end = job.repaint_start_s or 0.0, job.repaint_end_s or job.duration_s
    if job.task is Task.AUDIO_INPAINT:
        values |= {"mask_start_seconds": start, "mask_end_seconds": end}
        return values | {"task_type": "repaint", "repainting_start": start, "repainting_end": end}
    strength = 1.0 if job.strength is None else job.strength
    return values | {"init_noise_level": strength, "task_type": "cover", "audio_cover_strength": 1.0 - strength}


def _images(job: Job, small: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return a job's images and videos: those to edit in their own size, the others in that of the result, or the size
    of one that becomes larger."""
    files = input_files(job)
    size = (job.width, job.height)
    small = small or size
    values: dict[str, Any] = {}
    if job.task is Task.EDIT:
        mode = "RGBA" if job.layers else "RGB"
        sized = zip(files.images, job.reference_sizes, strict=True)
        images = [_opened(data).convert(mode).resize(own, Image.Resampling.LANCZOS) for data, own in sized]
    else:
        images = [ImageOps.fit(_opened(data), small, Image.Resampling.LANCZOS) for data in files.images]
    if images:
        values["image"] = images if len(images) > 1 else images[0]
    if files.mask is not None:
        values["mask_image"] = ImageOps.fit(_opened(files.mask), size, Image.Resampling.BILINEAR)
    if files.video is not None:
        frames = load_frames(files.video)
        if job.task is not Task.ANIMATE:
            frames = [ImageOps.fit(frame, small, Image.Resampling.LANCZOS) for frame in frames]
        values |= dict.fromkeys(("video", "driving_video", "controls"), frames)
        values |= _beginning(job, frames) if job.task is Task.EXTEND_VIDEO else {}
        values["reference_conditions"] = [LTX2ReferenceCondition(frames)]
        values["pose_video"] = [ImageOps.fit(frame, size, Image.Resampling.LANCZOS) for frame in frames]
    if files.face_video is not None:
        values["face_video"] = load_frames(files.face_video)
    if files.last_image is not None:
        values["last_image"] = ImageOps.fit(_opened(files.last_image), size, Image.Resampling.LANCZOS)
    return values


def _beginning(job: Job, frames: list[Image.Image]) -> dict[str, Any]:
    """Return the frames that a video goes on from, as VACE's and LTX's documentations do."""
    size, made = (job.width, job.height), job.frames - len(frames)
    return {
        "video": [*frames, *[Image.new("RGB", size, (128, 128, 128))] * made],
        "mask": [*[Image.new("L", size, 0)] * len(frames), *[Image.new("L", size, 255)] * made],
        "condition_frames": frames,
    }


def _conditions(name: str, frames: list[Image.Image]) -> dict[str, Any]:
    if name == "LTXConditionPipeline":
        return {"conditions": [LTXVideoCondition(video=frames, frame_index=0)]}
    return {"conditions": [LTX2VideoCondition(frames=frames, index=0)]}


def _structure(job: Job) -> dict[str, Any]:
    """Return the image that FLUX.1 Depth and its like follow, in the size of the result; one that is larger than that
    is first scaled to the size of edits."""
    image = _images(job).get("image") if job.task is Task.EDIT else None
    if not isinstance(image, Image.Image):
        return {}
    if image.width < job.width or image.height < job.height:
        image = _opened(input_files(job).images[0]).convert("RGB")
    return {"control_image": ImageOps.fit(image, (job.width, job.height), Image.Resampling.LANCZOS)}


def _controls(job: Job, image: str) -> dict[str, Any]:
    """Return the control images under the name `image`, and their settings; lists if there are several."""
    opened = [_opened(data).convert("RGB") for data in input_files(job).controls]
    if opened and job.controls[0].kind == "structure":
        return {"control_image": ImageOps.fit(opened[0], (job.width, job.height), Image.Resampling.LANCZOS)}
    if not opened or job.controls[0].kind == "ip_adapter":
        return {"ip_adapter_image": opened[0]} if opened else {}
    fitted = [ImageOps.fit(one, (job.width, job.height), Image.Resampling.LANCZOS) for one in opened]
    columns = (fitted, *zip(*((one.scale, one.start, one.end) for one in job.controls), strict=True))
    values = [list(column) if len(opened) > 1 else column[0] for column in columns]
    of_adapters = {"adapter_conditioning_scale": values[1], "adapter_conditioning_factor": job.controls[0].end}
    return dict(zip((image, *_CONTROL.split()), values, strict=True)) | of_adapters


def load_frames(data: bytes) -> list[Image.Image]:
    """Return all frames of a video, as diffusers' `load_video` does."""
    with av.open(io.BytesIO(data)) as file:
        return [frame.to_image() for frame in file.decode(video=0)]


def _opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))
