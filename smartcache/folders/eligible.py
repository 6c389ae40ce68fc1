"""Which files may become links: those that programs write once and replace as a whole.

Models, archives, images and other media are never edited in place. A database, a log or a text may
be, and then every file linked to it would change with it, or refuse the change because it is
read-only. So these are left alone unless the user asks for every kind of file.
"""

from __future__ import annotations

import os
import re

from smartcache.store.links import LINKED_SUFFIXES

_MORE_SUFFIXES = (
    ".7z", ".aac", ".avi", ".avif", ".bmp", ".bz2", ".caffemodel", ".deb", ".exr", ".flac",
    ".gif", ".gz", ".heic", ".jar", ".jpeg", ".jpg", ".jxl", ".lora", ".lz4", ".m4a", ".m4v",
    ".mar", ".mkv", ".mlpackage", ".mov", ".mp3", ".mp4", ".mpg", ".ogg", ".opus", ".ot",
    ".params", ".pdf", ".pdparams", ".pickle", ".plan", ".png", ".q4_0", ".rar", ".rpm",
    ".rten", ".so", ".tfrecord", ".tfrecords", ".tgz", ".tif", ".tiff", ".trt", ".ttf", ".wav",
    ".webm", ".webp", ".weights", ".whl", ".wmv", ".xz", ".zst",
)  # fmt: skip
WRITE_ONCE = frozenset(
    os.fsencode(suffix.removeprefix(".")) for suffix in (*LINKED_SUFFIXES, *_MORE_SUFFIXES)
)
_NAMED_BY_HASH = re.compile(rb"(?:sha256[-:])?[0-9a-f]{64}")
"""Blobs of Hugging Face caches and of Ollama."""


def is_write_once(path: bytes) -> bool:
    """Say whether a file is, by its name, one that no program edits in place."""
    if path.rpartition(b".")[2].lower() in WRITE_ONCE:
        return True
    return _NAMED_BY_HASH.fullmatch(os.path.basename(path)) is not None
