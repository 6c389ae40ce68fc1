"""`python -m tests.hub_server [ROOT] [--bandwidth N] [--cdn]`: serve a folder of repos.

Prints its address on one line, and serves until its standard input ends.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

from tests.hub_server.process import control, serve_folder
from tests.hub_server.server import Hub


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hub_server", description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, help="has models/org/name, datasets/...")
    parser.add_argument("--bandwidth", type=float, help="bytes per second of all files together")
    parser.add_argument("--cdn", action="store_true", help="large files from a second origin")
    options = parser.parse_args()
    with Hub() as hub:
        hub.bandwidth, hub.cdn = options.bandwidth, options.cdn
        hub.control = functools.partial(control, hub)
        if options.root is not None:
            serve_folder(hub, options.root)
        sys.stdout.write(f"{hub.url}\n")
        sys.stdout.flush()
        sys.stdin.read()


main()
