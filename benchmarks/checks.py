"""No speed without correctness: what an engine says is looked at before its figures count."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from benchmarks.cells import Cell, Request, draw
from benchmarks.figures import Answer
from benchmarks.models import Model
from benchmarks.peers.base import GREEDY_TOKENS, Engine, Limits
from benchmarks.peers.ours import OurEngine
from benchmarks.peers.worker_engine import WorkerEngine
from benchmarks.process import ProgramError

PROMPTS = 8
PROMPT_TOKENS = 24
LIKELIEST = 5
MAY_DIFFER = 1
"""Of the prompts: quantised arithmetic may turn a near tie among many tokens."""
ALONE = 2
"""Requests of a cell that ours runs again, alone."""

# Ordinary sentences, as SmolLM2's tokens: a trained model has clear opinions about them.
TEXTS = (
    "The capital of France is",
    "One, two, three, four,",
    "Water boils at a temperature of 100 degrees",
    "The sun rises in the east and sets in the",
    "Once upon a time, there was a little",
    "To be, or not to be, that is the",
    "Roses are red, violets are",
    "The opposite of hot is",
)


def prompts_of(model: Model) -> list[list[int]]:
    """What engines are asked: sentences of a trained model's language, else random ids."""
    if model.is_trained:
        from twostep.entrypoints.text_side import load_tokenizer
        from twostep.models.loader.open import open_checkpoint

        path = model.gguf or model.hf
        assert path is not None
        checkpoint = open_checkpoint(path)
        try:
            tokenizer = load_tokenizer(checkpoint)
            return [tokenizer.encode(text) for text in TEXTS]
        finally:
            checkpoint.close()
    generator = random.Random("check")
    return [
        [token % model.shape.vocab for token in draw(generator, PROMPT_TOKENS)]
        for _ in range(PROMPTS)
    ]


def reference(model: Model, limits: Limits, prompts: list[list[int]]) -> list[list[int]]:
    """The exact run: for each prompt the likeliest next tokens, in float32, by our exact path."""
    exact = OurEngine(model, limits, exact=True)
    try:
        return exact.likeliest(prompts, LIKELIEST)
    finally:
        exact.close()


def check_engine(
    engine: Engine, prompts: list[list[int]], expected: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Greedy first tokens must lie among the exact run's likeliest ones.

    Returns:
        ``problem`` (None if all is well), ``first`` (first tokens that are the exact run's own
        first), ``among`` (that lie among its likeliest), ``prompts``, and the tokens said.
    """
    try:
        said = engine.greedy(prompts, GREEDY_TOKENS)
    except (ProgramError, ValueError) as error:
        return {"problem": str(error)}
    return judge(said, expected)


def judge(said: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> dict[str, Any]:
    """See ``check_engine``."""
    first = among = 0
    for tokens, likeliest in zip(said, expected, strict=True):
        first += tokens[:1] == list(likeliest[:1])
        among += bool(tokens) and tokens[0] in likeliest
    problem = None
    if among < len(expected) - MAY_DIFFER:
        problem = (
            f"wrong output: {len(expected) - among} of {len(expected)} greedy first tokens are "
            f"not among the {LIKELIEST} likeliest of the exact run"
        )
    counts = {"first": first, "among": among, "prompts": len(expected)}
    return {"problem": problem, **counts, "said": [list(tokens) for tokens in said]}


def check_alone(
    engine: WorkerEngine, cell: Cell, requests: Sequence[Request], answers: Sequence[Answer]
) -> str | None:
    """Ours: requests of the last round, run alone, must say the same tokens; None if they do."""
    chosen = random.Random(cell.name).sample(range(len(requests)), min(ALONE, len(requests)))
    for index in chosen:
        request = requests[index]
        alone_request = Request(
            arrival=0, prompt=request.prompt, max_tokens=request.max_tokens, seed=request.seed
        )
        [alone] = engine.run([alone_request])
        if alone.token_ids != answers[index].token_ids:
            return f"wrong output: request {index} says other tokens alone than in the crowd"
    return None
