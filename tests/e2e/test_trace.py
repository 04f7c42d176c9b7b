"""A trace and a recording of a real, tiny model on the native device."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from helpers.tiny_models import tiny_gguf

from twostep import LLM, ModelFileError, SamplingParams
from twostep.engine.recording import Recording
from twostep.engine.replay import Replay, ReplayClock
from twostep.entrypoints.tracing.trace_file import read_spans

PROMPTS = [{"prompt_token_ids": list(range(5 + i, 45 + i))} for i in range(4)]


@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}, {"enforce_eager": True}])
def test_device_spans_of_a_real_model(tmp_path: Path, options: dict[str, bool]) -> None:
    model = tiny_gguf(tmp_path, "llama", "Q4_0")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with LLM(model, **sizes, **options) as llm:
        plain = llm.generate(PROMPTS, params, use_tqdm=False)
    trace, record = tmp_path / "run.json", tmp_path / "run.rec"
    with LLM(model, trace=trace, record=record, **sizes, **options) as llm:
        watched = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [o.outputs[0].logprobs for o in watched] == [o.outputs[0].logprobs for o in plain]

    spans = read_spans(trace)
    by_step = {}
    for span in spans:
        by_step.setdefault(span.plan.step, {}).setdefault(span.lane, []).append(span)
    device = [span for span in spans if span.lane == "device"]
    edges = [edge for span in device for edge in (span.start, span.end)]
    assert edges == sorted(edges), "the stream runs one launch after the other"
    steps = [lanes for lanes in by_step.values() if lanes["planning"][0].plan.tokens]
    assert len(steps) > 8
    for lanes in steps:
        names = [span.name for span in lanes["device"]]
        assert names[-2:] == ["logits", "sample"]
        assert set(names[:-2]) == {"forward"}
        graphs = {span.graph for span in lanes["device"]}
        assert graphs == {"NONE" if options.get("enforce_eager") else "FULL"}
        assert (len(names) > 3) == bool(options.get("enforce_eager"))
        assert lanes["launch"][0].start <= lanes["device"][0].start
        assert lanes["device"][-1].end <= lanes["wait"][0].end
        assert sum(span.end - span.start for span in lanes["device"]) > 0

    recording = Recording(io.BytesIO(record.read_bytes()), "run.rec")
    assert Replay(recording, ReplayClock()).run() is None
    assert recording.is_complete


def test_a_model_that_does_not_load_leaves_no_open_file(tmp_path: Path) -> None:
    """Warnings are errors: a file that nobody closes would be one."""
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError):
        LLM(tmp_path / "x.gguf", trace=tmp_path / "t", record=tmp_path / "r")
    assert not (tmp_path / "t").exists()  # nothing was started that it could be of
