"""The drop-ins for other programs' caches, against what these programs have.

Usage: python scripts/bench/dropins.py [--count 20000] [--rounds 3] [--only PART] [--dir DIR]
                                       [--megabytes 500] [--wait SECONDS] [--json]

A part is a module `_dropins_<part>.py` beside this script with `measure(table, room, arguments)`,
which adds its rows and notes to the table.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
from pathlib import Path

from _measure import Table

PARTS = tuple(
    sorted(path.stem.removeprefix("_dropins_") for path in Path(__file__).parent.glob("_dropins_*"))
)


def main() -> None:
    """Measure all parts, or those that are asked for, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20_000, help="items")
    parser.add_argument("--megabytes", type=int, default=500, help="of the dataset for ComfyUI")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to take the median of")
    parser.add_argument("--only", action="append", choices=PARTS, help="may be repeated")
    parser.add_argument("--dir", type=Path, help="where to work (default: the temporary folder)")
    words = "seconds to wait after files were changed; less than 2.1 measures that files are young"
    parser.add_argument("--wait", type=float, default=2.1, help=words)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    table = Table("Drop-ins")
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        for part in arguments.only or PARTS:
            room = Path(name) / part
            room.mkdir()
            importlib.import_module(f"_dropins_{part}").measure(table, room, arguments)
    table.notes.append(
        f"Medians of {arguments.rounds}; load average {before:.1f} at the start,"
        f" {os.getloadavg()[0]:.1f} at the end."
    )
    table.show(as_json=arguments.json)


if __name__ == "__main__":
    main()
