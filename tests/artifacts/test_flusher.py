"""The thread that writes rows behind: what fails is said once, and tried again ever later."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.api import ArtifactSet, Flusher, NoSpaceError, lock
from tests.artifacts.opening import array, engine_of
from tests.artifacts.rows import check_rows

PATIENCE = 30.0


class Full:
    """Something to be written to a disk that is full for a while."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.tries: list[float] = []

    def flush(self) -> None:
        self.tries.append(time.monotonic())
        if len(self.tries) <= self.failures:
            raise NoSpaceError("No space left")

    flush_behind = flush


def wait_for(full: Full, tries: int) -> None:
    until = time.monotonic() + PATIENCE
    while len(full.tries) < tries:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_full_disk_is_told_once_and_tried_again_ever_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    flusher, full = Flusher(), Full(failures=4)
    flusher.soon(full)
    wait_for(full, 5)
    time.sleep(0.3)
    assert len(full.tries) == 5  # it has gone well, and is not tried again
    pauses = [later - sooner for sooner, later in zip(full.tries, full.tries[1:], strict=False)]
    assert pauses[3] > 2 * pauses[0]
    assert [record.message for record in caplog.records] == [
        "Rows of artifacts could not be written yet: No space left"
    ]


def test_what_fails_keeps_nothing_else_waiting(caplog: pytest.LogCaptureFixture) -> None:
    flusher, full, other = Flusher(), Full(failures=10**9), Full(failures=0)
    flusher.soon(full)
    wait_for(full, 4)
    start = time.monotonic()
    flusher.soon(other)
    wait_for(other, 1)
    assert time.monotonic() - start < 5


def test_at_the_end_what_has_failed_is_tried_once_more() -> None:
    flusher, full = Flusher(), Full(failures=1)
    flusher.soon(full)
    wait_for(full, 1)
    flusher.flush()
    assert len(full.tries) == 2


def test_rows_are_written_while_others_go_on(latents: ArtifactSet) -> None:
    """Puts in the middle of a group that is being counted belong to the next one."""
    engine = engine_of(latents)
    for number in range(50):
        latents.put(f"k{number}", {"x": array(number), "n": number})
    real = engine.index.put_entries

    def meanwhile(rows: object) -> None:
        engine.index.put_entries = real  # type: ignore[method-assign]
        real(rows)  # type: ignore[arg-type]
        latents.put("k7", {"x": array(1007), "n": 1007})
        latents.delete("k8")
        latents.put("new", {"x": array(9), "n": -1})

    engine.index.put_entries = meanwhile  # type: ignore[method-assign]
    engine.flush_behind()
    for _ in range(2):
        assert latents.get("k7")["n"] == 1007
        assert latents.get("k8") is None
        assert latents.get("new")["n"] == -1
        assert latents.get("k9")["n"] == 9
        latents.flush()
    assert len(latents) == 50
    assert latents.stats().chunks == 49  # those of k0 to k49 but k8; array(9) once
    check_rows(latents.path)


def test_rows_that_could_not_be_written_behind_are_written_later(latents: ArtifactSet) -> None:
    engine = engine_of(latents)
    latents.put("a", {"x": array(1)})
    real = engine.index.put_entries

    def refuse(_rows: object) -> None:
        engine.index.put_entries = real  # type: ignore[method-assign]
        latents.put("b", {"x": array(2)})
        raise NoSpaceError("No space left")

    engine.index.put_entries = refuse  # type: ignore[method-assign, assignment]
    with pytest.raises(NoSpaceError):
        engine.flush_behind()
    assert sorted(latents) == ["a", "b"]
    check_rows(latents.path)


def test_puts_without_end_let_others_have_the_set_for_themselves(latents: ArtifactSet) -> None:
    """Whoever wants the lock of the set alone gets it between two groups."""
    engine = engine_of(latents)
    is_over = threading.Event()

    def put() -> None:
        number = 0
        while not is_over.is_set():
            latents.put(f"k{number % 100}", {"n": number})
            number += 1

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(put)
        try:
            with lock(engine.path / "lock", exclusive=True, timeout=PATIENCE):
                pass
        finally:
            is_over.set()
        job.result()


def test_a_pack_whose_seal_fails_is_counted_no_second_time(latents: ArtifactSet) -> None:
    """The rows are written, then something else fails: the next group is that of another pack."""
    engine = engine_of(latents)
    latents.put("a", {"x": array(1)})
    assert engine.writer is not None
    engine.writer.is_broken = True
    real = engine.index.seal

    def refuse(_number: int) -> None:
        engine.index.seal = real  # type: ignore[method-assign]
        raise NoSpaceError("No space left")

    engine.index.seal = refuse  # type: ignore[method-assign, assignment]
    with pytest.raises(NoSpaceError):
        latents.flush()
    latents.flush()
    latents.put("b", {"x": array(2)})
    latents.flush()
    assert sorted(latents) == ["a", "b"]
    assert latents.stats().packs == 2
    check_rows(latents.path)
