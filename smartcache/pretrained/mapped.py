"""The files that a model in memory was loaded from: what is written to them may be in it too.

Weights on the CPU lie in a mapping of their file. Whether the very file that was mapped was
written to can be asked as long as it is open; its name may be that of another file by now, when
equal files were made one, or of none.
"""

from __future__ import annotations

import os
from pathlib import Path

from smartcache.pretrained.identity import weight_names


class MappedFiles:
    """Weight files as they were when a model was loaded. OSError if they cannot be opened.

    They take one descriptor each until `close`, which may come at any time: from the collector,
    and in a forked child, which has descriptors of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._marks: dict[int, tuple[int, int]] = {}
        try:
            for name in weight_names(folder):
                number = os.open(folder / name, os.O_RDONLY)
                self._marks[number] = (0, 0)  # closed even if it cannot be asked for more
                self._marks[number] = _mark(number)
        except OSError:
            self.close()
            raise

    def are_unchanged(self) -> bool:
        """Say whether nobody has written to them. Links to them do not count."""
        return all(_mark(number) == mark for number, mark in self._marks.items())

    def close(self) -> None:
        """Let go of the files; a second time nothing happens."""
        while self._marks:
            number, _ = self._marks.popitem()
            os.close(number)


def _mark(number: int) -> tuple[int, int]:
    st = os.fstat(number)
    return st.st_size, st.st_mtime_ns
