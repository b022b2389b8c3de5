"""`python -m demo.train --out demo/model --state /tmp/demo-training`: train the demo model.

The autoencoder comes first, then the denoiser with the text encoder. A stopped run continues when it is started again
with the same `--state` folder.
"""

import argparse
import random
from pathlib import Path

import torch
from diffusers import AutoencoderKL

from demo.autoencoder import new_autoencoder, train_autoencoder
from demo.components import assemble, new_denoiser, new_scheduler, new_text_encoder, new_tokenizer, save
from demo.denoiser import Captions, Training, new_pools, new_training, train_denoiser
from demo.drawings import split_prompts

SEED = 1
STATE_SECONDS = 120.0


class Checkpoints:
    """Saves the training state every `STATE_SECONDS`, and the pipeline every `export_seconds`."""

    def __init__(self, vae: AutoencoderKL, state: Path, out: Path, export_seconds: float) -> None:
        self._vae, self._state, self._out = vae, state, out
        self._export_seconds = export_seconds
        self._tokenizer = new_tokenizer()
        self._next_state, self._next_export = STATE_SECONDS, 0.0

    def __call__(self, training: Training) -> None:
        if training.seconds >= self._next_state:
            training.save(self._state)
            self._next_state = training.seconds + STATE_SECONDS
        if training.seconds >= self._next_export:
            self.export(training)
            self._next_export = training.seconds + self._export_seconds

    def export(self, training: Training) -> None:
        """Save the pipeline with the averaged weights."""
        save(assemble(self._vae, training.mean_text, self._tokenizer, training.mean_unet), self._out)
        print(f"saved step={training.step} out={self._out}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pipeline")
    parser.add_argument("--state", type=Path, required=True, help="folder of the training state")
    parser.add_argument("--vae-minutes", type=float, default=16, help="for the autoencoder")
    parser.add_argument("--minutes", type=float, default=65, help="for the denoiser")
    parser.add_argument("--export-minutes", type=float, default=10, help="between two saves of the pipeline")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.state.mkdir(parents=True, exist_ok=True)
    prompts, _ = split_prompts()
    torch.manual_seed(SEED)

    vae_folder = args.state / "vae"
    if vae_folder.exists():
        vae = AutoencoderKL.from_pretrained(vae_folder)
        # Otherwise the saved model would name a folder of this machine.
        vae.register_to_config(_name_or_path=None)
    else:
        vae = new_autoencoder()
        train_autoencoder(vae, prompts, args.vae_minutes * 60, SEED)
        vae.save_pretrained(vae_folder)
    vae.eval().requires_grad_(False)

    tokenizer = new_tokenizer()
    training = new_training(new_denoiser(), new_text_encoder(tokenizer))
    state = args.state / "denoiser.pt"
    if state.exists():
        training.load(state)
    checkpoints = Checkpoints(vae, state, args.out, args.export_minutes * 60)
    pools = new_pools(vae, prompts, random.Random(SEED + training.step))
    train_denoiser(training, new_scheduler(), pools, Captions(tokenizer, prompts), args.minutes * 60, checkpoints)
    training.save(state)
    checkpoints.export(training)


if __name__ == "__main__":
    main()
