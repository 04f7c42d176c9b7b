"""What is measured: cells, and the requests that each one is made of.

A cell is a list of requests, the same for every engine. Prompts are token ids drawn from a fixed
seed; lengths of the mixed load follow a log-normal distribution (see ``mixed_lengths``).
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Literal

from benchmarks.models import Model

Kind = Literal["prefill", "decode", "batch", "mixed", "prefix", "http", "start"]

PREFILLS = (128, 512, 2048, 8192)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (256, 2048)
NEW_TOKENS = 64
BARE_CONTEXT, BARE_NEW_TOKENS, BARE_BATCHES = 128, 128, (1, 2, 4, 8, 16, 32)
"""The decode cells of the bare kernels' program (``peers/yardstick.py``)."""
BATCH_JOBS = ((16, 128, 128), (32, 256, 64))
"""(requests, tokens of each prompt, new tokens of each), all there at once: offline throughput."""
SHARED_PREFIX = 1024
PREFIX_REQUESTS = 32
PREFIX_TAIL = 32
STREAMS = (1, 16, 32)
HTTP_PROMPT, HTTP_NEW_TOKENS = 130, 128
"""Tokens of each request over HTTP; two requests a stream, one after the other (four at least)."""
FIRST_TOKEN_ID, LAST_TOKEN_ID = 100, 40_000
"""Ordinary tokens of every vocabulary here."""

# Mean lengths of ShareGPT conversations, tokens: Kwon et al. 2023 (PagedAttention), figure 11. The
# spread is ours: the paper draws it but does not tabulate it.
PROMPT_MEAN, PROMPT_SIGMA = 161.0, 1.1
OUTPUT_MEAN, OUTPUT_SIGMA = 338.0, 0.8
SHORTEST, LONGEST = 4, 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One request, by token ids; the end-of-text token is ignored, so lengths are exact."""

    arrival: float
    """Seconds after the first."""
    prompt: list[int]
    max_tokens: int
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One thing to measure."""

    name: str
    kind: Kind
    tokens: int = 0
    """Prefill, batch, HTTP: of each prompt. Mixed: prompts and answers are cut to that many."""
    batch: int = 0
    """Decode: sequences at once. HTTP: streams at once. Others: requests in all."""
    context: int = 0
    """Decode: tokens of each sequence before the first that counts. Prefix: shared tokens."""
    new_tokens: int = NEW_TOKENS
    rate: float = 0.0
    """Mixed: arrivals per second."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        if self.kind == "mixed":
            return 2 * self.tokens
        if self.kind == "prefix":
            return self.context + PREFIX_TAIL + self.new_tokens
        if self.kind == "decode":
            return self.context + self.new_tokens
        if self.kind == "batch":
            return self.tokens + self.new_tokens
        if self.kind == "http":
            return 2 * self.tokens + self.new_tokens  # a word may be two tokens
        return self.tokens + 1

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values must be held at once, at most."""
        if self.kind == "mixed":
            return self.batch * int(PROMPT_MEAN + OUTPUT_MEAN)
        return self.longest * max(1, self.batch)


def all_cells(model: Model, *, quick: bool = False) -> list[Cell]:
    """The cells of a model, cheap ones first; ``quick`` keeps one of each kind, made short."""
    if quick:
        return [
            Cell(name="start", kind="start"),
            Cell(name="prefill 128", kind="prefill", tokens=128),
            Cell(name="decode B=1 ctx 256", kind="decode", batch=1, context=256, new_tokens=16),
            Cell(name="decode B=4 ctx 256", kind="decode", batch=4, context=256, new_tokens=16),
            Cell(name="batch 4", kind="batch", batch=4, tokens=32, new_tokens=16),
            Cell(name="mixed", kind="mixed", batch=4, tokens=64, rate=8.0),
            Cell(name="prefix", kind="prefix", batch=4, context=256, new_tokens=8),
            Cell(name="http 2", kind="http", batch=2, tokens=32, new_tokens=16),
        ]
    cells = [Cell(name="start", kind="start")]
    cells += [
        Cell(name=f"prefill {n}", kind="prefill", tokens=min(n, model.max_position - 1))
        for n in PREFILLS
        if n <= model.max_position
    ]
    cells += [
        Cell(name=f"decode B={batch} ctx {context}", kind="decode", batch=batch, context=context)
        for context in CONTEXTS
        for batch in BATCHES
    ]
    cells += [
        Cell(
            name=f"decode B={batch} ctx {BARE_CONTEXT}",
            kind="decode",
            batch=batch,
            context=BARE_CONTEXT,
            new_tokens=BARE_NEW_TOKENS,
        )
        for batch in BARE_BATCHES
    ]
    cells += [
        Cell(
            name=f"batch {count} ({prompt} + {new})",
            kind="batch",
            batch=count,
            tokens=prompt,
            new_tokens=new,
        )
        for count, prompt, new in BATCH_JOBS
    ]
    # Arrivals come faster than any engine serves them, so throughput is what is compared.
    rate = 16 * 135e6 / model.num_params
    count = 64 if rate > 4 else 16
    cells.append(Cell(name="mixed", kind="mixed", batch=count, tokens=LONGEST, rate=rate))
    cells.append(Cell(name="prefix", kind="prefix", batch=PREFIX_REQUESTS, context=SHARED_PREFIX))
    cells += [
        Cell(name=f"http {n}", kind="http", batch=n, tokens=HTTP_PROMPT, new_tokens=HTTP_NEW_TOKENS)
        for n in STREAMS
    ]
    return cells


def choose_cells(cells: list[Cell], wanted: list[str] | None) -> list[Cell]:
    """Cells whose name begins with one of ``wanted`` (all, if None).

    Raises:
        ValueError: A wanted name fits no cell.
    """
    if wanted is None:
        return cells
    for word in wanted:
        if not any(is_named(cell, word) for cell in cells):
            names = ", ".join(cell.name for cell in cells)
            raise ValueError(f"no cell is named {word!r}: there are {names}")
    return [cell for cell in cells if any(is_named(cell, word) for word in wanted)]


def is_named(cell: Cell, word: str) -> bool:
    """Whether ``word`` is the cell's name or its first words: ``decode B=1`` is not ``B=16``."""
    return cell.name == word or cell.name.startswith(word + " ")


def requests_of(cell: Cell, round_number: int) -> list[Request]:
    """The requests of a cell.

    A prefill's prompt is new in every round, so that no prefix cache knows it. Decode keeps its
    prompts: they are computed before the clock counts. All others are new in every round too, for
    every engine the same.
    """
    generator = random.Random(f"{cell.kind} {cell.batch} {cell.context} {cell.tokens}")
    if cell.kind != "decode":
        generator = random.Random(f"{cell.name} {round_number}")
    if cell.kind == "prefill":
        return [Request(arrival=0, prompt=draw(generator, cell.tokens), max_tokens=1)]
    if cell.kind == "decode":
        return alike(generator, cell.batch, cell.context, cell.new_tokens)
    if cell.kind == "batch":
        return alike(generator, cell.batch, cell.tokens, cell.new_tokens)
    if cell.kind == "prefix":
        shared = draw(generator, cell.context)
        return [
            Request(
                arrival=0,
                prompt=shared + draw(generator, PREFIX_TAIL),
                max_tokens=cell.new_tokens,
                seed=number,
            )
            for number in range(cell.batch)
        ]
    if cell.kind == "http":
        return alike(generator, max(4, 2 * cell.batch), cell.tokens, cell.new_tokens)
    if cell.kind == "mixed":
        return mixed_load(generator, cell.batch, cell.rate, longest=cell.tokens)
    raise ValueError(f"a cell of kind {cell.kind} has no requests")


def alike(generator: random.Random, count: int, prompt: int, new_tokens: int) -> list[Request]:
    """Requests of the same lengths, all there at once."""
    return [
        Request(arrival=0, prompt=draw(generator, prompt), max_tokens=new_tokens, seed=number)
        for number in range(count)
    ]


def mixed_load(
    generator: random.Random, count: int, rate: float, *, longest: int = LONGEST
) -> list[Request]:
    """Poisson arrivals with lengths like those of ShareGPT."""
    requests, now = [], 0.0
    for number in range(count):
        prompt, output = mixed_lengths(generator, longest)
        requests.append(
            Request(arrival=now, prompt=draw(generator, prompt), max_tokens=output, seed=number)
        )
        now += generator.expovariate(rate)
    return requests


def mixed_lengths(generator: random.Random, longest: int = LONGEST) -> tuple[int, int]:
    """(prompt, output) tokens: log-normal with the means above, cut to 4 … ``longest``."""

    def one(mean: float, sigma: float) -> int:
        length = generator.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
        return max(SHORTEST, min(longest, round(length)))

    return one(PROMPT_MEAN, PROMPT_SIGMA), one(OUTPUT_MEAN, OUTPUT_SIGMA)


def draw(generator: random.Random, count: int) -> list[int]:
    """Token ids."""
    return generator.choices(range(FIRST_TOKEN_ID, LAST_TOKEN_ID), k=count)
