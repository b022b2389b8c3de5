"""Anima; its denoiser is that of Cosmos."""

from shared.architectures.family import Encoder, Family
from shared.architectures.stacking_rules import forward

FAMILY = Family(
    encoders={
        "AnimaTextConditioner": Encoder(
            forward("source_hidden_states", "target_input_ids", "target_attention_mask", "source_attention_mask")
        )
    }
)
