"""What protocols add to the chores and to webhooks; it imports no routes."""

from api.protocols.openai.chore_part import OPENAI
from api.protocols.replicate.chore_part import REPLICATE

CHORE_PARTS = (OPENAI, REPLICATE)
