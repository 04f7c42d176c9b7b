"""The half of an engine that knows text: what a model's files say about tokens and templates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from twostep.config.engine import SchedulingPolicy
from twostep.contracts.pooling import Pooler
from twostep.contracts.sampling import StructuredOutputsParams
from twostep.frontend.chat_prompt import ChatPrompter
from twostep.frontend.chat_template import ChatTemplate
from twostep.frontend.input_processor import InputProcessor
from twostep.frontend.output_processor import OutputProcessor
from twostep.frontend.tokenizer import Tokenizer
from twostep.models.loader.checkpoint import Checkpoint


class TextSide(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's files say, apart from the weights."""

    tokenizer: Tokenizer
    eos_token_ids: list[int]
    """The first is the model's end of text; the others end a turn."""
    generation_config: dict[str, Any]

    def input_processor(
        self,
        max_model_len: int,
        vocab_size: int,
        policy: SchedulingPolicy,
        seed_source: Callable[[], int] | None = None,
        *,
        reject_long_max_tokens: bool = False,
        check_grammar: Callable[[StructuredOutputsParams], None] | None = None,
        pooler: Pooler | None = None,
    ) -> InputProcessor:
        """What checks requests; ``seed_source`` gives seeds to those that bring none."""
        return InputProcessor(
            self.tokenizer,
            max_model_len,
            vocab_size,
            eos_token_id=self.eos_token_ids[0] if self.eos_token_ids else None,
            extra_eos_token_ids=self.eos_token_ids[1:],
            policy=policy,
            reject_long_max_tokens=reject_long_max_tokens,
            seed_source=seed_source,
            check_grammar=check_grammar,
            pooler=pooler,
        )

    def output_processor(self) -> OutputProcessor:
        """What turns tokens into text."""
        return OutputProcessor(self.tokenizer)

    def chat_prompter(self, chat_template: str | None) -> ChatPrompter:
        """What renders conversations; a ``chat_template`` replaces the model's own."""
        template = None
        if chat_template is not None:
            template = ChatTemplate(chat_template, self.tokenizer.special.by_name)
        return ChatPrompter(self.tokenizer, template)


def load_text_side(checkpoint: Checkpoint) -> TextSide:
    """Read tokenizer and generation config. ``checkpoint`` may be closed afterwards.

    Raises:
        ModelFileError, UnsupportedModelError: One line with cause and cure.
    """
    tokenizer = load_tokenizer(checkpoint)
    generation_config = dict(checkpoint.generation_config)
    return TextSide(
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(generation_config, tokenizer, checkpoint.config.vocab_size),
        generation_config=generation_config,
    )


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that came with the weights."""
    source = checkpoint.tokenizer
    if source.gguf_metadata is not None:
        return Tokenizer.from_gguf_metadata(source.gguf_metadata)
    assert source.directory is not None
    return Tokenizer.from_dir(source.directory)


def _eos_token_ids(
    generation_config: dict[str, Any], tokenizer: Tokenizer, vocab_size: int
) -> list[int]:
    """End of text, then end of turn: the generation config's, then the tokenizer's.

    Ids that the model cannot give are left out.
    """
    configured = generation_config.get("eos_token_id")
    ids = configured if isinstance(configured, list) else [configured]
    ids = [*ids, tokenizer.eos_token_id, *tokenizer.extra_eos_token_ids]
    possible = [i for i in ids if isinstance(i, int) and 0 <= i < vocab_size]
    return list(dict.fromkeys(possible))
