"""The client of an engine core hears of its death, whatever was on its way either way."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from twostep.contracts.errors import EngineDeadError
from twostep.engine.wire import Codec, LoadProgress
from twostep.frontend.core_client import AsyncMPClient
from twostep.frontend.core_process import CoreProcess

DIES_WITH_MAIL = """
import os, select, signal, sys
wire = int(sys.argv[1])
select.select([wire], [], [])  # there is something for us, which stays unread
os.write(wire, bytes.fromhex(sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def frame(message: LoadProgress) -> bytes:
    data = Codec().encode(message)
    return len(data).to_bytes(4, "little") + data


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_core_that_dies_with_mail_unread_on_both_sides_is_noticed(
    run: Callable[[Coroutine[None, None, None]], None], is_cut: bool
) -> None:
    """uvloop had the reader called once, for what the core had sent: its death was never heard of,
    clients waited for ever, and SIGTERM did not end the server."""
    last = frame(LoadProgress("weights", 0.5))

    async def go() -> None:
        def command(wire: int, heartbeat: int) -> list[str]:
            del heartbeat
            words = last[:-3] if is_cut else last
            return [sys.executable, "-c", DIES_WITH_MAIL, str(wire), words.hex()]

        process = CoreProcess(command)
        client = AsyncMPClient(process)
        client.watch(True)
        while not process.has_ended():  # the loop does not run: all is there when it looks
            time.sleep(0.01)
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            await asyncio.wait_for(client.wait_until_ready(), 10)
        await client.shutdown()

    run(go())
