"""Every tiny pipeline by name. Only the module of the requested one is imported, as diffusers imports slowly.

Those of a new family are in its module in `families`.
"""

from __future__ import annotations

import importlib.util
from importlib import import_module
from pathlib import Path
from types import ModuleType

import families
from tiny.weights import save

MODULES = {
    "images.stable": ("sd", "sdxl", "sdxl-refiner", "sd3", "flux", "flux-schnell"),
    "images.zimage": ("z-image", "z-image-omni"),
    "images.qwen": ("qwen-image", "qwen-image-edit", "qwen-image-edit-plus", "qwen-image-layered"),
    "images.qwen21": ("qwen-image-2.1",),
    "images.flux": ("flux-kontext", "flux-fill", "flux-control"),
    "images.flux2": ("flux-2-dev", "flux-2-klein", "flux-2-klein-base"),
    "images.sana": ("sana", "sana-1.5", "sana-sprint", "sana-sprint-i2i"),
    "images.ernie": ("ernie-image",),
    "images.glm": ("glm-image",),
    "images.inpaint": ("sd-inpaint", "sdxl-inpaint", "sd3-16", "sd3.5-medium", "sd3.5-large"),
    "images.kandinsky": ("kandinsky-2.1", "kandinsky-2.2", "kandinsky-3"),
    "images.deepfloyd": ("deepfloyd-if", "prx-pixel", "prx"),
    "images.unlisted": ("pixart-sigma", "aura-flow", "lumina-2", "chroma"),
    "videos.wan": ("wan-2.1-t2v", "wan-2.2-t2v", "wan-2.2-ti2v", "wan-2.1-i2v", "wan-2.1-flf2v", "wan-2.2-i2v"),
    "videos.hunyuan": (
        *("hunyuan-video", "hunyuan-video-i2v", "hunyuan-video-1.5", "hunyuan-video-1.5-i2v"),
        "hunyuan-skyreels-i2v",
    ),
    "videos.ltx2": ("ltx-2", "ltx-2.3", "ltx-2-condition"),
    "videos.helios": ("helios", "helios-mid", "helios-distilled"),
    "more.kandinsky5": ("kandinsky-5-t2i", "kandinsky-5-t2v", "kandinsky-5-i2v"),
    "more.ltx": ("ltx-video", "ltx-video-i2v", "ltx-video-condition", "mochi", "cosmos-2-t2i"),
    "more.cogview": ("cogvideox", "cogvideox-5b", "cogvideox-i2v", "cogview-3", "cogview-4", "cogview-4-control"),
    "more.stable": (
        *("pix2pix", "pix2pix-xl", "image-variation", "lcm", "sag", "panorama", "animatediff", "animatediff-xl"),
    ),
    "more.perturbed": ("sd-pag", "sdxl-pag", "sd3-pag", "pixart-pag", "sana-pag", "animatediff-pag"),
    "more.wan": (
        *("wan-vace", "skyreels-v2", "skyreels-v2-i2v", "skyreels-v2-df", "skyreels-v2-df-i2v"),
        *("sana-video", "sana-video-i2v"),
    ),
    "more.dit": ("pixart-alpha", "lumina-next", "latte", "bria", "bria-fibo", "ovis-image", "omnigen"),
    "more.stable_video": ("stable-video",),
    "more.framepack": ("framepack",),
    "more.kandinsky6": ("kandinsky-6",),
    "more.easyanimate": ("easyanimate",),
    "more.chroma": ("chroma-i2i",),
    "more.animate": ("wan-animate", "wan-animate-2", "wan-animate-2-distilled"),
    "more.video_edits": ("wan-v2v", "lucy-edit", "cogvideox-v2v", "animatediff-v2v"),
    "more.krea": ("krea-2",),
    "more.anyflow": ("anyflow", "anyflow-far", "chrono-edit"),
    "more.dreamlite": ("dreamlite", "dreamlite-mobile"),
    "more.fibo2": ("fibo-2",),
    "more.ideogram": ("ideogram-4",),
    "more.joyimage": ("joyimage-edit",),
    "more.kolors": ("kolors", "kolors-i2i"),
    "more.longcat": ("longcat-image",),
    "more.motif": ("motif-video", "motif-video-i2v"),
    "more.nucleus": ("nucleus-image",),
    "images.modular": (
        *("modular-sdxl", "modular-sd3", "modular-flux", "modular-qwen-image", "modular-z-image"),
        *("modular-flux-kontext", "modular-flux-2-dev", "modular-flux-2-klein", "modular-flux-2-klein-base"),
        *("modular-qwen-image-edit", "modular-qwen-image-edit-plus", "modular-qwen-image-layered"),
        *("modular-qwen-image-2.1", "modular-qwen-image-2.1-turbo"),
        *("modular-krea-2", "modular-krea-2-turbo", "modular-ernie-image"),
    ),
    "images.anima": ("anima",),
    "images.flux3": ("flux-3", "flux-3-distilled"),
    "images.ideogram": ("modular-ideogram-4",),
    "videos.modular": (
        *("modular-wan", "modular-wan-2.2", "modular-wan-i2v", "modular-wan-2.2-i2v"),
        *("modular-hunyuan-video-1.5", "modular-hunyuan-video-1.5-i2v", "modular-helios", "modular-helios-mid"),
        *("modular-ltx", "modular-ltx-2", "modular-ltx-2.5", "modular-echo"),
    ),
    "videos.cosmos3": ("modular-cosmos-3-distilled", "modular-cosmos-3", "cosmos-3"),
    "videos.minimax": ("modular-minimax-h3",),
    "sounds.ace": ("ace-step", "ace-step-turbo"),
    "sounds.minimax": ("modular-minimax-music-3",),
    "sounds.longcat_audio": ("longcat-audio",),
    "sounds.stable_audio": ("stable-audio", "stable-audio-3-base", "stable-audio-3"),
    "more.hunyuan": ("hunyuan-dit", "hunyuan-image-2.1", "hidream"),
}
NEEDS_TORCHVISION = frozenset(
    {"qwen-image-edit", "qwen-image-edit-plus", "qwen-image-layered", "qwen-image-2.1", "flux-2-dev"}
    | {"cosmos-2-t2i", "omnigen", "nucleus-image", "longcat-image", "dreamlite", "dreamlite-mobile", "fibo-2"}
    | {"joyimage-edit", "modular-minimax-h3"}
    | {"modular-qwen-image-edit", "modular-qwen-image-edit-plus", "modular-qwen-image-layered", "modular-flux-2-dev"}
    | {"modular-qwen-image-2.1", "modular-qwen-image-2.1-turbo", "flux-3", "flux-3-distilled", "anima"}
)


def needs_torchvision(name: str) -> bool:
    needing = (module for module in families.modules() if getattr(module, "NEEDS_TORCHVISION", False))
    return name in NEEDS_TORCHVISION or any(name in module.PIPELINES for module in needing)


def torchvision_fault() -> str | None:
    """Return why torchvision cannot be used, None if it can."""
    if importlib.util.find_spec("torchvision") is None:
        return "torchvision is not installed"
    try:
        import_module("torchvision")
    except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch
        return f"torchvision cannot be imported: {error}"
    return None


def save_tiny(name: str, folder: Path) -> Path:
    """Save the tiny pipeline called `name` in `folder`."""
    return save(module_of(name).PIPELINES[name], folder)


def module_of(name: str) -> ModuleType:
    """Return the module that builds the tiny pipeline called `name`."""
    listed = next((module for module, names in MODULES.items() if name in names), None)
    if listed is not None:
        return import_module(f"tiny.{listed}")
    return next(module for module in families.modules() if name in module.PIPELINES)
