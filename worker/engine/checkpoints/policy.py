"""When a job gets a checkpoint."""


def is_due(checkpoint_s: float | None, lost_s: float, steps_left: int) -> bool:
    """Return whether a job is to get a checkpoint now.

    `lost_s` is the device time of the job that a loss of its worker would repeat: the time since its last checkpoint,
    or since its start. So a job that takes less than `checkpoint_s` in all gets none; nor does one after its last step,
    or without `checkpoint_s`.
    """
    return checkpoint_s is not None and lost_s >= checkpoint_s and steps_left > 0
