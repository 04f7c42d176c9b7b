"""What structured output costs: compiling a schema, one mask, and the throughput of many streams.

    python -m benchmarks.structured_output smollm2-135m

Schemas are those of tests/structured_output/schemas.py, texts are random walks. Times are CPU time
of the measuring thread, so a busy machine matters little. Throughput is that of 16 streams with a
schema and without, in turns, on the clock: it needs a quiet machine.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from tests.structured_output.schemas import SCHEMAS

from twostep import LLM, SamplingParams
from twostep.config.limits import Limits
from twostep.contracts.sampling import StructuredOutputsParams
from twostep.entrypoints.grammars import vocabulary_of
from twostep.entrypoints.progress import reporter_for
from twostep.entrypoints.resolve import resolve
from twostep.entrypoints.text_side import load_text_side
from twostep.models.loader.open import open_checkpoint
from twostep.structured_output.compiler import LLGuidanceCompiler
from twostep.structured_output.grammar import LLGuidanceGrammar
from twostep.structured_output.source import grammar_source

STEPS_PER_SCHEMA = 40
STREAMS = 16
ROUNDS = 11
NUM_TOKENS = 256
"""Of an answer: a run must be long beside the moods of a shared machine."""
LONG_SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["new", "old", "red", "blue"]}},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
"""Never complete within the tokens of a round, so that both kinds make as many."""


def measured(job: Callable[[], object], times: list[float]) -> object:
    """The result of a job; its CPU seconds are appended to ``times``."""
    started = time.thread_time()
    result = job()
    times.append(time.thread_time() - started)
    return result


def row(name: str, seconds: Sequence[float], scale: float, unit: str) -> str:
    """One line of the table."""
    ordered = sorted(seconds)
    values = [ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.5, 0.9, 0.99)]
    shown = " | ".join(f"{value * scale:.2f}" for value in [*values, ordered[-1]])
    return f"| {name} ({unit}) | {len(ordered)} | {shown} |"


def main(model: str) -> None:
    """Print a table in Markdown."""
    with contextlib.closing(open_checkpoint(resolve(model, reporter_for()).path)) as checkpoint:
        vocabulary = vocabulary_of(load_text_side(checkpoint), checkpoint.config.vocab_size)
    compiler = LLGuidanceCompiler(lambda: vocabulary)
    tokenizer: list[float] = []
    compiling: list[float] = []
    masks: list[float] = []
    accepts: list[float] = []
    measured(compiler._ll_tokenizer, tokenizer)
    rng = random.Random(0)
    for schema in SCHEMAS.values():
        params = StructuredOutputsParams(json=schema)
        matcher = measured(
            lambda params=params: compiler._compile(grammar_source(params, Limits())), compiling
        )
        grammar = LLGuidanceGrammar(matcher, vocabulary, vocabulary.end_ids)
        for _ in range(STEPS_PER_SCHEMA):
            bits = int.from_bytes(measured(grammar.fill_bitmask, masks), "little")
            token = _any_bit(bits, vocabulary.size, rng)
            measured(lambda grammar=grammar, token=token: grammar.accept_tokens([token]), accepts)
            if grammar.is_terminated():
                break
    compiler.close()
    print(f"{model}, {vocabulary.size} tokens, {len(SCHEMAS)} schemas\n")
    print("| | n | p50 | p90 | p99 | max |")
    print("|---|---|---|---|---|---|")
    print(row("vocabulary, once", tokenizer, 1e3, "ms"))
    print(row("compile", compiling, 1e3, "ms"))
    print(row("mask", masks, 1e6, "µs"))
    print(row("accept a token", accepts, 1e6, "µs"))
    print()
    print(throughput(model))


def throughput(model: str) -> str:
    """Output tokens per second of 16 streams, with a schema and without."""
    kinds = {"plain": None, "schema": StructuredOutputsParams(json=LONG_SCHEMA)}
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with LLM(model) as llm:
        for number in range(-1, ROUNDS):
            for kind in sorted(kinds, reverse=number % 2 == 0):
                constraint = kinds[kind]
                params = SamplingParams(
                    temperature=1.0,
                    seed=number + 1,
                    max_tokens=NUM_TOKENS,
                    ignore_eos=constraint is None,
                    structured_outputs=constraint,
                )
                prompts = [f"People, list {number} {kind} {i}, as JSON:" for i in range(STREAMS)]
                started = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - started
                total = sum(len(output.outputs[0].token_ids) for output in outputs)
                assert total == STREAMS * NUM_TOKENS, f"{kind}: {total} tokens"
                if number >= 0:  # the first round reads the vocabulary
                    speeds[kind].append(total / seconds)
    ratios = [s / p for p, s in zip(speeds["plain"], speeds["schema"], strict=True)]
    plain, schema = (statistics.median(speeds[kind]) for kind in ("plain", "schema"))
    return (
        f"{STREAMS} streams: {plain:.0f} tokens/s without a schema, {schema:.0f} with one; "
        f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    )


def _any_bit(bits: int, size: int, rng: random.Random) -> int:
    """A random set bit: the next one from a random place on, around the end."""
    start = rng.randrange(size)
    above = bits >> start
    if above:
        return start + ((above & -above).bit_length() - 1)
    return (bits & -bits).bit_length() - 1


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
