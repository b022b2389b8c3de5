"""Which frames of an input video a job uses: those that show at the times of its own frames."""

from shared.job_fields import MAX_FPS


def usual_fps(fps: float) -> int:
    """Return the frame rate of a job whose request leaves it to the video."""
    return min(MAX_FPS, max(1, round(fps)))


def seconds_per_frame(video_fps: float, fps: int) -> float:
    """Return the time between two frames that a job uses: at the video's own rate, it uses each of them.

    A rate that no job can have is none, or the result would be slower or faster than the video.
    """
    return 1 / video_fps if fps == round(video_fps) else 1 / fps


def tolerance_s(video_fps: float, fps: int) -> float:
    """Return how much later than its time a frame can begin: times are rounded, and phones' vary."""
    return 0.5 * min(1 / video_fps, seconds_per_frame(video_fps, fps))


def frames_at(frames: int, video_fps: float, fps: int) -> int:
    """Return how many frames a job of `fps` can use of a video."""
    last_s = (frames - 1) / video_fps + tolerance_s(video_fps, fps)
    return int(last_s / seconds_per_frame(video_fps, fps)) + 1
