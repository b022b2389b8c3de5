"""Bria 3, Bria FIBO and FIBO 2."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import JOINT_MASK, LONGEST, PADDED, ROWS, SAME, Argument, Kind, forward

FAMILY = Family(
    denoisers={
        "BriaTransformer2DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "pooled_projections",
                "guidance",
                timestep=ROWS,
                img_ids=SAME,
                txt_ids=SAME,
            ),
            packed=True,
        ),
        # Long prompts of any length. The pipeline drops a mask that hides nothing.
        "BriaFiboTransformer2DModel": Denoiser(
            forward(
                "hidden_states",
                "pooled_projections",
                "guidance",
                encoder_hidden_states=Argument(Kind.PADDED, mask="joint_attention_kwargs"),
                text_encoder_layers=PADDED,
                joint_attention_kwargs=JOINT_MASK,
                timestep=ROWS,
                img_ids=SAME,
                txt_ids=LONGEST,
            ),
            packed=True,
        ),
        # The number of gist tokens depends on the longest prompt of a forward: only prompts of equal length fuse.
        "BriaFibo2Transformer2DModel": Denoiser(
            forward(
                "hidden_states", "encoder_hidden_states", "encoder_attention_mask", "context_latents", timestep=ROWS
            ),
            packed=True,
        ),
    }
)
