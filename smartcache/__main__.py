"""`python -m smartcache`: the same as the `smartcache` command."""

from __future__ import annotations

from smartcache.cli import main

if __name__ == "__main__":
    main()
