"""The protocols that the API serves; a line less is a protocol less."""

from api.protocols.fal.protocol import FAL
from api.protocols.huggingface.protocol import HUGGING_FACE
from api.protocols.openai.protocol import OPENAI
from api.protocols.replicate.protocol import REPLICATE

PROTOCOLS = (OPENAI, REPLICATE, HUGGING_FACE, FAL)
