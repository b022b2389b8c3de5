"""`python -m demo.train_scorer --out demo/scorer`: train the scorer of the demo model, a small CLIP model.

Drawings teach it the captions. Images that the demo model makes in few steps and with much guidance teach it what
fails: from the predicted image of an early step on, each counts as wrong if its last one does not show its prompt.
"""

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from torch.nn import functional
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer

from demo.checker import matches
from demo.components import CAPTION_TOKENS, TEXT_WIDTH, new_tokenizer
from demo.drawings import COLOURS, PLACES, SHAPES, SQUARE_SIZE, Prompt, draw_batch, split_prompts

SEED = 3
BATCH = 80
NEAR_MISSES = 2  # captions for each image that differ from its own in one word
RATE = 1.5e-3
IMAGE_WIDTH = 96
EMBEDDING = 48
SAMPLES = 32  # of one call of the demo model
STEPS, GUIDANCE = (3, 8), (1.5, 9.0)
EARLIEST_SHARE = 0.25  # of the steps: predicted images from there on are kept
LOG_EVERY = 100
REPORTED = 400


def new_scorer(tokenizer: CLIPTokenizer) -> CLIPModel:
    """Return an untrained scorer of images of 64 x 64."""
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": CAPTION_TOKENS,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "image_size": SQUARE_SIZE[0],
        "patch_size": 8,
        "hidden_size": IMAGE_WIDTH,
        "intermediate_size": 2 * IMAGE_WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=EMBEDDING))


@dataclass(frozen=True)
class Images:
    """Images as uint8 [N, H, W, 3], the prompt of each, and whether it is to count as showing it."""

    pixels: np.ndarray[Any, Any]
    prompts: list[Prompt]
    good: list[bool]


def made_images(pipeline: Any, prompts: list[Prompt], seconds: float, rng: random.Random) -> Images:
    """Return images that the demo model predicts at its steps, for some seconds."""
    pixels: list[np.ndarray[Any, Any]] = []
    shown: list[Prompt] = []
    good: list[bool] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        chosen = rng.sample(prompts, SAMPLES)
        predicted = _predictions(pipeline, chosen, rng)
        right = [matches(image, prompt) for image, prompt in zip(predicted[-1], chosen, strict=True)]
        pixels += predicted
        shown += chosen * len(predicted)
        good += right * len(predicted)
    return Images(np.concatenate(pixels), shown, good)


def _predictions(pipeline: Any, prompts: list[Prompt], rng: random.Random) -> list[np.ndarray[Any, Any]]:
    """Return the predicted images of the later steps of one call, the last of which are its results."""
    steps, predicted = rng.randint(*STEPS), list[torch.Tensor]()
    plain = pipeline.scheduler.step

    def step(output: torch.Tensor, time_: Any, sample: torch.Tensor, **options: Any) -> Any:
        result = plain(output, time_, sample, **{**options, "return_dict": True})
        predicted.append(result.pred_original_sample)
        return (result.prev_sample,)

    vars(pipeline.scheduler)["step"] = step
    try:
        pipeline(
            [prompt.caption() for prompt in prompts],
            width=SQUARE_SIZE[0],
            height=SQUARE_SIZE[1],
            num_inference_steps=steps,
            guidance_scale=rng.uniform(*GUIDANCE),
            generator=torch.Generator().manual_seed(rng.getrandbits(32)),
            output_type="latent",
        )
    finally:
        del vars(pipeline.scheduler)["step"]
    kept = predicted[max(0, int(EARLIEST_SHARE * steps) - 1) :]
    return [_decoded(pipeline.vae, latents) for latents in kept]


@torch.no_grad()
def _decoded(vae: Any, latents: torch.Tensor) -> np.ndarray[Any, Any]:
    images = vae.decode(latents / vae.config.scaling_factor).sample
    return np.asarray(((images / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy())


def near_misses(prompt: Prompt, rng: random.Random) -> list[Prompt]:
    """Return prompts that differ in one attribute."""
    colour = rng.choice([one for one in COLOURS if one not in (prompt.colour, prompt.ground)])
    ground = rng.choice([one for one in COLOURS if one not in (prompt.colour, prompt.ground)])
    shape = rng.choice([one for one in SHAPES if one != prompt.shape])
    place = rng.choice([one for one in PLACES if one != prompt.place])
    missed = [
        Prompt(colour, prompt.shape, prompt.ground, prompt.place),
        Prompt(prompt.colour, shape, prompt.ground, prompt.place),
        Prompt(prompt.colour, prompt.shape, ground, prompt.place),
        Prompt(prompt.colour, prompt.shape, prompt.ground, place),
    ]
    return rng.sample(missed, NEAR_MISSES)


def image_tensor(pixels: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


class Trainer:
    """Trains a scorer with a logistic loss of each pair of an image and a caption."""

    def __init__(self, model: CLIPModel, tokenizer: CLIPTokenizer, drawn: Images, made: Images) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._sets = (drawn, made)
        self._rng = random.Random(SEED)
        self._scale, self._bias = (torch.nn.Parameter(torch.tensor(value)) for value in (2.3, -3.0))
        parameters = [*model.parameters(), self._scale, self._bias]
        self._optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.05)

    def step(self, share: float) -> float:
        """Take one step, at a share of the time; return its loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = RATE * min(1.0, share * 30 + 0.02) * (0.5 + 0.5 * float(np.cos(np.pi * share)))
        images, prompts, good = self._batch()
        misses = [near_misses(prompt, self._rng) for prompt in prompts]
        captions = [*prompts, *(one for of_image in misses for one in of_image)]
        logits = self._logits(images, captions)
        count = len(prompts)
        own, near = logits[:, :count].diagonal(), logits[:, count:].view(count, count, NEAR_MISSES)
        near = near[torch.arange(count), torch.arange(count)]
        others = logits[:, :count][~torch.tensor([[one == two for two in prompts] for one in prompts])]
        loss = functional.softplus(-own[good]).mean() + functional.softplus(near).mean()
        loss = loss + functional.softplus(others).mean() + functional.softplus(own[~good]).mean()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return loss.item()

    def _batch(self) -> tuple[torch.Tensor, list[Prompt], torch.Tensor]:
        pixels, prompts, good = [], list[Prompt](), list[bool]()
        for one in self._sets:
            chosen = self._rng.sample(range(len(one.prompts)), BATCH // 2)
            pixels.append(one.pixels[chosen])
            prompts += [one.prompts[at] for at in chosen]
            good += [one.good[at] for at in chosen]
        return image_tensor(np.concatenate(pixels)), prompts, torch.tensor(good)

    def _logits(self, images: torch.Tensor, captions: list[Prompt]) -> torch.Tensor:
        texts = [prompt.caption() for prompt in captions]
        tokens = self._tokenizer(texts, padding="max_length", max_length=CAPTION_TOKENS, return_tensors="pt")
        of_texts = self.model.get_text_features(tokens.input_ids).pooler_output
        of_images = self.model.get_image_features(images).pooler_output
        similar = functional.normalize(of_images, dim=-1) @ functional.normalize(of_texts, dim=-1).T
        return similar * self._scale.exp() + self._bias


def report(model: CLIPModel, tokenizer: CLIPTokenizer, held_out: Images) -> str:
    """Return how often the scorer puts a right image above a wrong one of other prompts' own captions."""
    texts = [prompt.caption() for prompt in held_out.prompts]
    tokens = tokenizer(texts, padding="max_length", max_length=CAPTION_TOKENS, return_tensors="pt").input_ids
    with torch.no_grad():
        of_texts = model.get_text_features(tokens).pooler_output
        of_images = model.get_image_features(image_tensor(held_out.pixels)).pooler_output
    scores = functional.cosine_similarity(of_images, of_texts)
    good = torch.tensor(held_out.good)
    above = (scores[good][:, None] > scores[~good][None]).float().mean()
    return f"images={len(good)} right={good.float().mean():.3f} right_above_wrong={above:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--out", type=Path, required=True, help="folder of the scorer")
    parser.add_argument("--minutes", type=float, default=15, help="of training, after the images are made")
    parser.add_argument("--image-minutes", type=float, default=4, help="for images of the demo model")
    args = parser.parse_args()
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    pipeline: Any = DiffusionPipeline.from_pretrained(args.model, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    prompts, held_out = split_prompts()
    drawn = Images(draw_batch(prompts * 8, SQUARE_SIZE, SEED), prompts * 8, [True] * (8 * len(prompts)))
    made = made_images(pipeline, prompts, args.image_minutes * 60, rng)
    others = made_images(pipeline, held_out, 20, rng)
    some = rng.sample(range(len(others.good)), min(REPORTED, len(others.good)))
    others = Images(others.pixels[some], [others.prompts[at] for at in some], [others.good[at] for at in some])
    print(f"made={len(made.good)} right={np.mean(made.good):.3f}", flush=True)
    tokenizer = new_tokenizer()
    model = new_scorer(tokenizer)
    trainer, started, step = Trainer(model, tokenizer, drawn, made), time.monotonic(), 0
    while (share := (time.monotonic() - started) / (60 * args.minutes)) < 1:
        loss = trainer.step(share)
        if step % LOG_EVERY == 0:
            print(f"step={step} share={share:.3f} loss={loss:.3f} {report(model, tokenizer, others)}", flush=True)
        step += 1
    model.eval().half().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    size = {"height": SQUARE_SIZE[1], "width": SQUARE_SIZE[0]}
    half = [0.5, 0.5, 0.5]
    CLIPImageProcessor(size=size, crop_size=size, image_mean=half, image_std=half).save_pretrained(args.out)
    print(f"steps={step} {report(model.float(), tokenizer, others)}", flush=True)


if __name__ == "__main__":
    main()
