"""Bugs that the simulator must find: each is a change of a few characters of the engine's source.

``old`` must stand exactly once in the file; if the engine changes, the bug is planted anew.
"""

from __future__ import annotations

import dataclasses

POOL = "kv_cache/block_pool.py"
KV = "kv_cache/kv_cache_manager.py"
HASH = "kv_cache/block_hash.py"
SCHEDULER = "scheduler/scheduler.py"
STATE = "scheduler/state.py"
ASYNC = "scheduler/async_scheduler.py"
QUEUES = "scheduler/queues.py"
STOPPING = "scheduler/stopping.py"
REQUEST = "scheduler/request.py"
BUILDER = "scheduler/plan_builder.py"
GRAMMARS = "scheduler/grammars.py"
CORE = "engine/core.py"
ADMISSION = "engine/admission.py"


@dataclasses.dataclass(frozen=True)
class PlantedBug:
    """One bug."""

    name: str
    file: str
    """Below ``src/twostep``."""
    old: str
    new: str
    in_ci: bool = False
    """Whether CI plants it, too; the script plants all."""


BUGS = (
    # ------------------------------------------------------------------ the pool of blocks
    PlantedBug(
        "one block in seven leaks when it is freed",
        POOL,
        "        self.reusable.append(hashed)",
        "        self.reusable.append([block_id for block_id in hashed if block_id % 7])",
        in_ci=True,
    ),
    PlantedBug(
        "one block in seven is freed twice",
        POOL,
        "            ordered.reverse()\n",
        "            ordered.reverse()\n"
        "            ordered += [block_id for block_id in ordered if block_id % 7 == 0]\n",
    ),
    PlantedBug(
        "a cache hit takes no reference",
        POOL,
        "extra_refs[block_id] = extra_refs.get(block_id, 0) + 1",
        "pass",
        in_ci=True,
    ),
    PlantedBug(
        "a free block that is hit stays in the free list",
        POOL,
        "            if block_id in reusable:\n                reusable.remove(block_id)",
        "            if block_id in reusable:\n                pass",
    ),
    PlantedBug(
        "an evicted block keeps its cache entry",
        POOL,
        "            del cached[hash_of[block_id]]  # type: ignore[arg-type]"
        "  # it was found by this hash\n",
        "",
    ),
    PlantedBug(
        "an evicted block keeps its hash",
        POOL,
        "            hash_of[block_id] = None\n        return taken + evicted",
        "        return taken + evicted",
    ),
    PlantedBug(
        "a twin takes the hash of a block that can be found already",
        POOL,
        "        if findable != block_ids:",
        "        if not findable:",
    ),
    PlantedBug(
        "a shared block is free when its first holder leaves",
        POOL,
        "            if block_id not in extra_refs:",
        "            if block_id not in extra_refs or block_id % 3 == 0:",
    ),
    PlantedBug(
        "the last extra holder is never forgotten",
        POOL,
        "            elif extra_refs[block_id] == 1:",
        "            elif extra_refs[block_id] == 0:",
    ),
    PlantedBug(
        "old entries of the free queue count",
        POOL,
        "            if not _skips(self._left_behind, block_id):",
        "            if self._is_free[block_id]:",
    ),
    PlantedBug(
        "a cache reset forgets one direction of the hash map only",
        POOL,
        "        self.cached.clear()\n        self.hash_of",
        "        self.hash_of",
    ),
    # ------------------------------------------------------------------ who holds what
    PlantedBug(
        "blocks of steps in flight are handed out at once (no fence)",
        KV,
        "        if last_step_id > self.last_processed_step:\n            self._parked",
        "        if last_step_id > self.last_processed_step + 9:\n            self._parked",
        in_ci=True,
    ),
    PlantedBug(
        "fenced blocks never come back",
        KV,
        "                    self.pool.free_blocks(parked)",
        "                    pass",
    ),
    PlantedBug(
        "fenced blocks come back twice",
        KV,
        "parked = self._parked.pop(step, None)",
        "parked = self._parked.get(step, None)",
    ),
    PlantedBug(
        "blocks leave the window a block too early",
        KV,
        "num_skipped = max(0, oldest_query - window + 1) // self.block_size",
        "num_skipped = max(0, oldest_query - window + 1 + self.block_size) // self.block_size",
    ),
    PlantedBug(
        "blocks leave the window before refused drafts are known",
        KV,
        "oldest_query = request.num_computed_tokens - request.num_output_placeholders",
        "oldest_query = request.num_computed_tokens",
    ),
    PlantedBug(
        "a hit under a window has a block too few",
        KV,
        "seen = window if end * self.block_size == num_tokens else window - 1",
        "seen = window - 1 - self.block_size",
    ),
    PlantedBug(
        "a full hit leaves nothing to compute",
        KV,
        "return found, min(len(found) * self.block_size, request.num_tokens - 1)",
        "return found, min(len(found) * self.block_size, request.num_tokens)",
    ),
    PlantedBug(
        "a lookup goes on behind a miss",
        KV,
        "            if block_id is None:\n"
        "                break\n            found.append(block_id)",
        "            if block_id is None:\n"
        "                continue\n            found.append(block_id)",
    ),
    PlantedBug(
        "blocks are findable before their tokens are planned",
        KV,
        "end = min(num_planned, request.num_tokens) // self.block_size",
        "end = min(\n            max(num_planned, len(table.block_ids) * self.block_size),"
        " request.num_tokens\n        ) // self.block_size",
    ),
    PlantedBug(
        "blocks are findable before their last token is known",
        KV,
        "end = min(num_planned, request.num_tokens) // self.block_size",
        "end = min(num_planned, request.num_tokens + 1) // self.block_size",
    ),
    PlantedBug(
        "content of a failed step stays findable",
        KV,
        "            for block_id in self._published.pop(step):\n"
        "                self.pool.evict(block_id)",
        "            self._published.pop(step)",
        in_ci=True,
    ),
    PlantedBug(
        "content that was planned and taken out again stays findable",
        KV,
        "        for block_id in table.block_ids[first : table.num_published]:\n"
        "            self.pool.evict(block_id)\n",
        "",
    ),
    PlantedBug(
        "a request that ended keeps its block table",
        KV,
        "table = self._tables.pop(request.request_id, None)",
        "table = self._tables.get(request.request_id, None)",
    ),
    PlantedBug(
        "revived hits are not counted as taken",
        KV,
        "- held - len(hit_blocks)) + revived",
        "- held - len(hit_blocks))",
    ),
    PlantedBug(
        "a cache reset says yes and does nothing",
        KV,
        "        self.pool.evict_all()\n",
        "",
    ),
    PlantedBug(
        "a cache reset does not wait for requests that hold blocks",
        KV,
        "        if self._tables:\n            return False\n",
        "",
    ),
    PlantedBug(
        "removed blocks are not told in KV events",
        KV,
        "            self._note_removals()\n            self._note_stored(request, start, end)",
        "            self.pool.removed = []\n            self._note_stored(request, start, end)",
    ),
    PlantedBug(
        "the cache salt is ignored",
        HASH,
        "if cache_salt is not None and first == 0 else",
        "if cache_salt is not None and first < 0 else",
        in_ci=True,
    ),
    PlantedBug(
        "a block's hash does not depend on the blocks before it",
        HASH,
        "parent = hashes[-1] if hashes else NONE_HASH",
        "parent = NONE_HASH",
    ),
    # ------------------------------------------------------------------ the plan
    PlantedBug(
        "the token budget is one too large",
        STATE,
        "        self._token_budget = scheduler_config.max_num_batched_tokens",
        "        self._token_budget = scheduler_config.max_num_batched_tokens + 1",
        in_ci=True,
    ),
    PlantedBug(
        "one request too many may run",
        STATE,
        "            scheduler_config.max_num_seqs, scheduler_config.max_num_batched_tokens\n",
        "            scheduler_config.max_num_seqs + 1, scheduler_config.max_num_batched_tokens\n",
    ),
    PlantedBug(
        "the cap of long prefills is ignored",
        SCHEDULER,
        "        if threshold > 0 and len(self.running) + len(self.waiting) > 1:",
        "        if threshold > 0 and len(self.running) + len(self.waiting) > 5:",
    ),
    PlantedBug(
        "a token of the prompt is skipped",
        SCHEDULER,
        "        request.num_computed_tokens = num_hit\n",
        "        request.num_computed_tokens = num_hit + (num_new > 20)\n",
        in_ci=True,
    ),
    PlantedBug(
        "one running request starves",
        SCHEDULER,
        "            elif request.status is RequestStatus.RUNNING:",
        "            elif request.status is RequestStatus.RUNNING and (\n"
        '                request.request_id[-2:] != "17" or len(self.running) < 2\n            ):',
    ),
    PlantedBug(
        "one waiting request starves",
        SCHEDULER,
        "        return self._is_in_flight(request)\n",
        "        return self._is_in_flight(request) or (\n"
        '            request.request_id[-2:] == "17" and len(self.waiting) > 1\n        )\n',
    ),
    PlantedBug(
        "skipped requests lose their order",
        SCHEDULER,
        "        for request in reversed(skipped):",
        "        for request in skipped:",
    ),
    PlantedBug(
        "a plain decode runs past the blocks it holds",
        SCHEDULER,
        "request.plain_until = min(slots, request.max_total_tokens - 1)",
        "request.plain_until = min(slots + 1, request.max_total_tokens - 1)",
    ),
    PlantedBug(
        "a plain decode is planned past its length limit",
        SCHEDULER,
        "request.plain_until = min(slots, request.max_total_tokens - 1)",
        "request.plain_until = min(slots, request.max_total_tokens + 1)",
    ),
    PlantedBug(
        "a grammar does not see a token before the next one is sampled",
        SCHEDULER,
        "step.awaits_grammar_tokens |= placeholders > 0",
        "step.awaits_grammar_tokens |= placeholders > 1",
    ),
    PlantedBug(
        "a preempted request restarts while tokens of it are in flight",
        SCHEDULER,
        "        return self._is_in_flight(request)\n",
        "        return False\n",
    ),
    PlantedBug(
        "the most important request is the victim",
        SCHEDULER,
        "key=lambda request: request.sort_key, reverse=True)",
        "key=lambda request: request.sort_key)",
    ),
    PlantedBug(
        "the oldest request is the victim",
        SCHEDULER,
        "candidates: Iterable[Request] = reversed(self.running)",
        "candidates: Iterable[Request] = iter(self.running)",
    ),
    PlantedBug(
        "who was just planned cannot be taken out of the plan again",
        SCHEDULER,
        "            if step.remove_running(victim):\n"
        "                self.kv_cache_manager.withdraw(victim, victim.num_computed_tokens)\n",
        "",
    ),
    PlantedBug(
        "a victim's tokens do not return to the budget",
        BUILDER,
        "        self.token_budget += num_tokens\n",
        "",
    ),
    PlantedBug(
        "finished ids are told with every plan",
        SCHEDULER,
        "        if plan.finished_req_ids:\n            self.finished_req_ids = set()\n",
        "",
    ),
    PlantedBug(
        "a plan without tokens is not launched, its news are lost",
        CORE,
        "        if has_tokens or plan.finished_req_ids or plan.preempted_req_ids:",
        "        if has_tokens:",
    ),
    PlantedBug(
        "a pause goes on planning",
        STATE,
        "self._token_budget = 0 if is_paused else",
        "self._token_budget = 1 if is_paused else",
    ),
    # ------------------------------------------------------------------ ways back and out
    PlantedBug(
        "a preempted request keeps its computed tokens",
        STATE,
        "        request.num_computed_tokens = 0\n",
        "",
        in_ci=True,
    ),
    PlantedBug(
        "a preempted request still counts as a plain decode",
        STATE,
        "        request.plain_until = 0\n",
        "",
    ),
    PlantedBug(
        "a preempted request goes to the end of the queue",
        STATE,
        "        self.waiting.prepend_request(request)\n",
        "        self.waiting.add_request(request)\n",
    ),
    PlantedBug(
        "tokens of before a cache reset are delivered",
        STATE,
        "                step.drop(request)\n",
        "                pass\n",
    ),
    PlantedBug(
        "the device is not told who was preempted",
        STATE,
        "        self.preempted_req_ids.add(request.request_id)\n",
        "",
    ),
    PlantedBug(
        "the device is not told who ended",
        STATE,
        "        if request.has_been_scheduled:\n"
        "            self.finished_req_ids.add(request.request_id)\n",
        "",
    ),
    PlantedBug(
        "a request that reaches its length keeps its blocks",
        STATE,
        "        self.kv_cache_manager.free(request, publish=publish)\n",
        "        if status is not RequestStatus.FINISHED_LENGTH_CAPPED:\n"
        "            self.kv_cache_manager.free(request, publish=publish)\n",
    ),
    PlantedBug(
        "aborts of waiting requests are ignored",
        STATE,
        "            if request is not None:\n                self._finish(request, status)",
        "            if request is not None and request.status is RequestStatus.RUNNING:\n"
        "                self._finish(request, status)",
    ),
    PlantedBug(
        "aborts of running requests are ignored",
        STATE,
        "            if request is not None:\n                self._finish(request, status)",
        "            if request is not None and request.status is not RequestStatus.RUNNING:\n"
        "                self._finish(request, status)",
    ),
    PlantedBug(
        "an ended request stays a suspect",
        STATE,
        "        self.suspects.pop(request.request_id, None)\n",
        "",
    ),
    PlantedBug(
        "first come, last served",
        QUEUES,
        "        self.append(request)\n",
        "        self.appendleft(request)\n",
    ),
    PlantedBug(
        "the queue of priorities is torn when somebody leaves it",
        QUEUES,
        "        heapq.heapify(self._heap)\n",
        "",
    ),
    # ------------------------------------------------------------------ the results
    PlantedBug(
        "one token in fifty steps is dropped",
        SCHEDULER,
        "            if request is None:\n                continue\n            output:",
        "            if request is None or (\n"
        "                request.num_output_tokens > 1 and scheduler_output.step_id % 50 == 7\n"
        "            ):\n                continue\n            output:",
    ),
    PlantedBug(
        "now and then a token is delivered twice",
        SCHEDULER,
        "            outputs.append(output)\n",
        "            outputs += [output] * (1 + (scheduler_output.step_id % 50 == 7))\n",
    ),
    PlantedBug(
        "a placeholder stays when its token came (plain decode)",
        SCHEDULER,
        "                if request.num_output_placeholders:\n"
        "                    request.num_output_placeholders -= 1\n",
        "",
    ),
    PlantedBug(
        "placeholders stay when their tokens came",
        SCHEDULER,
        "            request.num_output_placeholders -= len(token_ids)\n",
        "            pass\n",
    ),
    PlantedBug(
        "refused drafts count as computed",
        SCHEDULER,
        "        request.num_computed_tokens -= refused\n",
        "",
    ),
    PlantedBug(
        "placeholders of refused drafts stay",
        SCHEDULER,
        "            request.num_output_placeholders -= refused\n",
        "            pass\n",
    ),
    PlantedBug(
        "tokens behind the stop token are delivered",
        SCHEDULER,
        "            if end is not None:\n                token_ids = token_ids[:index]\n"
        "                break",
        "            if end is not None:\n                break",
    ),
    PlantedBug(
        "rows of a result are taken by their position",
        SCHEDULER,
        "    if output.req_ids == req_ids:\n",
        "    if len(output.req_ids) == len(req_ids):\n",
    ),
    PlantedBug(
        "all news of a step go to the first client",
        SCHEDULER,
        "            if request.client_index != client_index:",
        "            if client_index < 0:",
    ),
    PlantedBug(
        "running and waiting requests are counted the wrong way round",
        STATE,
        "stats = self._stats.take(len(self.running), len(self.waiting), kv.pool.usage)",
        "stats = self._stats.take(len(self.waiting), len(self.running), kv.pool.usage)",
    ),
    PlantedBug(
        "an answer may be one token too long",
        REQUEST,
        "self.max_total_tokens = min(self.num_prompt_tokens + params.max_tokens, max_seq_tokens)",
        "self.max_total_tokens = min(\n"
        "            self.num_prompt_tokens + params.max_tokens + 1, max_seq_tokens\n        )",
    ),
    PlantedBug(
        "an end token at the length limit is not seen",
        STOPPING,
        "    if token_id in request.end_token_ids:",
        "    is_last = request.num_tokens >= request.max_total_tokens\n"
        "    if token_id in request.end_token_ids and not is_last:",
    ),
    PlantedBug(
        "cached tokens are told wrong",
        SCHEDULER,
        "            num_cached_tokens=num_hit,\n            queued_ts",
        "            num_cached_tokens=num_hit // 2,\n            queued_ts",
    ),
    PlantedBug(
        "a grammar does not learn what was sampled",
        SCHEDULER,
        "if grammar is not None and not grammar.accept_tokens([token_id]):",
        "if grammar is not None and request.num_tokens < 0:",
    ),
    PlantedBug(
        "masks of drafts leave the grammar ahead",
        GRAMMARS,
        "    grammar.rollback(len(drafts))\n",
        "",
    ),
    # ------------------------------------------------------------------ failures and the loop
    PlantedBug(
        "the only member left of a failed step is to blame",
        SCHEDULER,
        "if find_culprit and members and len(failed.num_scheduled_tokens) == 1:",
        "if find_culprit and len(members) == 1:",
    ),
    PlantedBug(
        "a suspect that was proved innocent stays one",
        SCHEDULER,
        "            self.suspects.pop(request_id, None)\n",
        "            pass\n",
    ),
    PlantedBug(
        "a failed step is forgotten, nobody looks for the culprit",
        SCHEDULER,
        "        elif find_culprit:\n",
        "        elif find_culprit and len(members) > 99:\n",
    ),
    PlantedBug(
        "ids of a plan that was lost are not told again",
        SCHEDULER,
        "            self.finished_req_ids |= plan.finished_req_ids\n",
        "",
    ),
    PlantedBug(
        "a row that the executor lost is waited for",
        SCHEDULER,
        "            failure = _NO_REPLY  # the token would never be asked for again",
        "            return None",
    ),
    PlantedBug(
        "aborts of another thread are never seen",
        CORE,
        "        self._process_aborts_queue()\n        return self.scheduler",
        "        return self.scheduler",
    ),
    PlantedBug(
        "the loop plans on top of a launch that failed",
        CORE,
        "        return bool(self.batch_queue) and isinstance(self.batch_queue[0][0], FailedStep)",
        "        return False",
    ),
    PlantedBug(
        "the newest step's result is taken first",
        CORE,
        "        self.batch_queue.appendleft((future, plan))\n",
        "        self.batch_queue.append((future, plan))\n",
    ),
    PlantedBug(
        "an interrupt of late sampling leaves the step unsampled",
        CORE,
        "        self.batch_queue[0] = (future, plan)\n",
        "        if interrupt is None:\n            self.batch_queue[0] = (future, plan)\n",
    ),
    PlantedBug(
        "a forward pass that was never sampled is not given up after a failure",
        CORE,
        "            if isinstance(future, Unsampled):\n"
        "                self.executor.reset_after_failure()\n",
        "            if isinstance(future, Unsampled):\n                pass\n",
    ),
    PlantedBug(
        "placeholders are counted for unfinished prompts",
        ASYNC,
        "            if not request.is_prefill_chunk:\n",
        "            if request.num_tokens:\n",
    ),
    PlantedBug(
        "a prompt that can never fit is admitted",
        ADMISSION,
        "    if length >= scheduler.max_seq_tokens:",
        "    if length > scheduler.max_seq_tokens:",
        in_ci=True,
    ),
    PlantedBug(
        "a stream without blocks sends away who was started in the same step",
        SCHEDULER,
        "            if step.new_requests:\n",
        "            if False:\n",
        in_ci=True,
    ),
    PlantedBug(
        "newcomers go first although a stream is short of blocks",
        SCHEDULER,
        "        if self._is_short_of_blocks:\n",
        "        if False:\n",
    ),
    PlantedBug(
        "a backlog gets more than half a step of a crowd",
        SCHEDULER,
        "max(budget, min(wanted, limit))",
        "max(budget, wanted)",
    ),
    PlantedBug(
        "after a burst of newcomers streams are left out as well",
        SCHEDULER,
        "        self._schedule_running(step, decoding)\n",
        "",
    ),
)
