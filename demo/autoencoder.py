"""Training of the demo model's autoencoder."""

import random
import time
from collections.abc import Iterator

import numpy as np
import torch
from diffusers import AutoencoderKL

from demo.drawings import SQUARE_SIZE, WIDE_SIZE, Prompt, draw_batch

BATCH = 8
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 100
# Keeps the posterior's deviation at a few percent of the latents' range: the decoder tolerates small errors.
KL_WEIGHT = 1e-4
WIDE_EVERY = 4
# Halves the time of a step on processors with bfloat16; the rest trains the colours at full precision.
BFLOAT16_SHARE = 0.75
LOG_EVERY = 50
SCALE_IMAGES = 256


def new_autoencoder() -> AutoencoderKL:
    """Return an untrained autoencoder: fully convolutional, [N, 3, H, W] to latents [N, 4, H/4, W/4]."""
    return AutoencoderKL(
        block_out_channels=(16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        sample_size=64,
        mid_block_add_attention=False,
        force_upcast=False,
    )


def image_tensor(images: np.ndarray) -> torch.Tensor:
    """Convert uint8 [N, H, W, 3] to float [N, 3, H, W] from -1 to 1."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().div(127.5).sub(1.0)


def training_batches(prompts: list[Prompt], rng: random.Random) -> Iterator[torch.Tensor]:
    """Yield batches of new drawings without end; every fourth batch is wide."""
    step = 0
    while True:
        size = WIDE_SIZE if step % WIDE_EVERY == WIDE_EVERY - 1 else SQUARE_SIZE
        yield image_tensor(draw_batch(rng.sample(prompts, BATCH), size, rng.getrandbits(32)))
        step += 1


def train_autoencoder(model: AutoencoderKL, prompts: list[Prompt], seconds: float, seed: int) -> None:
    """Train for about `seconds`, then set the scaling factor so that latents have unit variance."""
    torch.manual_seed(seed)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=1e-4)
    batches = training_batches(prompts, random.Random(seed))
    start, step, recent = time.monotonic(), 0, 0.0
    while (elapsed := time.monotonic() - start) < seconds:
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS)
        rate *= 0.5 + 0.5 * np.cos(np.pi * elapsed / seconds)
        for group in optimizer.param_groups:
            group["lr"] = max(rate, 1e-6)
        images = next(batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=elapsed < BFLOAT16_SHARE * seconds):
            posterior = model.encode(images).latent_dist
            decoded = model.decode(posterior.sample()).sample
        error = (decoded.float() - images).abs().mean()
        loss = error + KL_WEIGHT * posterior.kl().float().mean() / posterior.mean[0].numel()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, recent = step + 1, recent + error.item()
        if step % LOG_EVERY == 0:
            print(f"autoencoder step={step} seconds={elapsed:.0f} l1={recent / LOG_EVERY:.4f}", flush=True)
            recent = 0.0
    model.eval()
    images = image_tensor(draw_batch(random.Random(seed).sample(prompts, SCALE_IMAGES), SQUARE_SIZE, seed))
    model.register_to_config(scaling_factor=latent_scale(model, images))


@torch.no_grad()
def latent_scale(model: AutoencoderKL, images: torch.Tensor) -> float:
    """Return the factor that gives the latents of these images a standard deviation of one."""
    deviation = float(model.encode(images).latent_dist.mean.std())
    return round(1.0 / deviation, 4)
