"""``twostep tour --json`` agrees with every number of the seed's example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twostep.entrypoints.cli import main as cli

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """What the command prints: parsed, so that it is one JSON document and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda text, **_: printed.append(text))
        assert cli.main(["tour", "--json"]) == 0
    [text] = printed
    found: dict[str, Any] = json.loads(text)
    return found


def test_sizes_are_the_defaults_of_the_device(document: dict[str, Any]) -> None:
    config = document["config"]
    assert config["device"] == "H100 80 GiB"
    assert config["model"] == "llama-3.1-8b"
    assert config["max_num_batched_tokens"] == 8192
    assert config["max_num_seqs"] == 1024
    assert config["block_size"] == BLOCK_SIZE
    assert config["async_scheduling"] is True
    assert config["batch_queue_size"] == 2


def test_the_two_requests(document: dict[str, Any]) -> None:
    """B: 500 + 40 known, token 41 in flight. A: 20,000, positions 0..8190 in flight."""
    assert document["requests"] == {
        "B": {
            "num_prompt_tokens": 500,
            "num_output_tokens": 40,
            "num_computed_tokens": 540,
            "num_output_placeholders": 1,
            "is_prefill_chunk": False,
        },
        "A": {
            "num_prompt_tokens": 20_000,
            "num_output_tokens": 0,
            "num_computed_tokens": 8191,
            "num_output_placeholders": 0,
            "is_prefill_chunk": True,
        },
    }
    assert document["stops"][0]["data"]["running"] == ["B", "A"]


def test_counter_table(document: dict[str, Any]) -> None:
    expected = [
        ("before S k", (540, 540, 1), (8191, True), None),
        ("S k", (540, 541, 2), (16382, True), {"B": 1, "A": 8191}),
        ("U k-1", (541, 541, 1), (16382, True), None),
        ("S k+1", (541, 542, 2), (20000, False), {"B": 1, "A": 3618}),
        ("U k", (542, 542, 1), (20000, False), None),
        ("S k+2", (542, 543, 2), (20001, False), {"B": 1, "A": 1}),
        ("U k+1", (543, 543, 1), (20001, False), None),
    ]
    assert document["counters"] == [
        {
            "event": event,
            "B": dict(
                zip(
                    ("num_tokens", "num_computed_tokens", "num_output_placeholders"), b, strict=True
                )
            ),
            "A": dict(zip(("num_computed_tokens", "is_prefill_chunk"), a, strict=True)),
            "scheduled": scheduled,
        }
        for event, b, a, scheduled in expected
    ]


def test_scheduler_output(document: dict[str, Any]) -> None:
    plan = document["scheduler_output"]
    assert plan["scheduled_new_reqs"] == []
    cached = plan["scheduled_cached_reqs"]
    assert cached["req_ids"] == ["B", "A"]
    none_for_b, new_for_a = cached["new_block_ids"]
    assert none_for_b is None
    assert len(new_for_a) == len(set(new_for_a)) == 512
    assert cached["num_computed_tokens"] == [540, 8191]
    assert cached["num_output_tokens"] == [41, 0]
    assert plan["num_scheduled_tokens"] == {"B": 1, "A": 8191}
    assert plan["total_num_scheduled_tokens"] == 8192
    assert plan["scheduled_spec_decode_tokens"] == {}
    assert plan["finished_req_ids"] == []
    assert plan["preempted_req_ids"] == []
    assert plan["has_structured_output_requests"] is False


def test_flat_batch(document: dict[str, Any]) -> None:
    batch = document["batch"]
    assert batch["req_ids"] == ["B", "A"]
    assert batch["query_start_loc"] == [0, 1, 8192]
    assert batch["positions"] == [540, *range(8191, 16382)]
    assert batch["seq_lens"] == [541, 16382]
    assert batch["logits_indices"] == [0, 8191]
    assert batch["input_ids"][0] == 41  # of B, drawn by step k-1
    assert batch["from_device"] == [0]


def test_slots(document: dict[str, Any]) -> None:
    """B: index 33, offset 12. A: indexes 511 to 1023."""
    slots = document["batch"]["slot_mapping"]
    positions = document["batch"]["positions"]
    assert slots["block_index"] == [position // BLOCK_SIZE for position in positions]
    assert slots["offset"] == [position % BLOCK_SIZE for position in positions]
    assert slots["block_index"][0] == 33
    assert slots["offset"][0] == 12
    assert sorted(set(slots["block_index"][1:])) == list(range(511, 1024))
    assert slots["requests"]["B"] == {
        "first_block_index": 33,
        "first_offset": 12,
        "last_block_index": 33,
        "last_offset": 12,
    }
    assert slots["requests"]["A"]["first_block_index"] == 511
    assert slots["requests"]["A"]["last_block_index"] == 1023


def test_graph_modes_and_sampling(document: dict[str, Any]) -> None:
    assert document["graph_mode"] == {"step_k": "NONE", "two_decodes": "FULL"}
    assert document["stops"][4]["data"]["largest_capture_size"] == 512
    assert document["num_sampled"] == [1, 0]
    assert document["budget_left_k_plus_1"] == 4573


def test_result_and_news(document: dict[str, Any]) -> None:
    """The result of step k-1 and what the call tells client 0: B's token 41, nothing of A."""
    assert document["model_runner_output"] == {
        "req_ids": ["B", "A"],
        "sampled_token_ids": [[41], []],
    }
    assert list(document["outputs"]) == ["0"]
    [news] = document["outputs"]["0"]
    assert news["request_id"] == "B"
    assert news["new_token_ids"] == [41]
    assert news["finish_reason"] is None
    assert document["scheduler_stats"]["num_running_reqs"] == 2
    assert document["scheduler_stats"]["num_waiting_reqs"] == 0


def test_time_on_the_device_adds_up(document: dict[str, Any]) -> None:
    """Steps follow each other without a gap, and each is as long as its terms."""
    lane = document["time"]["device_ms"]
    assert [row["step"] for row in lane[:4]] == ["k-1", "k", "k+1", "k+2"]
    terms = ("weights", "compute", "attention", "logits", "sampling", "launch")
    for before, after in zip(lane, lane[1:], strict=False):
        assert after["start"] == before["end"]
    for row in lane:
        assert row["end"] - row["start"] == pytest.approx(sum(row[t] for t in terms), abs=0.01)
    wait = document["stops"][9]["data"]["waited_ms"]
    assert wait == pytest.approx(lane[0]["end"], abs=0.01)


def test_questions_have_evidence(document: dict[str, Any]) -> None:
    sent, share, source, silence, graph = (q["evidence"] for q in document["questions"])
    assert sent["sent_step_id"] == sent["planned_step_id"] - 1
    assert sent["new_token_ids"] == {"B": [41]}
    assert [row["scheduled"] for row in share["running_pass"]] == [1, 8191]
    assert share["running_pass"][1]["need"] == 11809
    assert share["long_prefill_token_threshold"] == 0
    assert source["tokens_the_host_knew"] == source["input_position"] == 540
    assert source["input_id"] == source["drawn_by_step_k_minus_1"]["B"][0] == 41
    assert source["step_k_minus_1_ends_ms"] <= source["step_k_starts_ms"]
    assert silence["result_of_step_k"] == {"B": [42], "A": []}
    assert silence["news_of_step_k"] == ["B"]
    assert graph["step_k"]["mode"] == "NONE"
    assert graph["two_decodes"] == {
        "step": "k+2",
        "num_tokens": 2,
        "num_tokens_padded": 2,
        "mode": "FULL",
    }
    assert all(set(q) == {"question", "answer", "evidence"} for q in document["questions"])


def test_the_tour_can_be_traced_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the tour's own observer; the recording replays to the same plans."""
    trace, record = tmp_path / "trace.json", tmp_path / "record"
    assert cli.main(["tour", "--json", "--trace", str(trace), "--record", str(record)]) == 0
    document = json.loads(capsys.readouterr().out)
    steps = {
        event["args"]["step"]
        for event in json.loads(trace.read_text())
        if "step" in event.get("args", {})
    }
    assert document["scheduler_output"]["step_id"] in steps
    assert cli.main(["replay", str(record)]) == 0
