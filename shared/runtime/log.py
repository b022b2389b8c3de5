"""Logging with structlog: JSON, or colours on a terminal; standard library loggers use the same format."""

import logging
import sys
from contextlib import nullcontext, suppress
from typing import Any, NoReturn, TextIO

import structlog
from structlog.typing import Processor


def announce(event: str, **facts: object) -> None:
    """Log an event at any configured level; the parent process waits for it."""
    structlog.get_logger().log(max(logging.INFO, logging.getLogger().level), event, **facts)


def configure(level: str, *, stream: TextIO | None = None) -> None:
    """Log to `stream` (default: stderr), one JSON object per line unless it is a terminal."""
    stream = sys.stderr if stream is None else stream
    terminal = stream.isatty()
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        structlog.processors.StackInfoRenderer(),
    ]
    if not terminal:
        common.append(structlog.processors.format_exc_info)
    # The plain traceback: the one with local variables shows prompts, and takes seconds to render.
    console = structlog.dev.ConsoleRenderer(timestamp_key="at", exception_formatter=structlog.dev.plain_traceback)
    rendered: Processor = console if terminal else structlog.processors.JSONRenderer()
    handler = logging.StreamHandler(stream)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *common, rendered, _writer(handler)],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=common, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, rendered]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for chatty in ("botocore", "boto3", "urllib3", "s3transfer", "httpx", "httpcore", "PIL", "python_multipart"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLevelName(level)))


def _writer(handler: "logging.StreamHandler[TextIO]") -> Processor:
    """Return the last processor: it writes a line to the handler's stream. A `LogRecord` would double a line's cost."""

    def write(logger: object, method: str, line: Any) -> NoReturn:
        with handler.lock or nullcontext(), suppress(OSError, ValueError):  # a closed stream stops no request
            handler.stream.write(f"{line}\n")
            handler.flush()
        raise structlog.DropEvent

    return write
