"""What stops a run that was set up rightly: a full disk, a loss that is no number, a changed configuration."""

from __future__ import annotations

from softplus_attention.utils.files import FULL

# torch's own writers pass the system's words on without the number.
FULL_WORDS = ("No space left on device", "Disk quota exceeded", "File too large", "failed writing file")


class RunStopped(RuntimeError):  # noqa: N818  it says what happened to the run, not what is wrong with the code
    """The run cannot go on. The message says what to do; everything written before is intact."""

    exit_status = 1


class CheckpointRefused(RunStopped):
    """The folder holds a checkpoint that training did not write."""

    exit_status = 2


class ConfigChanged(RunStopped):
    """The folder holds a run that was started with other settings."""


class RunWarning(UserWarning):
    """Something went wrong that the run can do without."""


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a disk without room or a file-size limit."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        if any(words in str(error) for words in FULL_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False
