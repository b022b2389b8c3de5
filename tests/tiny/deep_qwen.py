"""Qwen3-VL with as many layers as pipelines read, narrow ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLModel

NARROW = 16


def for_generation(tokenizer: Qwen2Tokenizer, layers: int) -> Qwen3VLForConditionalGeneration:
    return Qwen3VLForConditionalGeneration(_config(tokenizer, layers))


def headless(tokenizer: Qwen2Tokenizer, layers: int) -> Qwen3VLModel:
    return Qwen3VLModel(_config(tokenizer, layers))


def _config(tokenizer: Qwen2Tokenizer, layers: int) -> Qwen3VLConfig:
    token: Callable[[str], Any] = tokenizer.convert_tokens_to_ids
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": NARROW,
            "intermediate_size": 24,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 16,
            "out_hidden_size": NARROW,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
