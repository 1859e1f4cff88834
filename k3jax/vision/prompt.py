"""Pictures in a conversation: one media block each, its placeholder repeated once per token (spec model 9.9)."""

from collections.abc import Sequence
from typing import Any

from k3jax.chat.messages import Message
from k3jax.chat.tokenizer import Tokenizer
from k3jax.config import K3Config
from k3jax.vision.picture import Picture
from k3jax.vision.tower import check_vision


def encode_chat(
    cfg: K3Config, tokenizer: Tokenizer, messages: Sequence[Message], pictures: Sequence[Picture], **options: Any
) -> list[int]:
    """`tokenizer.encode_chat` for messages whose image parts are `pictures` in order, placeholders expanded.

    ValueError for a model without vision, or unless there is one picture per image part.
    """
    if not pictures:
        return tokenizer.encode_chat(messages, image_sizes=[], **options)
    check_vision(cfg, pictures)
    assert cfg.media_placeholder_token_id is not None
    ids = tokenizer.encode_chat(messages, image_sizes=[picture.size for picture in pictures], **options)
    return expand(ids, cfg.media_placeholder_token_id, [picture.tokens for picture in pictures])


def expand(ids: Sequence[int], placeholder: int, tokens: Sequence[int]) -> list[int]:
    """`ids` with its i-th placeholder repeated tokens[i] times; ValueError unless there is one per image."""
    found = sum(id == placeholder for id in ids)
    if found != len(tokens):
        raise ValueError(f"the prompt has {found} image placeholders for {len(tokens)} images; give one per image")
    counts = iter(tokens)
    return [id for id in ids for _ in range(next(counts) if id == placeholder else 1)]
