"""The real AsyncLLM over an engine core process that has no model; see ``ghost_core``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from helpers.ghost_core import Behaviour
from helpers.tiny_text import gguf_tokenizer

from twostep.contracts.results import RequestOutput
from twostep.entrypoints.core_spec import CoreSpec
from twostep.entrypoints.engine_options import EngineOptions
from twostep.frontend.async_llm import AsyncLLM
from twostep.frontend.chat_prompt import ChatPrompter
from twostep.frontend.core_client import AsyncMPClient
from twostep.frontend.core_process import CoreProcess
from twostep.frontend.input_processor import InputProcessor
from twostep.frontend.output_processor import OutputProcessor
from twostep.frontend.tokenizer import Tokenizer

TESTS = str(Path(__file__).parents[1])


def ghost_command(behaviour: Behaviour, wire: int, heartbeat: int) -> list[str]:
    """What AsyncMPClient executes."""
    spec = CoreSpec(
        wire=wire,
        heartbeat=heartbeat,
        parent_pid=os.getpid(),
        model="ghost",
        path=msgspec.json.encode(behaviour).decode(),
        options=EngineOptions(),
    )
    code = f"import sys; sys.path.insert(0, {TESTS!r}); from helpers.ghost_core import main"
    argument = msgspec.json.encode(spec).decode()
    return [sys.executable, "-c", f"{code}; sys.exit(main(sys.argv[1]))", argument]


async def start_ghost(behaviour: Behaviour | None = None) -> AsyncLLM:
    """A ghost in a process of its own, ready."""
    process = CoreProcess(lambda *fds: ghost_command(behaviour or Behaviour(), *fds))
    client = AsyncMPClient(process)
    try:
        info = await client.wait_until_ready()
    except BaseException:
        await client.shutdown(kill=True)
        raise
    tokenizer = Tokenizer.from_gguf_metadata(gguf_tokenizer())
    return AsyncLLM(
        client,
        info,
        InputProcessor(tokenizer, info.max_model_len, info.vocab_size, eos_token_id=None),
        OutputProcessor(tokenizer),
        ChatPrompter(tokenizer),
        tokenizer,
    )


@contextlib.asynccontextmanager
async def ghost_llm(**behaviour: Any) -> AsyncIterator[AsyncLLM]:
    """The same, ended behind the block."""
    llm = await start_ghost(Behaviour(**behaviour))
    async with llm:
        yield llm


async def last_of(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The last output of a stream."""
    last: RequestOutput | None = None
    async for output in outputs:
        last = output
    assert last is not None
    return last
