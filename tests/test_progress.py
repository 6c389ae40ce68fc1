from __future__ import annotations

import pickle

import pytest

from smartcache.progress import Job, Progress, Unit, silent


class Recorder:
    """A `Progress` of a caller: records what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, label: str, total: int | None = None, unit: Unit = "items") -> Job:
        self.lines.append(f"{label} of {total} {unit}")
        return RecorderJob(self.lines)


class RecorderJob(Job):
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def advance(self, amount: int = 1) -> None:
        self.lines.append(f"+{amount}")

    def close(self) -> None:
        self.lines.append("closed")


def work(progress: Progress = silent) -> None:
    with progress("Hashing", 30, unit="bytes") as job:
        job.advance(29)
        job.advance()


def test_a_callers_progress_is_told_label_total_unit_and_every_step() -> None:
    recorder = Recorder()
    work(recorder)
    assert recorder.lines == ["Hashing of 30 bytes", "+29", "+1", "closed"]


def test_without_a_progress_nothing_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    work()
    assert capfd.readouterr() == ("", "")


def test_a_silent_job_may_be_closed_twice_and_advanced_afterwards() -> None:
    job = silent("Linking")
    with job as entered:
        entered.advance()
        entered.describe("a.safetensors")
    job.close()
    job.advance(5)


def test_a_silent_job_lets_errors_through() -> None:
    with pytest.raises(KeyError), silent("Linking", None):
        raise KeyError


def test_silent_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(silent)) is silent  # noqa: S301
