"""The server's log: lines for people, or one JSON document a line. Prompts are never in it."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]


def set_up_logging(
    log_format: LogFormat, level: str = "info", stream: TextIO | None = None
) -> None:
    """Send the log of twostep and of uvicorn's errors to ``stream`` (standard error)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    for name in ("twostep", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        # uvicorn's warnings are about what clients send; they are told, and that is enough.
        logger.setLevel(level.upper() if name == "twostep" else logging.ERROR)


class TextLines(logging.Formatter):
    """``12:00:01.234 INFO server.access: GET /v1/models 200 …``"""

    def format(self, record: logging.LogRecord) -> str:
        """One record; a traceback follows on lines of its own."""
        moment = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        name = record.name.removeprefix("twostep.")
        text = f"{moment} {record.levelname} {name}: {one_line(record.getMessage())}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonLines(logging.Formatter):
    """One JSON object for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        entry = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def one_line(text: str) -> str:
    """Text in which nothing can pass for another line of the log."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
