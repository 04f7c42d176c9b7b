"""Every error a user can meet.

TwostepError                     one clear line: cause, then cure
├── UsageError                   bad command line or option            exit code 2
│   └── InvalidRequestError      bad prompt or sampling parameter      HTTP 400
├── ModelError                   a model cannot be loaded              exit code 1
│   ├── ModelNotFoundError       no such name, file or repository
│   ├── ModelFileError           missing, truncated or corrupt file
│   └── UnsupportedModelError    architecture, format or feature not built
├── OutOfMemoryError             weights or KV cache do not fit
└── EngineDeadError              the engine core stopped; nothing more will come
"""


class TwostepError(Exception):
    """Base of all errors raised on purpose. ``str(error)`` is one line: cause, then cure."""

    exit_code = 1


class UsageError(TwostepError, ValueError):
    """The caller asked for something that cannot be asked."""

    exit_code = 2


class InvalidRequestError(UsageError):
    """A prompt or a sampling parameter is out of range. ``param`` names the field.

    ``code`` is the stable word under which servers report it (OpenAI's where it has one).
    """

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelError(TwostepError):
    """The model cannot be loaded."""


class ModelNotFoundError(ModelError):
    """No model has this name, path or repository."""


class ModelFileError(ModelError):
    """A model file is missing, truncated or corrupt; names the file and the field."""


class UnsupportedModelError(ModelError):
    """The architecture, weight format or feature is not supported."""


class OutOfMemoryError(TwostepError):
    """Weights or KV cache do not fit in what is free; says how much and which option helps."""


class EngineDeadError(TwostepError):
    """The engine core has stopped."""
