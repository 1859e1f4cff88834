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
    """Rows that replace the embeddings of tokens: `rows` [M, D] where `present` [M] bool."""

    rows: jax.Array
    present: jax.Array


class Splice:
    """The images of ragged prompts, on the host, ready to be cut into chunks of any width."""

    def __init__(self, cfg: K3Config, prompts: Sequence[Sequence[int]], images: Sequence[Images]):
        """`images[i]` are those of prompt i; ValueError unless their rows are as many as its placeholder tokens."""
        if len(images) != len(prompts):
            raise ValueError(f"images has {len(images)} entries for {len(prompts)} prompts; give one list per prompt")
        self._width, self._dtype = cfg.hidden_size, jnp.dtype(cfg.dtype)
        self._at: list[np.ndarray] = []  # per prompt [T] bool: an image token
        self._rows: list[np.ndarray] = []  # per prompt [image tokens, D]
        for i, (prompt, arrays) in enumerate(zip(prompts, images, strict=True)):
            for array in arrays:
                if array.ndim != 2 or array.shape[1] != self._width:
                    raise ValueError(
                        f"an image of prompt {i} has the shape {array.shape}; pass [tokens, {self._width}]"
                        " as embed_pictures gives them"
                    )
            rows = [np.asarray(array, self._dtype) for array in arrays]
            self._rows.append(np.concatenate([np.zeros((0, self._width), self._dtype), *rows]))
            self._at.append(np.asarray(prompt, np.int64) == cfg.media_placeholder_token_id)
            found = int(self._at[-1].sum())
            if found != len(self._rows[-1]):
                raise ValueError(
                    f"prompt {i} has {found} placeholder tokens for images of {len(self._rows[-1])} tokens;"
                    " repeat each placeholder as often as its image has tokens"
                )

    def chunk(self, start: int, width: int) -> Media | None:
        """For tokens start .. start + width of every prompt, as flat rows; None when no image is among them."""
        present = np.zeros((len(self._at), width), bool)
        rows = np.zeros((*present.shape, self._width), self._dtype)
        for i, (at, values) in enumerate(zip(self._at, self._rows, strict=True)):
            here = at[start : start + width]
            first = int(at[:start].sum())
            present[i, : len(here)] = here
            rows[i, : len(here)][here] = values[first : first + here.sum()]
        if not present.any():
            return None
        return Media(rows=jnp.asarray(rows.reshape(-1, self._width)), present=jnp.asarray(present.reshape(-1)))
