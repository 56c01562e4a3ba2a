"""What is wrong with someone's files. Both are `ValueError`s that name the file and what to change."""

from __future__ import annotations


class ConfigError(ValueError):
    """A model configuration that cannot be honoured; the message names the file, the field and the fix."""


class CheckpointError(ValueError):
    """Files that are not the checkpoint that they should be; the message names the file and the tensors."""
