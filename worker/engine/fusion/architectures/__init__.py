"""How the arguments of each architecture's forward are put together: plain data, readable without torch.

What a rule claims is proven twice: by the parity test of its architecture, and by the self-check when a model is
loaded. A class that is not listed here runs unfused.
"""

from __future__ import annotations

from shared.mixing import DENOISERS
from worker.engine.fusion.architectures.encoders import ENCODERS
from worker.engine.fusion.architectures.image_models import IMAGES
from worker.engine.fusion.architectures.rules import Architectures, Argument, Kind, StackingRules
from worker.engine.fusion.architectures.video_models import VIDEOS

ARCHITECTURES: Architectures = {**IMAGES, **VIDEOS, **ENCODERS}

__all__ = ["ARCHITECTURES", "DENOISERS", "Architectures", "Argument", "Kind", "StackingRules"]
