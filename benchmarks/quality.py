"""How close the fast path stays to exact arithmetic, beside llama.cpp, on the same GGUF file.

    python benchmarks/quality.py MODEL.gguf --llama-bin DIR [--text FILE] [--json FILE]

The reference is the file's own weights unpacked to float32 and run by llama.cpp in float32; its
log-probabilities are kept (16 bits each, in the file that ``llama-perplexity`` writes). Both
engines are then judged by perplexity and by the mean Kullback-Leibler divergence from that
reference, over the second half of every chunk of 512 tokens, as ``llama-perplexity`` does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twostep.entrypoints.engine_options import EngineOptions
from twostep.entrypoints.inproc_engine import build_engine
from twostep.runner.prompt_logits import prompt_logits

CONTEXT = 512


def main() -> int:
    """Run the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-bin", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=Path("/usr/share/common-licenses/GPL-3"))
    parser.add_argument("--work", type=Path, help="keep the reference here and use it again")
    parser.add_argument(
        "--precision", choices=["int8", "bf16"], nargs="+", default=["int8", "bf16"]
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        base = work / f"{args.model.stem}.kld"
        if not base.exists():
            make_reference(args, work, base)
        results = {"llama.cpp": llama_quality(args, base)}
        for precision in args.precision:
            results[f"twostep {precision}"] = our_quality(args.model, base, precision)
    for who, (perplexity, divergence) in results.items():
        print(f"{who:14} perplexity {perplexity:.4f}   KL divergence {divergence:.6f}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


def llama(args: argparse.Namespace, tool: str, *options: str) -> str:
    """Everything that one of llama.cpp's tools prints."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(args.llama_bin)}
    done = subprocess.run(
        [str(args.llama_bin / tool), *options],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"{tool} failed: {done.stdout.strip().splitlines()[-1:]}")
    return done.stdout


def make_reference(args: argparse.Namespace, work: Path, base: Path) -> None:
    """The file's weights in float32, and the log-probabilities they give."""
    unpacked = work / f"{args.model.stem}.f32.gguf"
    llama(args, "llama-quantize", "--allow-requantize", str(args.model), str(unpacked), "F32")
    llama(
        args, "llama-perplexity", "-m", str(unpacked), "-f", str(args.text), "-c", str(CONTEXT),
        "--kl-divergence-base", str(base),
    )  # fmt: skip
    unpacked.unlink()


def llama_quality(args: argparse.Namespace, base: Path) -> tuple[float, float]:
    """llama.cpp's own perplexity and KL divergence."""
    out = llama(
        args, "llama-perplexity", "-m", str(args.model), "-f", str(args.text), "-c", str(CONTEXT),
        "--kl-divergence-base", str(base), "--kl-divergence",
    )  # fmt: skip
    perplexity = re.search(r"Mean PPL\(Q\)\s*:\s*([0-9.]+)", out)
    divergence = re.search(r"Mean\s+KLD:\s*([0-9.]+)", out)
    if perplexity is None or divergence is None:
        raise SystemExit(f"llama-perplexity printed something else: {out[-500:]}")
    return float(perplexity[1]), float(divergence[1])


def our_quality(model: Path, base: Path, precision: str) -> tuple[float, float]:
    """Our perplexity and KL divergence."""
    options = EngineOptions(linear_precision=precision, max_num_seqs=1, max_model_len=CONTEXT)
    engine = build_engine(model, options)
    loss = divergence = 0.0
    count = 0
    for tokens, reference in read_reference(base):
        first = CONTEXT // 2
        position = first
        ids = tokens.tolist()
        prefix = engine.text.tokenizer.special.prefix_ids
        ids[: len(prefix)] = prefix  # as llama-perplexity: BOS takes the place of the first token
        for logits in prompt_logits(engine.model, ids, first=first):
            rows = min(len(logits), CONTEXT - 1 - position)  # nothing follows the last token
            ours = log_softmax(logits[:rows].astype(np.float64))
            theirs = reference[position - first : position - first + rows]
            following = tokens[position + 1 : position + 1 + rows]
            loss -= ours[np.arange(rows), following].sum()
            # The reference clamps what is less likely than e^-16; llama-perplexity skips it too.
            divergence += np.where(theirs > -16, np.exp(theirs) * (theirs - ours), 0.0).sum()
            count, position = count + rows, position + len(logits)
    engine.client.close()
    return math.exp(loss / count), divergence / count


def read_reference(path: Path) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float64]]]:
    """Chunks of (tokens [512], log-probabilities [255, V] of positions 256 .. 510)."""
    with path.open("rb") as file:
        assert file.read(8) == b"_logits_", f"{path} is no file of llama-perplexity"
        context, vocab, chunks = struct.unpack("<3i", file.read(12))
        assert context == CONTEXT
        tokens = np.frombuffer(file.read(4 * context * chunks), dtype=np.int32)
        words = 2 * ((vocab + 1) // 2) + 4
        rows = context - 1 - context // 2
        for chunk in range(chunks):
            raw = np.frombuffer(file.read(2 * words * rows), dtype=np.uint16).reshape(rows, words)
            scale, lowest = raw[:, :4].copy().view(np.float32).T.astype(np.float64)
            values = scale[:, None] * raw[:, 4 : 4 + vocab] + lowest[:, None]
            yield tokens[chunk * context : (chunk + 1) * context], values


def log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the last axis."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


if __name__ == "__main__":
    sys.exit(main())
