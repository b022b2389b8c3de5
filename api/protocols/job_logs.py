"""Logs of a job as lines of text, for protocols that have them."""

from shared.job_record import JobRecord, Progress


def logs(record: JobRecord, progress: Progress) -> str:
    """Return the seed, a tqdm line from which clients read the progress, and the job's warnings."""
    seed = f"Using seed: {record.job.seed}\n"
    return seed + (f"{progress_line(progress)}\n" if progress.total else "") + warning_lines(record)


def warning_lines(record: JobRecord) -> str:
    return "".join(f"Warning: {warning.message}\n" for warning in record.warnings)


def progress_line(progress: Progress) -> str:
    """Return a line such as ` 50%|##########          | 6/12`."""
    percent = min(100, progress.percent)
    return f"{percent:3d}%|{'#' * (percent // 5):<20}| {progress.step}/{progress.total}"
