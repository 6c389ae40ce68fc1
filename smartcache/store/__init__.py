"""Bytes on this disk: a content-addressed store of read-only, hard-linked blobs.

What stands here is known without loading any of it: the words for the help texts.
"""

from __future__ import annotations

from typing import Literal, get_args

Kind = Literal["auto", "hardlink", "reflink", "symlink", "copy"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""How a blob can be put at a path."""
DEFAULT_PIN = "kept"
