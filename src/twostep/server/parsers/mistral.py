"""What stands behind ``[TOOL_CALLS]``: an array of objects (older models), or a name."""

from __future__ import annotations

from twostep.server.parsers.json_block import JsonBlockReader
from twostep.server.parsers.named_arguments import ARGS, CALL_ID, TOOL_CALLS, NamedArgumentsReader
from twostep.server.parsers.output_parser import CallReader, CallSink


class MistralReader:
    """Its first character tells which of both it is."""

    def __init__(self) -> None:
        self._reader: CallReader | None = None

    def feed(self, text: str, sink: CallSink) -> str | None:
        """See CallReader."""
        if self._reader is None:
            text = text.lstrip()
            if not text:
                return None
            if text[0] in "[{":
                self._reader = JsonBlockReader(opening=(TOOL_CALLS, ARGS, CALL_ID))
            else:
                self._reader = NamedArgumentsReader()
        return self._reader.feed(text, sink)

    def finish(self, sink: CallSink) -> str:
        """See CallReader."""
        return "" if self._reader is None else self._reader.finish(sink)
