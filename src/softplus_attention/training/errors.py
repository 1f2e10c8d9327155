"""Errors that stop a valid run: a full disk, a NaN loss, changed settings."""

from __future__ import annotations


class RunStopped(RuntimeError):  # noqa: N818  it says what happened to the run, not what is wrong with the code
    """The run cannot continue. The message says what to do; everything written before is intact."""

    exit_status = 1


class CheckpointRefused(RunStopped):
    """The folder holds a checkpoint that training did not write."""

    exit_status = 2


class ConfigChanged(RunStopped):
    """The folder holds a run that was started with other settings."""


class RunWarning(UserWarning):
    """A problem that does not stop the run."""
