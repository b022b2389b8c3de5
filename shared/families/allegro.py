"""Allegro."""

from shared.architectures.family import Encoder, Family

FAMILY = Family(encoders={"AutoencoderKLAllegro": Encoder(divisible=True)})
