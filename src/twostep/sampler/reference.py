"""The sampler in NumPy: slow, obvious, and the oracle of the native one.

One row of logits [V], float32, becomes one token by these rules, in this order (the row's token
will stand at ``position``, so ``position`` tokens are known):

1.  grammar: tokens whose bit is clear become -inf;
2.  allowed ids: all others become -inf;
3.  bias: added, clamped to ±100;
4.  min_tokens: stop ids become -inf while ``position < prompt_len + min_tokens``, unless that
    would leave nothing;
5.  penalties, for every distinct token so far: a positive logit is divided by the repetition
    penalty, another one multiplied; for tokens in the output then minus ``frequency * count``,
    minus ``presence``;
6.  bad words: the last token becomes -inf where the others end the output;
7.  temperature 0: the highest logit wins, of equals the lowest id. Else times ``1 / temperature``;
8.  min_p: only logits ``>= max + ln(min_p)`` stay;
9.  top_k: only logits not below the k-th highest stay (those that equal it do);
10. top_p: only the first tokens stay, in order of (probability falling, id rising), whose mass
    reaches ``top_p`` of that of all that are left;
11. draw: with ``u = uniform_bits(seed, position) / 2**64``, the first token in order of id whose
    cumulative share of the remaining mass exceeds u.

Steps 1 to 9 are float32 and exact in both samplers. A probability weighs ``e**(z - max)``; the
native sampler rounds it to a multiple of 2**-40, so the two may differ where u or top_p falls on a
boundary: ``Sampled.margin`` says how close that was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from twostep.sampler.philox import uniform_bits
from twostep.sampler.row_params import RowParams

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

GREEDY_BELOW = 1e-5
MAX_BIAS = 100.0


class SampleError(ValueError):
    """A row cannot be sampled: broken logits, or no token is left."""


class Sampled(msgspec.Struct, frozen=True):
    """A token, and the least distance, in probability, of any decision from going the other way."""

    token: int
    margin: float


def sample_row(
    logits: Float32Array,
    params: RowParams,
    history: Sequence[int],
    allowed: BoolArray | None = None,
) -> Sampled:
    """The token behind ``history``.

    ``logits`` [V] float32; ``allowed`` [V] bool, from a grammar. Raises SampleError if the logits
    hold a NaN or +inf, or every token is masked.
    """
    if not np.all(logits < np.inf):
        raise SampleError("the logits hold a NaN or an infinity")
    z = process_logits(logits, params, history, allowed)
    if np.all(np.isneginf(z)):
        raise SampleError("no token is left")
    if params.temperature < GREEDY_BELOW:
        return Sampled(int(np.argmax(z)), math.inf)
    probs, margin = probabilities(z, params)
    u = uniform_bits(params.seed, len(history)) / 2**64
    cumulative = np.cumsum(probs)
    token = int(np.searchsorted(cumulative, u, side="right"))
    return Sampled(token, min(margin, float(np.min(np.abs(cumulative - u)))))


def process_logits(
    logits: Float32Array,
    params: RowParams,
    history: Sequence[int],
    allowed: BoolArray | None = None,
) -> Float32Array:
    """Rules 1 to 7: everything up to and including the temperature → [V] float32."""
    z = np.array(logits, dtype=np.float32)
    if allowed is not None:
        z[~allowed] = -np.inf
    if params.allowed_ids:
        others = np.ones(z.size, dtype=bool)
        others[params.allowed_ids] = False
        z[others] = -np.inf
    bias = np.clip(np.array(params.bias_values, dtype=np.float32), -MAX_BIAS, MAX_BIAS)
    z[params.bias_ids] += bias
    if len(history) < params.prompt_len + params.min_tokens:
        masked = z.copy()
        masked[params.stop_ids] = -np.inf
        if not np.all(np.isneginf(masked)):
            z = masked
    _penalise(z, params, history)
    _ban_words(z, params, history[params.prompt_len :])
    if params.temperature >= GREEDY_BELOW:
        z *= np.float32(1) / np.float32(params.temperature)
    return z


def _penalise(z: Float32Array, params: RowParams, history: Sequence[int]) -> None:
    repetition = np.float32(params.repetition_penalty)
    frequency = np.float32(params.frequency_penalty)
    presence = np.float32(params.presence_penalty)
    outputs = list(history[params.prompt_len :])
    for token in set(history):
        z[token] = z[token] / repetition if z[token] > 0 else z[token] * repetition
        if token in outputs:
            z[token] -= frequency * np.float32(outputs.count(token))
            z[token] -= presence


def _ban_words(z: Float32Array, params: RowParams, outputs: Sequence[int]) -> None:
    for word in params.bad_words:
        prefix = word[:-1]
        if len(prefix) <= len(outputs) and list(outputs[len(outputs) - len(prefix) :]) == prefix:
            z[word[-1]] = -np.inf


def probabilities(z: Float32Array, params: RowParams) -> tuple[Float64Array, float]:
    """Rules 8 to 10 → what is drawn from, [V] float64 with sum 1, and the margin of top_p."""
    top = z.max()
    keep = z > -np.inf
    if params.min_p > 0:
        keep &= z >= top + np.float32(math.log(params.min_p))
    if 0 < params.top_k < z.size:
        keep &= z >= np.sort(z)[-params.top_k]
    weights = np.where(keep, np.exp(z.astype(np.float64) - float(top)), 0.0)
    margin = math.inf
    if params.top_p < 1:
        order = np.lexsort((np.arange(z.size), -z))
        mass = np.cumsum(weights[order]) / weights.sum()
        last = min(int(np.searchsorted(mass, params.top_p, side="left")), z.size - 1)
        margin = float(np.min(np.abs(mass - params.top_p)))
        weights[order[last + 1 :]] = 0.0
    return weights / weights.sum(), margin


def token_logprobs(logits: Float32Array, token: int, n: int) -> tuple[list[int], Float64Array, int]:
    """Log-probabilities under the unprocessed logits: ids and values [1 + n], and a rank.

    First ``token``, then the n highest, falling, of equals the lower id first. The rank of a token
    is the number of logits that are at least its own.
    """
    wide = logits.astype(np.float64)
    logprobs = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    order = np.lexsort((np.arange(logits.size), -logits))
    ids = [token, *order[:n].tolist()]
    return ids, logprobs[ids], int(np.sum(logits >= logits[token]))
