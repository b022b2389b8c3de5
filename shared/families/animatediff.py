"""AnimateDiff."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import GROUPED, TIMES, forward
from shared.tasks import Task

FAMILY = Family(
    denoisers={
        # The text is repeated for each frame.
        "UNetMotionModel": Denoiser(
            forward("sample", "timestep_cond", "added_cond_kwargs", timestep=TIMES, encoder_hidden_states=GROUPED),
            weighted_prompts=True,
        )
    },
    siblings={("AnimateDiffPipeline", Task.VIDEO_TO_VIDEO): "AnimateDiffVideoToVideoPipeline"},
)
