"""A failing seed becomes a few events that still fail, as a test and as a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostep.contracts.errors import UsageError
from twostep.kv_cache.kv_cache_manager import KVCacheManager
from twostep.sim import case as case_module
from twostep.sim.case import Case, read_case
from twostep.sim.shrink import shrink
from twostep.sim.simulation import run_case
from twostep.sim.workload import make_case


@pytest.fixture
def no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a bug: blocks of steps in flight are handed out at once."""

    def release(self: KVCacheManager, block_ids: list[int], last_step_id: int) -> None:
        self.pool.free_blocks(block_ids)

    monkeypatch.setattr(KVCacheManager, "_release", release)


def first_failure() -> Case:
    """The first seed that fails."""
    for seed in range(100):
        case = make_case(seed, 300, is_async=True)
        if run_case(case).violation is not None:
            return case
    raise AssertionError("the planted bug was not found")


@pytest.mark.usefixtures("no_fence")
def test_a_planted_bug_is_shrunk_to_a_handful_of_events(tmp_path: Path) -> None:
    """The small case breaks the same rule, from the file and from the pasted test as well."""
    case = first_failure()
    small = shrink(case)
    found, original = run_case(small).violation, run_case(case).violation
    assert found is not None
    assert original is not None
    assert found.check == original.check == "I6"
    assert len(small.events) <= 4 < 40 < len(case.events)
    assert small.steps <= 20
    path = tmp_path / "case.json"
    path.write_text(small.to_json())
    assert read_case(path) == small
    names = {**vars(case_module), "run_case": run_case}
    exec(small.as_test("pasted"), names)
    with pytest.raises(AssertionError):
        names["test_pasted"]()


def test_without_the_bug_the_shrunk_case_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the bug that fails, not the simulator."""
    with monkeypatch.context() as patch:
        patch.setattr(
            KVCacheManager,
            "_release",
            lambda self, block_ids, last_step_id: self.pool.free_blocks(block_ids),
        )
        small = shrink(first_failure(), max_runs=100)
        assert run_case(small).violation is not None
    assert run_case(small).violation is None


@pytest.mark.parametrize(
    "text", ["", "{}", '{"config": {}, "events": [{"type": "no"}], "steps": 1}']
)
def test_a_file_that_is_no_case_is_refused(tmp_path: Path, text: str) -> None:
    """In one line, with the reason."""
    path = tmp_path / "case.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="cannot replay"):
        read_case(path)
