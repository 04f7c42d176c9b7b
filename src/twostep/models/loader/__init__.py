"""From files to weights: ``open_checkpoint`` reads GGUF files and Hugging Face directories."""

from twostep.models.loader.checkpoint import Checkpoint, TokenizerSource
from twostep.models.loader.open import open_checkpoint

__all__ = ["Checkpoint", "TokenizerSource", "open_checkpoint"]
