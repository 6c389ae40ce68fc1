"""Bytes on this disk: a content-addressed store of read-only, hard-linked blobs.

The words for help texts stand here; everything else is imported from its module.
"""

from __future__ import annotations

from typing import Literal, get_args

Kind = Literal["auto", "hardlink", "reflink", "copy"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""How a blob can be put at a path."""
DEFAULT_PIN = "kept"
