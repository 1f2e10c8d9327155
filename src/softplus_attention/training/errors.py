"""Errors that stop a valid run: a full disk, a NaN loss, changed settings."""

from __future__ import annotations


class RunStopped(RuntimeError):  # noqa: N818  not a bug: it reports what happened to the run
    """The run cannot continue. The message says what to do; everything written so far is intact."""

    exit_status = 1


class CheckpointRefused(RunStopped):
    """The folder contains a checkpoint that training did not write."""

    exit_status = 2


class ConfigChanged(RunStopped):
    """The folder contains a run with other settings."""


class RunWarning(UserWarning):
    """A problem that does not stop the run."""
