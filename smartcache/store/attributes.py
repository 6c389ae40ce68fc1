"""Extended attributes of a user's file, as the journal keeps them: name -> bytes in hexadecimal.

Access control lists are among them (`system.posix_acl_access`). Those in `security.` are left to
the system: a new file gets its label from where it lies, and only the kernel's policy may set it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_THE_USERS = ("user.", "system.posix_acl_")


def read_attributes(file: Path | int) -> dict[str, str]:
    """Return the attributes of a file, a symlink itself or a descriptor; empty if it has none."""
    found: dict[str, str] = {}
    if not hasattr(os, "listxattr"):
        return found
    follow = isinstance(file, int)
    try:
        names = os.listxattr(file, follow_symlinks=follow)
    except OSError:  # a filesystem without any
        return found
    for name in names:
        if not name.startswith("security."):
            with suppress(OSError):  # removed in this moment
                found[name] = os.getxattr(file, name, follow_symlinks=follow).hex()
    return found


def write_attributes(descriptor: int, wanted: Mapping[str, str]) -> None:
    """Give a new file exactly these attributes; what it inherited from its folder goes.

    To be called before its mode is set: a list of access rights changes the mode's group bits.
    Those that only the filesystem itself can set (`lustre.`, `system.ntfs_`) are left to it.
    """
    for name in read_attributes(descriptor).keys() - wanted.keys():
        with suppress(OSError):
            os.removexattr(descriptor, name)
    for name, value in wanted.items():
        try:
            os.setxattr(descriptor, name, bytes.fromhex(value))
        except OSError:
            if name.startswith(_THE_USERS):
                raise
