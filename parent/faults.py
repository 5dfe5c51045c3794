"""What a file of the parent's may fail with, for whoever stores something in it. Pure."""

from __future__ import annotations


class Unavailable(Exception):
    """The file can't be used now; its text says why."""


class Damaged(Exception):
    """What was asked for can't be read back."""
