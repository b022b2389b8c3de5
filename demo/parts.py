"""Builds the untrained parts of the demo pipeline around its autoencoder, and saves the whole."""

import json
import os
import tempfile
from pathlib import Path

from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from demo.pictures import COLOURS, PLACES, SHAPES

CAPTION_TOKENS = 24
TEXT_WIDTH = 64
START, END = "<|startoftext|>", "<|endoftext|>"


def new_tokenizer() -> CLIPTokenizer:
    """A tokenizer with one token for each word of the captions and one for each byte of any other text."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [START, END, *letters, *(f"{letter}</w>" for letter in letters)]
    merges: list[tuple[str, str]] = []
    for word in ("a", "an", "on", "ground", *COLOURS, *SHAPES, *PLACES):
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            # From the end, so that no word's merges break another word's beginning.
            pair = (parts[-2], parts[-1])
            parts[-2:] = ["".join(pair)]
            if pair not in merges:
                merges.append(pair)
                tokens.append(parts[-1])
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    # Its merges are typed as strings but go straight to a class that takes pairs.
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=CAPTION_TOKENS)  # type: ignore[arg-type]


def new_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """An untrained text encoder: token ids [N, 24] to states [N, 24, 64]."""
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
    """An untrained denoiser of latents [N, 4, H/4, W/4] that reads the caption at both of its resolutions."""
    return UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 80),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        cross_attention_dim=TEXT_WIDTH,
        # Diffusers reads this as the number of heads.
        attention_head_dim=(2, 4),
        # Self-attention at the finer resolution costs a quarter of a step; convolutions do for it there.
        only_cross_attention=(True, False),
        norm_num_groups=1,
    )


def new_scheduler() -> DDIMScheduler:
    """The noise schedule: v-prediction that ends in pure noise.

    Flat colour shows through strong noise, so nothing short of pure noise leaves the ground open.
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
    """The pipeline of these parts."""
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
    """Saves the pipeline; a reader of the folder meets whole files only, old or new."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        pipeline.save_pretrained(aside)
        _write_vocabulary(Path(aside) / "tokenizer", pipeline.tokenizer)
        for file in sorted(path for path in Path(aside).rglob("*") if path.is_file()):
            target = folder / file.relative_to(aside)
            target.parent.mkdir(exist_ok=True)
            file.chmod(0o644)
            os.replace(file, target)


def _write_vocabulary(folder: Path, tokenizer: CLIPTokenizer) -> None:
    """Adds vocab.json and merges.txt, which older releases of transformers read."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False), encoding="utf-8")
    lines = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n", encoding="utf-8")
