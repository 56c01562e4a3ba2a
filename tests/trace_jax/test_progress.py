import io
import tempfile
import time

import pytest
from rich.console import Console

from trace_jax import progress as progresses
from trace_jax.progress import Progress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def plain(stages, clock):
    output = io.StringIO()
    return Progress(stages, console=Console(file=output, width=200), clock=clock), output


def test_time_left_follows_the_own_pace_over_the_weights():
    clock = Clock()
    progress, _ = plain({"train": 30.0, "evaluate": 10.0}, clock)
    with progress, progress.stage("train", total=3) as stage:
        assert progress.seconds_left is None
        clock.now += 20.0
        stage.advance()  # 10 of 40 units of weight in 20 seconds
        assert progress.fraction == pytest.approx(0.25)
        assert progress.seconds_left == pytest.approx(60.0)


def test_what_an_earlier_run_did_counts_as_done_but_not_as_pace():
    clock = Clock()
    progress, _ = plain({"diagnose": 50.0, "train": 30.0, "evaluate": 20.0}, clock)
    with progress:
        progress.skip("diagnose")
        with progress.stage("train", total=3) as stage:
            progress.advance(earlier=True)
            assert progress.fraction == pytest.approx(0.6)
            assert progress.seconds_left is None
            clock.now += 5.0
            stage.advance()
            assert progress.seconds_left == pytest.approx(30.0 * 5.0 / 10.0)
        assert progress.fraction == pytest.approx(0.8)


def test_stages_may_be_planned_again_when_more_is_known():
    clock = Clock()
    progress, _ = plain({"diagnose": 10.0, "train": 90.0}, clock)
    with progress:
        with progress.stage("diagnose", total=2):
            clock.now += 20.0
            progress.advance(2)
        progress.plan({"diagnose": 10.0, "train precision": 15.0, "train reasoning": 15.0})
        assert progress.fraction == pytest.approx(0.25)
        assert progress.seconds_left == pytest.approx(60.0)
        progress.advance(5)  # no stage is running
        assert progress.fraction == pytest.approx(0.25)


def test_a_stage_that_fails_is_not_done():
    progress, _ = plain({"train": 1.0}, Clock())
    with pytest.raises(RuntimeError), progress, progress.stage("train", total=2) as stage:
        stage.advance()
        raise RuntimeError
    assert progress.fraction == 0.5


def test_a_plain_line_is_printed_every_ten_seconds_and_at_a_stage_s_end():
    clock = Clock()
    progress, output = plain({"train precision": 60.0, "evaluate": 60.0}, clock)
    with progress, progress.stage("train precision", total=60) as stage:
        for _ in range(60):
            clock.now += 1.0
            stage.advance(text="reward 0.50")
    lines = output.getvalue().splitlines()
    assert len(lines) == 7
    assert lines[0] == "  8%  train precision  reward 0.50  1 min 50 s left"
    assert lines[-1].startswith(" 50%")


def test_a_terminal_shows_one_line_with_stage_percent_and_time():
    clock, output = Clock(), io.StringIO()
    console = Console(file=output, force_terminal=True, force_interactive=True, width=100, _environ={})
    with Progress({"train": 10.0, "evaluate": 30.0}, console=console, clock=clock) as progress, progress.stage("train") as stage:
        clock.now += 10.0
        stage.advance(0.4, "[not markup]")
        progress._bar.refresh()
        drawn = output.getvalue()
    assert all(text in drawn for text in ("train  [not markup]", " 10 %", "1 min 30 s left")) and "\n" not in drawn
    assert " 25 %" in output.getvalue().rsplit("\r", 1)[-1]


def test_a_stall_writes_the_stacks(monkeypatch):
    monkeypatch.setattr(progresses, "STALL", 0.2)
    with tempfile.TemporaryFile("w+") as log, Progress({"train": 1.0}, console=Console(file=io.StringIO()), stall_log=log), _pause():
        log.seek(0)
        assert "test_a_stall_writes_the_stacks" in log.read()


class _pause:
    def __enter__(self):
        time.sleep(0.5)

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize("stages", [{}, {"train": 0.0}])
def test_stages_need_a_positive_weight(stages):
    with pytest.raises(ValueError, match="positive weight"):
        Progress(stages)
