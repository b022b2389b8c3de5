"""Training of the demo model's denoiser and text encoder, on latents of a trained autoencoder."""

import copy
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTokenizer

from demo.autoencoder import image_tensor
from demo.drawings import SQUARE_SIZE, WIDE_SIZE, Prompt, draw_batch

# Small batches give many steps while the loss falls fast; large ones reduce its noise.
EARLY_BATCH, LATE_BATCH = 32, 64
EARLY_SHARE = 0.85
LEARNING_RATE = 1.2e-3
LAST_RATE_SHARE = 0.02
WARM_UP_STEPS = 200
EMA_DECAY = 0.999
GRADIENT_NORM = 1.0
# Captions that are empty (for classifier-free guidance), and those without a place.
EMPTY_SHARE = 0.1
PLACELESS_SHARE = 0.1
WIDE_SHARE = 0.25

SQUARE_DRAWINGS = 12  # images per prompt in the pool
WIDE_DRAWINGS = 4
REFRESH_EVERY = 50
REFRESH_COUNT = 256
ENCODING_BATCH = 64
LOG_EVERY = 50


class LatentPool:
    """Latents of drawings of one size, encoded once and replaced gradually."""

    def __init__(
        self,
        vae: AutoencoderKL,
        prompts: list[Prompt],
        size: tuple[int, int],
        drawings: int,
        rng: random.Random,
    ) -> None:
        self._vae, self._prompts, self._size, self._rng = vae, prompts, size, rng
        self.subjects = torch.arange(len(prompts)).repeat(drawings)  # the prompt number of each latent
        self.latents = torch.cat([self._encode(part) for part in self.subjects.split(ENCODING_BATCH)])

    @torch.no_grad()
    def _encode(self, subjects: torch.Tensor) -> torch.Tensor:
        images = draw_batch([self._prompts[n] for n in subjects.tolist()], self._size, self._rng.getrandbits(32))
        latents: torch.Tensor = self._vae.encode(image_tensor(images)).latent_dist.sample()
        return latents * float(self._vae.config.scaling_factor)

    def refresh(self, count: int) -> None:
        """Replace `count` random latents with new drawings of the same prompts."""
        chosen = torch.randperm(len(self.subjects))[:count]
        for part in chosen.split(ENCODING_BATCH):
            self.latents[part] = self._encode(self.subjects[part])

    def sample(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return latents [count, 4, H/4, W/4] and their prompt numbers [count]."""
        chosen = torch.randint(len(self.subjects), (count,))
        return self.latents[chosen], self.subjects[chosen]


class Captions:
    """Captions of prompts as token ids: complete, without the place, and empty."""

    def __init__(self, tokenizer: CLIPTokenizer, prompts: list[Prompt]) -> None:
        full = [prompt.caption() for prompt in prompts]
        placeless = [Prompt(p.colour, p.shape, p.ground, None).caption() for p in prompts]
        self._count = len(prompts)
        texts = [*full, *placeless, ""]
        encoded = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")
        self._ids: torch.Tensor = encoded.input_ids

    def sample(self, subjects: torch.Tensor) -> torch.Tensor:
        """Return token ids [N, tokens] of these prompts, some at random without place, or empty."""
        random_values = torch.rand(len(subjects))
        rows = torch.where(random_values < EMPTY_SHARE + PLACELESS_SHARE, subjects + self._count, subjects)
        rows = torch.where(random_values < EMPTY_SHARE, torch.full_like(rows, 2 * self._count), rows)
        return self._ids[rows]


@dataclass
class Training:
    """The state of a training run: the models, their moving averages, and the progress."""

    unet: UNet2DConditionModel
    text: CLIPTextModel
    optimizer: torch.optim.Optimizer
    mean_unet: UNet2DConditionModel = field(init=False)
    mean_text: CLIPTextModel = field(init=False)
    step: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.mean_unet = copy.deepcopy(self.unet).eval().requires_grad_(False)
        self.mean_text = copy.deepcopy(self.text).eval().requires_grad_(False)

    def parameters(self) -> list[torch.nn.Parameter]:
        return [*self.unet.parameters(), *self.text.parameters()]

    def set_rate(self, total_seconds: float) -> None:
        """Set the learning rate: a warm-up in steps, then a cosine over `total_seconds`."""
        progress = min(1.0, self.seconds / total_seconds)
        rate = LAST_RATE_SHARE + (1 - LAST_RATE_SHARE) * (0.5 + 0.5 * math.cos(math.pi * progress))
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate * min(1.0, (self.step + 1) / WARM_UP_STEPS)

    @torch.no_grad()
    def update_mean(self) -> None:
        """Move the averages towards the current weights, faster in the first steps."""
        decay = min(EMA_DECAY, (1 + self.step) / (10 + self.step))
        for mean, model in ((self.mean_unet, self.unet), (self.mean_text, self.text)):
            torch._foreach_lerp_(list(mean.parameters()), list(model.parameters()), 1 - decay)

    def save(self, path: Path) -> None:
        """Write the state atomically."""
        temporary = path.with_suffix(".part")
        states = {name: getattr(self, name).state_dict() for name in _SAVED}
        torch.save({**states, "step": self.step, "seconds": self.seconds}, temporary)
        temporary.replace(path)

    def load(self, path: Path) -> None:
        """Continue from a saved state."""
        state = torch.load(path)
        for name in _SAVED:
            getattr(self, name).load_state_dict(state[name])
        self.step, self.seconds = state["step"], state["seconds"]


_SAVED = ("unet", "text", "mean_unet", "mean_text", "optimizer")


def new_training(unet: UNet2DConditionModel, text: CLIPTextModel) -> Training:
    """Return the state before the first step."""
    parameters = [*unet.parameters(), *text.parameters()]
    return Training(unet, text, torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=1e-3))


def denoising_loss(
    training: Training, scheduler: DDIMScheduler, latents: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return the mean squared error of the predicted velocity, at timesteps stratified over the batch."""
    count = len(latents)
    strata = (torch.arange(count) + torch.rand(count)) / count
    timesteps = (strata * scheduler.config.num_train_timesteps).long()
    noise = torch.randn_like(latents)
    noisy = scheduler.add_noise(latents, noise, timesteps)
    target = scheduler.get_velocity(latents, noise, timesteps)
    states = training.text(ids)[0]
    predicted = training.unet(noisy, timesteps, states).sample
    return torch.nn.functional.mse_loss(predicted.float(), target)


def train_denoiser(
    training: Training,
    scheduler: DDIMScheduler,
    pools: tuple[LatentPool, LatentPool],
    captions: Captions,
    total_seconds: float,
    checkpoint: Callable[[Training], None],
) -> None:
    """Train until the run has taken `total_seconds`; call `checkpoint` after each step.

    `pools` are the square and the wide one.
    """
    recent = 0.0
    while training.seconds < total_seconds:
        started_at = time.monotonic()
        training.set_rate(total_seconds)
        pool = pools[1] if random.random() < WIDE_SHARE else pools[0]
        batch = EARLY_BATCH if training.seconds < EARLY_SHARE * total_seconds else LATE_BATCH
        latents, subjects = pool.sample(batch)
        loss = denoising_loss(training, scheduler, latents, captions.sample(subjects))
        training.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(training.parameters(), GRADIENT_NORM)
        training.optimizer.step()
        training.step += 1
        training.update_mean()
        recent += loss.item()
        if training.step % REFRESH_EVERY == 0:
            pool.refresh(REFRESH_COUNT)
        training.seconds += time.monotonic() - started_at
        if training.step % LOG_EVERY == 0:
            loss_now = recent / LOG_EVERY
            print(
                f"denoiser step={training.step} seconds={training.seconds:.0f} loss={loss_now:.4f}",
                flush=True,
            )
            recent = 0.0
        checkpoint(training)


def new_pools(vae: AutoencoderKL, prompts: list[Prompt], rng: random.Random) -> tuple[LatentPool, LatentPool]:
    """Return the square and the wide pool."""
    return (
        LatentPool(vae, prompts, SQUARE_SIZE, SQUARE_DRAWINGS, rng),
        LatentPool(vae, prompts, WIDE_SIZE, WIDE_DRAWINGS, rng),
    )
