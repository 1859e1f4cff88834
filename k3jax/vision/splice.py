"""Rows of images that stand in for the embeddings of a prompt's placeholder tokens."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config

Images = Sequence[np.ndarray]  # of one prompt, [tokens, text width] each, in the order of their placeholders


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Media:
    """What `step` takes: `rows` [M, D] replace the embeddings of the tokens where `present` [M] bool."""

    rows: jax.Array
    present: jax.Array


class PromptImages:
    """The images of one prompt, on the host, for any cut of it."""

    def __init__(self, cfg: K3Config, prompt: Sequence[int], images: Images, name: str = "the prompt"):
        """ValueError unless the images have as many rows as the prompt has placeholder tokens."""
        dtype = jnp.dtype(cfg.dtype)
        for array in images:
            if array.ndim != 2 or array.shape[1] != cfg.hidden_size:
                raise ValueError(
                    f"an image of {name} has the shape {array.shape}; pass [tokens, {cfg.hidden_size}]"
                    " as embed_pictures gives them"
                )
        self.values = np.concatenate([np.zeros((0, cfg.hidden_size), dtype), *(np.asarray(x, dtype) for x in images)])
        self.present = np.asarray(prompt, np.int64) == cfg.media_placeholder_token_id  # [T]
        self.before = np.concatenate([[0], np.cumsum(self.present)])  # [T + 1], image tokens before each token
        if self.before[-1] != len(self.values):
            raise ValueError(
                f"{name} has {self.before[-1]} placeholder tokens for images of {len(self.values)} tokens;"
                " repeat each placeholder as often as its image has tokens"
            )

    def cut(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows [n, D], present [n]) of tokens start .. stop, or to the prompt's end; 0 where no image is present."""
        present = self.present[start:stop]
        rows = np.zeros((len(present), self.values.shape[1]), self.values.dtype)
        if present.any():
            first = self.before[start]
            rows[present] = self.values[first : first + present.sum()]
        return rows, present


def media_chunk(prompts: Sequence[PromptImages], start: int, width: int) -> Media | None:
    """Tokens start .. start + width of every prompt as rows [B * width]; None when no image is among them."""
    if not any(prompt.present[start : start + width].any() for prompt in prompts):
        return None
    present = np.zeros((len(prompts), width), bool)
    rows = np.zeros((*present.shape, prompts[0].values.shape[1]), prompts[0].values.dtype)
    for i, prompt in enumerate(prompts):
        some, here = prompt.cut(start, start + width)
        rows[i, : len(here)], present[i, : len(here)] = some, here
    return Media(rows=jnp.asarray(rows.reshape(-1, rows.shape[-1])), present=jnp.asarray(present.reshape(-1)))


def prompt_images(
    cfg: K3Config, prompts: Sequence[Sequence[int]], images: Sequence[Images] | None
) -> list[PromptImages]:
    """One entry per prompt, none at all without images; ValueError unless each prompt has its list."""
    if images is None:
        return []
    if len(images) != len(prompts):
        raise ValueError(f"images has {len(images)} entries for {len(prompts)} prompts; give one list per prompt")
    pairs = enumerate(zip(prompts, images, strict=True))
    return [PromptImages(cfg, prompt, some, f"prompt {i}") for i, (prompt, some) in pairs]
