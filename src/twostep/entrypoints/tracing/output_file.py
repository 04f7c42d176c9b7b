"""A file that an engine writes while it runs; a full disk must not stop the engine."""

from __future__ import annotations

from pathlib import Path

from twostep.contracts.errors import UsageError


class OutputFile:
    """Created at once; what is written is with the system when ``write`` returns."""

    def __init__(self, path: str | Path, flag: str) -> None:
        """Create or empty the file. ``flag`` is for messages.

        Raises:
            UsageError: It cannot be written.
        """
        self.path = Path(path).expanduser()
        self.failure: str | None = None
        """Why the rest is missing, if a write failed."""
        try:
            self._file = self.path.open("wb")
        except OSError as error:
            raise unwritable(self.path, flag, error) from None

    def write(self, data: bytes) -> None:
        """Append; after a failure nothing more is written."""
        if self.failure is not None:
            return
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            self.failure = error.strerror or str(error)

    def close(self) -> None:
        """Safe to call twice."""
        try:
            self._file.close()
        except OSError as error:  # what a failed write left in the buffer fails again
            self.failure = self.failure or error.strerror or str(error)


def check_writable(path: str | Path, flag: str) -> None:
    """Create the file if it is missing; raises UsageError if it cannot be written."""
    path = Path(path).expanduser()
    try:
        path.open("ab").close()
    except OSError as error:
        raise unwritable(path, flag, error) from None


def unwritable(path: Path, flag: str, error: OSError) -> UsageError:
    """The one line about a file that cannot be written."""
    return UsageError(f"{flag} {path}: {error.strerror or error}; name a file that can be written")
