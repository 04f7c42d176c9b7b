"""Records a model's ``forward`` as a native plan over static buffers.

Recording has two halves. While ``forward`` runs, each op appends a :class:`Record` and each
reader notes in which *form* it wants its input: plain float32 rows, or activations quantised for
the weights that will read them. Afterwards :meth:`CpuOps.finish` walks the records in order, gives
every value its buffers (reused as soon as the last reader is past) and adds the native ops, which
write each value directly in the forms its readers want. So a norm quantises its own row, the MLP's
gating quantises its product, and a residual addition happens inside the matrix product before it.

Legend: T tokens of the flat batch, S rows that get logits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from twostep import _native as native
from twostep.config.model import Activation, RopeConfig
from twostep.ops.cpu.weights import CpuWeight, GatedWeight
from twostep.ops.protocol import AttentionSpec

RowSet = native.RowSet


class Value(msgspec.Struct, eq=False):
    """An activation [T or S, width]: the forms that are read, and its buffers once emitted."""

    width: int
    row_set: Any
    producer: Record | None = None
    rope: Any = None
    """How attention rotates its queries out of these rows; set once emitted."""
    wants_rows: bool = False
    wants_acts: set[Any] = msgspec.field(default_factory=set)
    num_readers: int = 0
    last_use: int = -1
    """Index of the last record that touches it."""
    rows: Any = None
    acts: dict[Any, Any] = msgspec.field(default_factory=dict)


class Record(msgspec.Struct, eq=False):
    """One op of the plan; ``emit`` adds the native op once the buffers are known."""

    kind: str
    inputs: list[Value]
    output: Value | None
    emit: Callable[[Record], None]
    writes_acts: bool
    """Whether the native op writes activations itself; else they are derived from its rows."""
    add_to: Value | None = None
    """The residual that the op adds its result to, instead of writing a value of its own."""


class Buffers:
    """Static buffers, reused between values whose lives do not overlap."""

    def __init__(self, max_tokens: int, max_logits: int) -> None:
        self._max_rows = {RowSet.Tokens: max_tokens, RowSet.Logits: max_logits}
        self._free: defaultdict[tuple[Any, ...], list[Any]] = defaultdict(list)

    def rows(self, width: int, row_set: Any) -> Any:
        """A float32 buffer [max rows of the set, width]."""
        free = self._free["rows", width, row_set]
        return free.pop() if free else native.Rows(width, self._max_rows[row_set])

    def act(self, form: Any, width: int, row_set: Any) -> Any:
        """An activation buffer."""
        free = self._free[form, width, row_set]
        return free.pop() if free else native.ActBuffer(form, width, self._max_rows[row_set])

    def release(self, value: Value) -> None:
        """The value is dead: its buffers may be used again."""
        if value.rows is not None:
            self._free["rows", value.width, value.row_set].append(value.rows)
        for form, act in value.acts.items():
            self._free[form, value.width, value.row_set].append(act)


class CpuOps:
    """The ``Ops`` protocol, recording. One instance records one plan."""

    def __init__(
        self,
        device: Any,
        buffers: Buffers,
        *,
        token_table: Any,
        kv_cache: Any,
        rope_tables: Callable[[RopeConfig | None], Any],
        num_threads: int,
    ) -> None:
        """``rope_tables(None)`` rotates nothing."""
        self.plan = native.Plan()
        self._device = device
        self._buffers = buffers
        self._token_table = token_table
        self._kv_cache = kv_cache
        self._rope_tables = rope_tables
        self._num_threads = num_threads
        self._records: list[Record] = []

    # -- the ops -----------------------------------------------------------------------------

    def embed(self, table: CpuWeight, batch: Any, *, scale: float = 1.0) -> Value:
        """See ``Ops.embed``."""
        out = Value(table.in_features, RowSet.Tokens, wants_rows=True)

        def emit(_: Record) -> None:
            native.add_embed(
                self.plan, self._device, self._token_table, table.native, scale, out.rows
            )

        self._record("embed", [], out, emit)
        return out

    def add_positions(self, x: Value, table: Any, batch: Any) -> Value:
        """See ``Ops.add_positions``: written into ``x``."""
        x.wants_rows = True

        def emit(_: Record) -> None:
            native.add_positions(self.plan, self._device, x.rows, table)

        self._record("add_positions", [x], None, emit)
        return x

    def layer_norm(self, x: Value, weight: Any, bias: Any, *, eps: float) -> Value:
        """See ``Ops.layer_norm``."""
        x.wants_rows = True
        out = Value(x.width, x.row_set)

        def emit(_: Record) -> None:
            acts = list(out.acts.values())
            native.add_layer_norm(
                self.plan, self._device, x.rows, weight, bias, eps, out.rows, acts
            )

        self._record("layer_norm", [x], out, emit, writes_acts=True)
        return out

    def gelu(self, x: Value) -> Value:
        """See ``Ops.gelu``."""
        x.wants_rows = True
        out = Value(x.width, x.row_set)

        def emit(_: Record) -> None:
            native.add_gelu(self.plan, self._device, x.rows, out.rows, list(out.acts.values()))

        self._record("gelu", [x], out, emit, writes_acts=True)
        return out

    def rms_norm(self, x: Value, weight: Any, *, eps: float) -> Value:
        """See ``Ops.rms_norm``."""
        x.wants_rows = True
        out = Value(x.width, x.row_set)

        def emit(record: Record) -> None:
            if record.add_to is not None:
                native.add_rms_norm_add(
                    self.plan, self._device, x.rows, weight, eps, x.row_set, record.add_to.rows
                )
                return
            native.add_rms_norm(
                self.plan,
                self._device,
                x.rows,
                weight,
                eps,
                x.row_set,
                out.rows,
                list(out.acts.values()),
            )

        self._record("rms_norm", [x], out, emit, writes_acts=True)
        return out

    def add(self, residual: Value, x: Value) -> Value:
        """See ``Ops.add``. Folded into the op that made ``x`` when nothing else reads ``x``."""
        residual.wants_rows = True
        made_by = x.producer
        if made_by is not None and made_by.kind in ("linear", "rms_norm") and x.num_readers == 0:
            made_by.add_to, made_by.output, x.producer = residual, None, None
            residual.last_use = len(self._records) - 1
            return residual
        x.wants_rows = True

        def emit(_: Record) -> None:
            native.add_add(self.plan, self._device, x.rows, residual.rows, x.row_set)

        self._record("add", [x, residual], None, emit)
        return residual

    def linear(self, x: Value, weight: CpuWeight, *, bias: Any = None) -> Value:
        """See ``Ops.linear``."""
        x.wants_acts.add(weight.act_form)
        out = Value(weight.out_features, x.row_set, wants_rows=True)

        def emit(record: Record) -> None:
            target = record.add_to or out
            native.add_linear(
                self.plan,
                self._device,
                x.acts[weight.act_form],
                weight.native,
                bias,
                target.rows,
                record.add_to is not None,
                out.row_set,
            )

        self._record("linear", [x], out, emit)
        return out

    def gated_linear(
        self, x: Value, gate: GatedWeight, up: GatedWeight, *, activation: Activation
    ) -> Value:
        """See ``Ops.gated_linear``. ``gate`` and ``up`` are one packed pair."""
        if gate is not up:
            raise ValueError("gate and up must come from one call of WeightFactory.gated")
        x.wants_acts.add(gate.act_form)
        out = Value(gate.out_features, x.row_set)

        def emit(_: Record) -> None:
            native.add_gated_linear(
                self.plan,
                self._device,
                x.acts[gate.act_form],
                gate.native,
                activation,
                list(out.acts.values()),
                out.rows,
                out.row_set,
            )

        self._record("gated_linear", [x], out, emit, writes_acts=True)
        return out

    def rope_cache(
        self,
        qkv: Value,
        batch: Any,
        spec: AttentionSpec,
        *,
        q_norm: Any = None,
        k_norm: Any = None,
        may_sample: bool = False,
    ) -> Value:
        """See ``Ops.rope_cache``. Queries are rotated by the attention that reads them.

        Where every request has one token, it does the rest of this op's work as well.
        """
        qkv.wants_rows = True

        def emit(_: Record) -> None:
            qkv.rope = native.add_rope_cache(
                self.plan,
                self._device,
                self._kv_cache,
                spec.layer,
                qkv.rows,
                None,
                self._rope_tables(spec.rope),
                num_heads=spec.num_heads,
                interleaved=spec.rope is not None and spec.rope.interleaved,
                scale=spec.scale,
                softcap=spec.softcap,
                q_norm=q_norm,
                k_norm=k_norm,
                norm_eps=spec.qk_norm_eps,
                may_sample=may_sample,
            )

        self._record("rope_cache", [qkv], None, emit)
        return qkv

    def attention(
        self, queries: Value, batch: Any, spec: AttentionSpec, *, sampled: bool = False
    ) -> Value:
        """See ``Ops.attention``."""
        row_set = RowSet.Logits if sampled else RowSet.Tokens
        out = Value(spec.num_heads * spec.head_dim, row_set)

        def emit(_: Record) -> None:
            native.add_attention(
                self.plan,
                self._device,
                self._kv_cache,
                spec.layer,
                None,
                num_heads=spec.num_heads,
                rope=queries.rope,
                sliding_window=spec.sliding_window or 0,
                softcap=spec.softcap,
                causal=spec.causal,
                queries=row_set,
                rows=out.rows,
                acts=list(out.acts.values()),
                num_threads=self._num_threads,
            )

        self._record("attention", [queries], out, emit, writes_acts=True)
        return out

    def moe(
        self,
        x: Value,
        router: CpuWeight,
        gate: list[GatedWeight],
        up: list[GatedWeight],
        down: list[CpuWeight],
        *,
        top_k: int,
        norm_topk_prob: bool,
        activation: Activation,
    ) -> Value:
        """See ``Ops.moe``."""
        scores = self.linear(x, router)
        form = gate[0].act_form
        x.wants_acts.add(form)
        out = Value(down[0].out_features, x.row_set, wants_rows=True)

        def emit(_: Record) -> None:
            native.add_moe(
                self.plan,
                self._device,
                scores.rows,
                x.acts[form],
                [weight.native for weight in gate],
                [weight.native for weight in down],
                top_k=top_k,
                norm_topk_prob=norm_topk_prob,
                activation=activation,
                out=out.rows,
                set=out.row_set,
            )

        self._record("moe", [scores, x], out, emit)
        return out

    def gather_rows(self, x: Value, batch: Any) -> Value:
        """See ``Ops.gather_rows``."""
        x.wants_rows = True
        out = Value(x.width, RowSet.Logits, wants_rows=True)
        self._record("gather", [x], out, lambda _: native.add_gather(self.plan, x.rows, out.rows))
        return out

    def logits(self, x: Value, weight: CpuWeight, *, softcap: float = 0.0) -> Value:
        """See ``Ops.logits``."""
        x.wants_acts.add(weight.act_form)
        out = Value(weight.out_features, RowSet.Logits, wants_rows=True)

        def emit(_: Record) -> None:
            native.add_logits(
                self.plan,
                self._device,
                x.acts[weight.act_form],
                weight.native,
                softcap,
                out.rows,
            )

        self._record("logits", [x], out, emit)
        return out

    def pool_rows(self, x: Value) -> None:
        """The rows of ``x`` [S, H] as the step's vectors, for the host."""
        x.wants_rows = True
        self._record("pool_rows", [x], None, lambda _: native.add_pool_rows(self.plan, x.rows))

    def pool_mean(self, x: Value, sums: Any) -> None:
        """The mean of ``x`` over all rows of each logits row's request, as the step's vectors.

        ``sums`` [permanent rows, H] keeps what a request's earlier steps brought.
        """
        x.wants_rows = True

        def emit(_: Record) -> None:
            native.add_pool_mean(self.plan, self._device, x.rows, sums)

        self._record("pool_mean", [x], None, emit)

    # -- from records to the plan ------------------------------------------------------------

    def apply_staged(self) -> None:
        """Staged writes happen here, in stream order; the first op of a forward plan."""
        self._record("apply_staged", [], None, lambda _: native.add_apply_staged(self.plan))

    def sample(self, logits: Value, sample_state: Any) -> None:
        """Sampling, the last op of the sample plan."""

        def emit(_: Record) -> None:
            native.add_sample(self.plan, self._device, logits.rows, sample_state, self._token_table)

        self._record("sample", [logits], None, emit)

    def keep(self, value: Value) -> None:
        """``value`` outlives the plan (another plan, or a test, reads its rows)."""
        value.wants_rows = True
        value.last_use = 1 << 30

    def finish(self) -> Any:
        """Allocate buffers and emit the native ops in order; returns the native plan."""
        alive: list[Value] = []
        for index, record in enumerate(self._records):
            out = record.output
            if out is not None:
                self._allocate(out, record.writes_acts)
                alive.append(out)
            record.emit(record)
            if out is not None and out.wants_acts and not record.writes_acts:
                acts = list(out.acts.values())
                native.add_put_rows(self.plan, self._device, out.rows, out.row_set, acts)
            dead = [value for value in alive if value.last_use <= index]
            for value in dead:
                alive.remove(value)
                self._buffers.release(value)
        self._forget_records()
        return self.plan

    def _forget_records(self) -> None:
        """Cut the circles between records, values and closures: they hold the whole model."""
        for record in self._records:
            record.inputs.clear()
            if record.output is not None:
                record.output.producer = None
        self._records.clear()

    def _allocate(self, value: Value, producer_writes_acts: bool) -> None:
        if value.wants_rows or not (value.wants_acts and producer_writes_acts):
            value.rows = self._buffers.rows(value.width, value.row_set)
        for form in sorted(value.wants_acts, key=str):
            value.acts[form] = self._buffers.act(form, value.width, value.row_set)

    def _record(
        self,
        kind: str,
        inputs: list[Value],
        output: Value | None,
        emit: Callable[[Record], None],
        *,
        writes_acts: bool = False,
    ) -> None:
        record = Record(kind, inputs, output, emit, writes_acts)
        for value in inputs:
            value.num_readers += 1
            value.last_use = max(value.last_use, len(self._records))
        if output is not None:
            output.producer = record
            output.last_use = len(self._records)
        self._records.append(record)
