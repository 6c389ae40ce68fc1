"""Which fault points the kill tests above the store reach: each of them asserts its own."""

from __future__ import annotations

from collections.abc import Iterable

from tests.processes.killing import Moment

POINTS: dict[str, set[str]] = {
    "share": {"share: begun", "share: part shared", "share: shared"},
    "import": {
        "import: begun", "import: blob stored", "import: blob placed", "import: file written",
        "import: file named", "import: snapshot staged", "import: snapshot made",
        "import: listing named", "import: ref staged", "import: ref written",
    },
    "complete": {"import: pointer made"},
    "export": {"export: begun", "export: written", "export: named"},
    "repair": {"hub repair: pointer removed", "hub repair: file moved"},
    "download": {
        "download: leased", "download: fetched", "download: named",
        "download: large files there", "download: handed over",
    },
    "download from a tier": {"tier: taken"},
    "download elsewhere": {"claim: copied"},
    "download wrong bytes": {"download: wrong", "download: hidden"},
    "answer": {"download: leased", "download: fetched", "download: named"},
    "carry out": {"carry: written", "carry: named"},
    "carry in": {"set: begun", "set: written", "set: named", "carry: put"},
    "carry a dataset": {
        "set: begun", "set: written", "set: named", "dataset: copied", "dataset: table copied",
        "dataset: described",
    },
    "sets": {
        "pack: claimed", "pack: made", "pack: written", "pack: before footer",
        "pack: footer written", "pack: taken over", "set: pack left", "compact: copied",
        "compact: before unlink", "compact: unlinked", "take in: copied",
    },
    "push": {"push: objects sent", "push: objects named", "push: document written"},
    "pull": {"pull: blobs there", "pull: blob taken"},
}  # fmt: skip

ELSEWHERE: dict[str, set[str]] = {
    "hub/test_remove.py": {"hub rm: name removed"},
    "integrations/test_easydata.py": {
        "dataset: saved", "dataset: pointer written", "dataset: replaced",
    },
    "processes/test_operations.py": {"giving back"},
    "processes/test_locks_across_processes.py": {"claim: opened"},
}  # fmt: skip
"""Tests that kill at points which they name themselves."""


def all_of(test: str, moments: Iterable[Moment]) -> None:
    """Fail unless the moments of a test have all its points."""
    missing = POINTS[test] - {moment.place for moment in moments}
    assert not missing, f"{test} does not reach {sorted(missing)}"
