"""How the arguments of each architecture's forward are put together: plain data, readable without torch.

What a rule claims is proven twice: by the parity test of its architecture, and by the self-check when a model is
loaded. A class that is not listed here runs unfused.
"""

from __future__ import annotations

from worker.engine.architectures.encoders import ENCODERS
from worker.engine.architectures.images import IMAGES
from worker.engine.architectures.rules import Architectures, Argument, Kind, Rules
from worker.engine.architectures.videos import VIDEOS

ARCHITECTURES: Architectures = {**IMAGES, **VIDEOS, **ENCODERS}

# Names that pipelines give to the modules which they call once or more a step.
DENOISERS = ("transformer", "transformer_2", "unet", "unet_2", "prior")

__all__ = ["ARCHITECTURES", "DENOISERS", "Architectures", "Argument", "Kind", "Rules"]
