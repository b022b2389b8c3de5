"""The second grid, in the order of its page. Rows of new families are in their modules in `families`."""

from __future__ import annotations

import families
from parity.more.families import Clip, Family, both, image, sound, video

from shared.job_fields import Task

THREE_SOUNDS = (Task.TEXT_TO_AUDIO, Task.AUDIO_TO_AUDIO, Task.AUDIO_INPAINT)
IMAGES: tuple[Family, ...] = (
    image("PixArt-Alpha", "PixArtAlphaPipeline", "pixart-alpha", around="small_images"),
    image("Lumina-Next", "LuminaPipeline", "lumina-next"),
    image("Hunyuan-DiT", "HunyuanDiTPipeline", "hunyuan-dit", around="small_images"),
    image("HunyuanImage 2.1", "HunyuanImagePipeline", "hunyuan-image-2.1"),
    image("HiDream-I1", "HiDreamImagePipeline", "hidream", around="small_hidream"),
    image("CogView 3 Plus", "CogView3PlusPipeline", "cogview-3"),
    image("CogView 4", "CogView4Pipeline", "cogview-4"),
    image("Cosmos Predict 2", "Cosmos2TextToImagePipeline", "cosmos-2-t2i", around="without_guardrail"),
    image("Kandinsky 2.1", "KandinskyCombinedPipeline", "kandinsky-2.1"),
    image("Kandinsky 2.2", "KandinskyV22CombinedPipeline", "kandinsky-2.2"),
    image("Kandinsky 3", "Kandinsky3Pipeline", "kandinsky-3"),
    image("Kandinsky 5", "Kandinsky5T2IPipeline", "kandinsky-5-t2i", around="small_images"),
    image("DeepFloyd IF", "IFPipeline", "deepfloyd-if"),
    image("PRX", "PRXPipeline", "prx", around="small_latents"),
    image("PRX-Pixel", "PRXPixelPipeline", "prx-pixel", around="small_images"),
    image("Bria 3", "BriaPipeline", "bria"),
    image("Bria FIBO", "BriaFiboPipeline", "bria-fibo"),
    image("Bria FIBO 2", "BriaFibo2Pipeline", "fibo-2", around="few_layers"),
    image("Ovis-Image", "OvisImagePipeline", "ovis-image"),
    image("Krea 2", "Krea2Pipeline", "krea-2"),
    image("DreamLite", "DreamLitePipeline", "dreamlite"),
    image("DreamLite mobile", "DreamLiteMobilePipeline", "dreamlite-mobile", task=Task.EDIT),
    image("Ideogram 4", "Ideogram4Pipeline", "ideogram-4", around="few_layers"),
    image("JoyImage", "JoyImageEditPipeline", "joyimage-edit", task=Task.EDIT, around="small_images"),
    image("Kolors", "KolorsPipeline", "kolors"),
    image("Kolors", "KolorsImg2ImgPipeline", "kolors-i2i", task=Task.IMAGE_TO_IMAGE),
    image("LongCat-Image", "LongCatImagePipeline", "longcat-image"),
    image("NucleusMoE-Image", "NucleusMoEImagePipeline", "nucleus-image"),
    image("Z-Image Omni", "ZImageOmniPipeline", "z-image-omni"),
    image("OmniGen", "OmniGenPipeline", "omnigen"),
    image("Latent consistency", "LatentConsistencyModelPipeline", "lcm"),
    image("InstructPix2Pix", "StableDiffusionInstructPix2PixPipeline", "pix2pix", task=Task.EDIT, quick=True),
    image("InstructPix2Pix XL", "StableDiffusionXLInstructPix2PixPipeline", "pix2pix-xl", task=Task.EDIT),
    image("Self-attention guidance", "StableDiffusionSAGPipeline", "sag", fused=False),
    image("MultiDiffusion", "StableDiffusionPanoramaPipeline", "panorama"),
    image("PAG, Stable Diffusion 1.x", "StableDiffusionPAGPipeline", "sd-pag", fused=False),
    image("PAG, Stable Diffusion XL", "StableDiffusionXLPAGPipeline", "sdxl-pag", fused=False),
    image("PAG, Stable Diffusion 3", "StableDiffusion3PAGPipeline", "sd3-pag", fused=False),
    image("PAG, PixArt-Sigma", "PixArtSigmaPAGPipeline", "pixart-pag", around="small_images", fused=False),
    image("PAG, SANA", "SanaPAGPipeline", "sana-pag", around="small_images", fused=False),
    image("Chroma", "ChromaImg2ImgPipeline", "chroma-i2i", task=Task.IMAGE_TO_IMAGE),
)
VIDEOS: tuple[Family, ...] = (
    video("Kandinsky 5", "Kandinsky5T2VPipeline", "kandinsky-5-t2v", Clip(side=32)),
    video("Kandinsky 5", "Kandinsky5I2VPipeline", "kandinsky-5-i2v", Clip(17, 4, 32), task=Task.IMAGE_TO_VIDEO),
    video("LTX-Video", "LTXPipeline", "ltx-video", Clip(group=8), quick=True),
    video("LTX-Video", "LTXImageToVideoPipeline", "ltx-video-i2v", Clip(group=8), task=Task.IMAGE_TO_VIDEO),
    video("CogVideoX 2B", "CogVideoXPipeline", "cogvideox"),
    video("CogVideoX 5B", "CogVideoXPipeline", "cogvideox-5b"),
    video("CogVideoX 5B I2V", "CogVideoXImageToVideoPipeline", "cogvideox-i2v", task=Task.IMAGE_TO_VIDEO),
    video("Mochi", "MochiPipeline", "mochi", Clip(7, 6)),
    video("SkyReels-V2", "SkyReelsV2Pipeline", "skyreels-v2"),
    video("SkyReels-V2", "SkyReelsV2ImageToVideoPipeline", "skyreels-v2-i2v", task=Task.IMAGE_TO_VIDEO),
    video("Wan VACE", "WanVACEPipeline", "wan-vace"),
    video("AnyFlow", "AnyFlowPipeline", "anyflow"),
    video("ChronoEdit", "ChronoEditPipeline", "chrono-edit", Clip(5), task=Task.IMAGE_TO_VIDEO),
    video("Motif-Video", "MotifVideoPipeline", "motif-video"),
    video("Motif-Video", "MotifVideoImage2VideoPipeline", "motif-video-i2v", task=Task.IMAGE_TO_VIDEO),
    video("SANA-Video", "SanaVideoPipeline", "sana-video", around="small_sana_videos"),
    video("Latte", "LattePipeline", "latte", Clip(5, 1)),
    video("AnimateDiff", "AnimateDiffPipeline", "animatediff", Clip(5, 1)),
    video("AnimateDiff XL", "AnimateDiffSDXLPipeline", "animatediff-xl", Clip(5, 1)),
    both(video("MiniMax-H3", "MiniMaxH3ModularPipeline", "modular-minimax-h3", Clip(124, 123, 32))),
    both(video("Cosmos 3", "Cosmos3OmniModularPipeline", "modular-cosmos-3", fused=False)),
    both(
        video(
            "Cosmos 3 distilled",
            "Cosmos3DistilledModularPipeline",
            "modular-cosmos-3-distilled",
            same={"steps": 4, "guidance_scale": 1.0},
            fused=False,
        )
    ),
    video("PAG, AnimateDiff", "AnimateDiffPAGPipeline", "animatediff-pag", Clip(5, 1), fused=False),
)
SOUNDS: tuple[Family, ...] = (
    sound("ACE-Step 1.5", "AceStepPipeline", "ace-step", tasks=THREE_SOUNDS, quick=True),
    sound("Stable Audio Open", "StableAudioPipeline", "stable-audio", tasks=THREE_SOUNDS[:2]),
    sound(
        "Stable Audio 3",
        "StableAudio3Pipeline, StableAudio3AudioToAudioPipeline, StableAudio3InpaintPipeline",
        "stable-audio-3",
        tasks=THREE_SOUNDS,
        same={"guidance_scale": 1.0},
    ),
    sound("Stable Audio 3 base", "StableAudio3Pipeline", "stable-audio-3-base", tasks=(Task.TEXT_TO_AUDIO,)),
    sound("LongCat-AudioDiT", "LongCatAudioDiTPipeline", "longcat-audio", tasks=(Task.TEXT_TO_AUDIO,)),
    sound("ACE-Step 1.5 turbo", "AceStepPipeline", "ace-step-turbo", tasks=(Task.TEXT_TO_AUDIO,)),
)
GRID: tuple[Family, ...] = (*IMAGES, *VIDEOS, *SOUNDS, *(row for module in families.modules() for row in module.ROWS))
