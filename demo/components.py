"""Untrained components of the demo pipeline, and saving of the pipeline."""

import json
import os
import tempfile
from pathlib import Path

from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from demo.drawings import COLOURS, PLACES, SHAPES

CAPTION_TOKENS = 24
TEXT_WIDTH = 64
START, END = "<|startoftext|>", "<|endoftext|>"


def new_tokenizer() -> CLIPTokenizer:
    """Return a tokenizer with one token per caption word, and one per byte of other text."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [START, END, *letters, *(f"{letter}</w>" for letter in letters)]
    merges: list[tuple[str, str]] = []
    for word in ("a", "an", "on", "ground", *COLOURS, *SHAPES, *PLACES):
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            # From the end, so that the merges of a word do not apply to the start of another word.
            pair = (parts[-2], parts[-1])
            parts[-2:] = ["".join(pair)]
            if pair not in merges:
                merges.append(pair)
                tokens.append(parts[-1])
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    # `merges` is typed as strings, and passed to a class that takes pairs.
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=CAPTION_TOKENS)


def new_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Return an untrained text encoder: token ids [N, 24] to states [N, 24, 64]."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CAPTION_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def new_denoiser() -> UNet2DConditionModel:
    """Return an untrained denoiser of latents [N, 4, H/4, W/4] with cross-attention at both resolutions."""
    return UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 80),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        cross_attention_dim=TEXT_WIDTH,
        # Diffusers reads this as the number of heads.
        attention_head_dim=(2, 4),
        # Self-attention at the finer resolution takes a quarter of a step; convolutions suffice there.
        only_cross_attention=(True, False),
        norm_num_groups=1,
    )


def new_scheduler() -> DDIMScheduler:
    """Return the noise schedule: v-prediction that ends in pure noise.

    A flat colour is visible through strong noise: with anything less than pure noise the ground would be determined.
    """
    return DDIMScheduler(
        beta_schedule="linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=True,
        steps_offset=1,
    )


def assemble(
    vae: AutoencoderKL, text: CLIPTextModel, tokenizer: CLIPTokenizer, unet: UNet2DConditionModel
) -> StableDiffusionPipeline:
    """Return the pipeline of these components."""
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=text,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=new_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def save(pipeline: StableDiffusionPipeline, folder: Path) -> None:
    """Save the pipeline; each file is replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        pipeline.save_pretrained(temporary)
        _write_vocabulary(Path(temporary) / "tokenizer", pipeline.tokenizer)
        for file in sorted(path for path in Path(temporary).rglob("*") if path.is_file()):
            target = folder / file.relative_to(temporary)
            target.parent.mkdir(exist_ok=True)
            file.chmod(0o644)
            os.replace(file, target)


def _write_vocabulary(folder: Path, tokenizer: CLIPTokenizer) -> None:
    """Add vocab.json and merges.txt, which older releases of transformers read."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False), encoding="utf-8")
    lines = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n", encoding="utf-8")
