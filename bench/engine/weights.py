"""`python -m bench.engine.weights`: weights of published models by format, and with layerwise casting.

They are counted from the shapes of the models, which takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

from bench.engine import real_shapes
from shared.config.weight_formats import HeldAs
from worker.engine.weights.requirements import tensor_bytes

GIB = 2**30
XXL: Mapping[str, Any] = {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "is_gated_act": True}
PUBLISHED: Mapping[str, Callable[[], torch.nn.Module]] = {
    "SDXL": lambda: real_shapes.real_sdxl().unet,
    "SD3 Medium": lambda: real_shapes.real_sd3().transformer,
    "Z-Image": ZImageTransformer2DModel,
    "FLUX.1": lambda: FluxTransformer2DModel(guidance_embeds=True),
    "Wan 2.1 14B, each denoiser of Wan 2.2 A14B": WanTransformer3DModel,
    "Qwen-Image": QwenImageTransformer2DModel,
    "T5-XXL, text encoder of FLUX.1 and SD3": lambda: T5EncoderModel(T5Config(vocab_size=32128, **XXL)),
    "UMT5-XXL, text encoder of Wan": lambda: UMT5EncoderModel(UMT5Config(vocab_size=256384, **XXL)),
}


def main() -> None:
    print("| GiB of weights | bfloat16 | int8, fp8 | nf4 | float8, cast |\n|---|---|---|---|---|")
    for name, build in PUBLISHED.items():
        with torch.device("meta"):
            tensors = build().state_dict()
        columns: tuple[HeldAs | None, ...] = (None, "torchao-int8", "bitsandbytes-nf4")
        columns += () if "text encoder" in name else ("float8_e4m3fn",)
        sizes = [sum(tensor_bytes(key, value.shape, 2, one) for key, value in tensors.items()) for one in columns]
        print(f"| {name} | {' | '.join(f'{size / GIB:.1f}' for size in sizes)} |", flush=True)


if __name__ == "__main__":
    main()
