"""`fusequeue backup` and `fusequeue restore`."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from cli.backup.archive import DamagedBackup
from cli.backup.create import create_backup
from cli.backup.restore import restore_backup
from cli.client_options import Exit
from cli.messages import print_error
from cli.up.command import print_status
from shared.errors import ConfigurationError, RedisUnavailable

File = Annotated[Path, typer.Argument(metavar="FILE", help="The backup.")]
Backup = Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="The backup.")]
TimeoutS = Annotated[float, typer.Option(min=1, help="Give up after so many seconds; nothing is left.")]
DATA = Path("data")
WRONG_PATH = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


def backup(
    file: File,
    data_dir: Annotated[Path, typer.Option(help="Folder of a `fusequeue up`, which may run.")] = DATA,
    timeout_s: TimeoutS = 3600.0,
) -> None:
    """Write the Redis data and the storage of a `fusequeue up` to a file, also while it runs.

    The file appears when it is complete, and only its owner can read it: it contains prompts, images and secrets of
    webhooks.
    """
    with _errors(timeout_s):
        create_backup(data_dir.resolve(), file.resolve(), timeout_s, print_status)


def restore(
    file: Backup,
    data_dir: Annotated[Path, typer.Option(help="New folder for `fusequeue up`.")] = DATA,
    timeout_s: TimeoutS = 3600.0,
) -> None:
    """Restore a backup to a new folder for `fusequeue up`.

    The folder appears when its data are checked and loaded. It can have another path than that of the backup.
    """
    with _errors(timeout_s):
        restore_backup(file.resolve(), data_dir.resolve(), timeout_s, print_status)


@contextmanager
def _errors(timeout_s: float) -> Iterator[None]:
    """Print an error in one line, and exit; a SIGTERM ends the command as Ctrl-C does, with nothing left."""
    on_term, umask = signal.signal(signal.SIGTERM, signal.default_int_handler), os.umask(0o077)
    try:
        yield
        return
    except ConfigurationError as error:
        message, status = error.message, Exit.USAGE
    except DamagedBackup as error:
        message, status = f"the backup cannot be restored: {error}", Exit.FAILED
    except RedisUnavailable as error:
        message, status = error.message, Exit.UNREACHABLE
    except TimeoutError:
        message, status = f"not done within {timeout_s:g} s; raise --timeout-s", Exit.TIMEOUT
    except OSError as error:
        message = f"{error.filename or ''}: {error.strerror or error}".removeprefix(": ")
        status = Exit.USAGE if isinstance(error, WRONG_PATH) else Exit.FAILED
    finally:
        signal.signal(signal.SIGTERM, on_term)
        os.umask(umask)
    print_error(message)
    raise typer.Exit(status)
