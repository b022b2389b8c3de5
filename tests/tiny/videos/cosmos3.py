"""Tiny Cosmos 3: the distilled and the whole modular pipeline, without the safety checker."""

from __future__ import annotations

from typing import Any

from diffusers import (
    Cosmos3DistilledModularPipeline,
    Cosmos3OmniModularPipeline,
    Cosmos3OmniPipeline,
    Cosmos3OmniTransformer,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from tiny import tokens
from tiny.videos.wan import wan_2_2_ti2v

SIGMAS = [1.0, 0.9, 0.6, 0.3]


def _parts(scheduler: Any) -> dict[str, Any]:
    tokenizer = tokens.qwen()
    return {
        "text_tokenizer": tokenizer,
        "vae": wan_2_2_ti2v().vae,
        "transformer": Cosmos3OmniTransformer(
            hidden_size=32,
            head_dim=16,
            intermediate_size=48,
            latent_channel=4,
            patch_latent_dim=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_hidden_layers=2,
            rope_axes_dim=(4, 2, 2),
            vocab_size=len(tokenizer),
        ),
        "scheduler": scheduler,
        "enable_safety_checker": False,
    }


def _built(pipeline: Any, scheduler: Any, **settings: Any) -> Any:
    pipeline.update_components(**_parts(scheduler), **settings)
    return pipeline


def distilled() -> Any:
    return _built(Cosmos3DistilledModularPipeline(), FlowMatchEulerDiscreteScheduler(), distilled_sigmas=SIGMAS)


def _scheduler() -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def omni() -> Any:
    return _built(Cosmos3OmniModularPipeline(), _scheduler())


def classic() -> Cosmos3OmniPipeline:
    return Cosmos3OmniPipeline(**_parts(_scheduler()))


PIPELINES = {"modular-cosmos-3-distilled": distilled, "modular-cosmos-3": omni, "cosmos-3": classic}
