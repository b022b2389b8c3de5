"""FLUX.2."""

from shared.architectures.family import Denoiser, Encoder, Family
from shared.architectures.stacking_rules import ROWS, SAME, VAE, forward
from shared.tasks import Task

FAMILY = Family(
    denoisers={
        # Its positions are those of the first row.
        "Flux2Transformer2DModel": Denoiser(
            forward("hidden_states", "encoder_hidden_states", "guidance", timestep=ROWS, img_ids=SAME, txt_ids=SAME),
            packed=True,
            adapters_per_row=True,
            split=True,
        )
    },
    encoders={"AutoencoderKLFlux2": Encoder(VAE)},
    siblings={("Flux2KleinPipeline", Task.INPAINT): "Flux2KleinInpaintPipeline"},
)
