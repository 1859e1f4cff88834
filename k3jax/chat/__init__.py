"""Tokenizer, chat encoding and output parsing; no arrays here."""

from k3jax.chat.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
