"""Trains the demo model's denoiser and text encoder together, on latents of a trained autoencoder."""

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

from demo.autoencoder import picture_tensor
from demo.pictures import SQUARE_SIZE, WIDE_SIZE, Prompt, draw_batch

# Small batches buy many steps while the loss falls fast; large ones settle it.
EARLY_BATCH, LATE_BATCH = 32, 64
EARLY_SHARE = 0.85
LEARNING_RATE = 1.2e-3
LAST_RATE_SHARE = 0.02
WARM_UP_STEPS = 200
EMA_DECAY = 0.999
GRADIENT_NORM = 1.0
# Captions that a batch leaves empty (for classifier-free guidance), and those that leave the place open.
EMPTY_SHARE = 0.1
PLACELESS_SHARE = 0.1
WIDE_SHARE = 0.25

SQUARE_DRAWINGS = 12  # pictures of each prompt that the pool holds
WIDE_DRAWINGS = 4
REFRESH_EVERY = 50
REFRESH_COUNT = 256
ENCODING_BATCH = 64
LOG_EVERY = 50


class LatentPool:
    """Latents of drawn pictures of one size, encoded once and renewed bit by bit."""

    def __init__(
        self,
        vae: AutoencoderKL,
        prompts: list[Prompt],
        size: tuple[int, int],
        drawings: int,
        rng: random.Random,
    ) -> None:
        self._vae, self._prompts, self._size, self._rng = vae, prompts, size, rng
        self.subjects = torch.arange(len(prompts)).repeat(drawings)  # which prompt each latent shows
        self.latents = torch.cat([self._encode(part) for part in self.subjects.split(ENCODING_BATCH)])

    @torch.no_grad()
    def _encode(self, subjects: torch.Tensor) -> torch.Tensor:
        pictures = draw_batch([self._prompts[n] for n in subjects.tolist()], self._size, self._rng.getrandbits(32))
        latents: torch.Tensor = self._vae.encode(picture_tensor(pictures)).latent_dist.sample()
        return latents * float(self._vae.config.scaling_factor)

    def refresh(self, count: int) -> None:
        """Replaces `count` latents, chosen by chance, with new drawings of the same prompts."""
        chosen = torch.randperm(len(self.subjects))[:count]
        for part in chosen.split(ENCODING_BATCH):
            self.latents[part] = self._encode(self.subjects[part])

    def sample(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [count, 4, H/4, W/4] and the numbers of their prompts [count]."""
        chosen = torch.randint(len(self.subjects), (count,))
        return self.latents[chosen], self.subjects[chosen]


class Captions:
    """The prompts' captions as token ids: full, without the place, and empty."""

    def __init__(self, tokenizer: CLIPTokenizer, prompts: list[Prompt]) -> None:
        full = [prompt.caption() for prompt in prompts]
        placeless = [Prompt(p.colour, p.shape, p.ground, None).caption() for p in prompts]
        self._count = len(prompts)
        texts = [*full, *placeless, ""]
        encoded = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")
        self._ids: torch.Tensor = encoded.input_ids

    def sample(self, subjects: torch.Tensor) -> torch.Tensor:
        """Token ids [N, tokens] for the prompts with these numbers, some of them cut short by chance."""
        chance = torch.rand(len(subjects))
        rows = torch.where(chance < EMPTY_SHARE + PLACELESS_SHARE, subjects + self._count, subjects)
        rows = torch.where(chance < EMPTY_SHARE, torch.full_like(rows, 2 * self._count), rows)
        return self._ids[rows]


@dataclass
class Training:
    """The state of a training run: what is trained, its moving average, and how far it has come."""

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
        """Everything that is trained."""
        return [*self.unet.parameters(), *self.text.parameters()]

    def set_rate(self, total_seconds: float) -> None:
        """Sets the learning rate: a warm-up counted in steps, then a cosine over the time planned."""
        done = min(1.0, self.seconds / total_seconds)
        rate = LAST_RATE_SHARE + (1 - LAST_RATE_SHARE) * (0.5 + 0.5 * math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate * min(1.0, (self.step + 1) / WARM_UP_STEPS)

    @torch.no_grad()
    def update_mean(self) -> None:
        """Moves the average towards the present weights, faster in the first steps."""
        decay = min(EMA_DECAY, (1 + self.step) / (10 + self.step))
        for mean, model in ((self.mean_unet, self.unet), (self.mean_text, self.text)):
            torch._foreach_lerp_(list(mean.parameters()), list(model.parameters()), 1 - decay)

    def save(self, path: Path) -> None:
        """Writes the state, whole or not at all."""
        aside = path.with_suffix(".part")
        parts = {name: getattr(self, name).state_dict() for name in _SAVED}
        torch.save({**parts, "step": self.step, "seconds": self.seconds}, aside)
        aside.replace(path)

    def load(self, path: Path) -> None:
        """Goes on from a state that `save` wrote."""
        state = torch.load(path)
        for name in _SAVED:
            getattr(self, name).load_state_dict(state[name])
        self.step, self.seconds = state["step"], state["seconds"]


_SAVED = ("unet", "text", "mean_unet", "mean_text", "optimizer")


def new_training(unet: UNet2DConditionModel, text: CLIPTextModel) -> Training:
    """A run that has not begun."""
    parameters = [*unet.parameters(), *text.parameters()]
    return Training(unet, text, torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=1e-3))


def denoising_loss(
    training: Training, scheduler: DDIMScheduler, latents: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The mean squared error of the predicted velocity, at timesteps spread evenly over the batch."""
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
    """Trains until the run has had `total_seconds` in all; calls `checkpoint` after each step.

    `pools` are the square and the wide one.
    """
    recent = 0.0
    while training.seconds < total_seconds:
        begun = time.monotonic()
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
        training.seconds += time.monotonic() - begun
        if training.step % LOG_EVERY == 0:
            loss_now = recent / LOG_EVERY
            print(
                f"denoiser step={training.step} seconds={training.seconds:.0f} loss={loss_now:.4f}",
                flush=True,
            )
            recent = 0.0
        checkpoint(training)


def new_pools(vae: AutoencoderKL, prompts: list[Prompt], rng: random.Random) -> tuple[LatentPool, LatentPool]:
    """The square and the wide pool."""
    return (
        LatentPool(vae, prompts, SQUARE_SIZE, SQUARE_DRAWINGS, rng),
        LatentPool(vae, prompts, WIDE_SIZE, WIDE_DRAWINGS, rng),
    )
