"""`twostep simulate check`: totals, a failing seed, its replay, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twostep.entrypoints.cli.main import main
from twostep.kv_cache.kv_cache_manager import KVCacheManager
from twostep.sim.sometimes import SOMETIMES

SMALL = ("simulate", "check", "--seeds", "4", "--steps", "60", "--jobs", "1")


def test_totals_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Exactly one document; both modes by default."""
    assert main([*SMALL, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["runs"] == 8
    assert document["violations"] == []
    assert set(document["steps"]) == {"sync", "async"}
    assert list(document["sometimes"]) == list(SOMETIMES)
    assert document["counts"]["requests"] > 0


def test_totals_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """A table, and the progress elsewhere."""
    assert main([*SMALL, "--mode", "sync", "--first-seed", "3"]) == 0
    captured = capsys.readouterr()
    assert "violations" in captured.out
    assert " sync" in captured.out
    assert "async" not in captured.out
    assert "simulating (4 seeds)" in captured.err
    assert max(map(len, captured.out.splitlines())) <= 80


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Markdown with the command that makes it again."""
    path = tmp_path / "report.md"
    assert main([*SMALL, "--mode", "async", "--report", str(path)]) == 0
    text = path.read_text()
    assert "`twostep simulate check --seeds 4 --steps 60 --mode async`" in text
    assert "**0 violations**" in text
    for name in SOMETIMES:
        assert f"| {name} |" in text


def test_a_failing_seed_is_shrunk_saved_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, a test to paste, a file; the replay fails as long as the bug is there."""
    path = tmp_path / "case.json"
    with monkeypatch.context() as patch:
        patch.setattr(
            KVCacheManager,
            "_release",
            lambda self, block_ids, last_step_id: self.pool.free_blocks(block_ids),
        )
        command = ["simulate", "check", "--seeds", "50", "--mode", "async", "--jobs", "1"]
        assert main([*command, "--save", str(path)]) == 1
        captured = capsys.readouterr()
        assert "def test_seed_" in captured.out
        assert f"twostep simulate check --replay {path}" in captured.err
        assert main(["simulate", "check", "--replay", str(path)]) == 1
        assert "breaks I6" in capsys.readouterr().out
        assert main(["simulate", "check", "--replay", str(path), "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["violation"]["check"] == "I6"
    assert main(["simulate", "check", "--replay", str(path)]) == 0
    assert "no rule is broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--replay", "no/such/file"], "cannot replay"),
        (["--seeds", "0"], "at least 1"),
        (["--mode", "fast"], "invalid choice"),
        ([*SMALL[2:], "--report", "no/such/folder/report.md"], "cannot write --report"),
    ],
)
def test_refusals(flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2."""
    assert main(["simulate", "check", *flags]) == 2
    assert reason in capsys.readouterr().err
