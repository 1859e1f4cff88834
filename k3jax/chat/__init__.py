"""Tokenizer, chat encoding and output parsing; no arrays here."""

from k3jax.chat.encoding import Segment, image_block, render
from k3jax.chat.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Segment", "Tokenizer", "image_block", "load_tokenizer", "render"]
