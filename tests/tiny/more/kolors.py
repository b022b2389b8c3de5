"""Tiny Kolors: the denoiser of Stable Diffusion XL with ChatGLM as text encoder."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import sentencepiece
import torch
from diffusers import EulerDiscreteScheduler, KolorsImg2ImgPipeline, KolorsPipeline
from diffusers.pipelines.kolors import ChatGLMModel, ChatGLMTokenizer
from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig
from tiny import components, tokens

_FILES = TemporaryDirectory()  # the tokenizer copies its file when it is saved


@cache
def _vocabulary() -> Path:
    """Return a file of single letters."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([tokens.LETTERS]),
        model_writer=model,
        model_type="char",
        vocab_size=len(tokens.LETTERS) + 4,
        minloglevel=2,
    )
    path = Path(_FILES.name) / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


def _text_encoder(tokenizer: ChatGLMTokenizer) -> ChatGLMModel:
    model = ChatGLMModel(
        ChatGLMConfig(
            num_layers=2,
            padded_vocab_size=tokenizer.vocab_size,
            hidden_size=tokens.WIDTH,
            ffn_hidden_size=37,
            kv_channels=16,
            num_attention_heads=2,
            seq_length=256,
            multi_query_attention=True,
            add_qkv_bias=True,
            original_rope=True,
        ),
        empty_init=False,
    )
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.ones_(parameter)  # diffusers leaves them empty
    return model


def kolors() -> KolorsPipeline:
    tokenizer = ChatGLMTokenizer(str(_vocabulary()))
    return KolorsPipeline(
        vae=components.vae(),
        text_encoder=_text_encoder(tokenizer),
        tokenizer=tokenizer,
        unet=components.unet(
            cross_attention_dim=24,
            encoder_hid_dim=tokens.WIDTH,
            encoder_hid_dim_type="text_proj",
            transformer_layers_per_block=(1, 2),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + tokens.WIDTH,
        ),
        scheduler=EulerDiscreteScheduler(beta_schedule="scaled_linear"),
    )


def kolors_from_images() -> KolorsImg2ImgPipeline:
    return KolorsImg2ImgPipeline(**kolors().components)


PIPELINES = {"kolors": kolors, "kolors-i2i": kolors_from_images}
