"""Kandinsky 2, 3, 5 and 6; the denoiser of Kandinsky 2 is that of Stable Diffusion."""

from shared.architectures.family import Denoiser, Encoder, Family
from shared.architectures.stacking_rules import ROWS, SHARED, TIMES, VAE, forward

FAMILY = Family(
    denoisers={
        # The priors of Kandinsky 2 denoise one embedding per image.
        "PriorTransformer": Denoiser(
            forward("hidden_states", "proj_embedding", "encoder_hidden_states", "attention_mask", timestep=TIMES)
        ),
        "Kandinsky3UNet": Denoiser(
            forward("sample", "encoder_hidden_states", "encoder_attention_mask", timestep=TIMES)
        ),
        # Positions are functions of the shapes. Text has no mask: only prompts of equal length fuse.
        "Kandinsky5Transformer3DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "pooled_projections",
                timestep=ROWS,
                visual_rope_pos=SHARED,
                text_rope_pos=SHARED,
            )
        ),
        # Text is padded to one length; the pipeline drops a mask that hides nothing.
        "Kandinsky6Transformer3DModel": Denoiser(
            forward(
                "hidden_states",
                "audio_hidden_states",
                "encoder_hidden_states",
                "encoder_attention_mask",
                "pooled_projections",
                "visual_token_type_ids",
                timestep=TIMES,
                visual_rope_pos=SHARED,
            )
        ),
        # Of tiles, which have one of three shapes for all sizes of videos.
        "Kandinsky6SRTransformer3DModel": Denoiser(forward("hidden_states", timestep=TIMES)),
    },
    encoders={
        "Kandinsky6SRVAE": Encoder(VAE),
        "Kandinsky6SRLatentUpscalerBank": Encoder(forward("latents")),
    },
    upscalers={"Kandinsky6SRPipeline": (2.25, 2, 4)},
    tiled=frozenset({"Kandinsky6SRPipeline"}),
)
