"""Draws tokens that a grammar allows, with a leaning towards its end."""

import random

import numpy as np


def walk(tok, matcher, seed=0, limit=4000):
    """Ids of a whole output, without the final stop id; fails if the grammar does not end within `limit` tokens."""
    rng = random.Random(seed)
    closers = [tok.encode(char)[0] for char in '"}]']
    ids = []
    while len(ids) < limit:
        allowed = np.flatnonzero(matcher.mask()).tolist()
        assert allowed
        stops = [id for id in allowed if id in tok.stop_ids]
        if stops and rng.random() < 0.8 or len(stops) == len(allowed):
            return ids
        allowed = [id for id in allowed if id not in stops]
        controls = [id for id in allowed if tok.is_special(id)]
        closing = [id for id in allowed if id in closers]
        plain = [id for id in allowed if tok.token_bytes(id).isalnum()]
        if controls and rng.random() < (0.5 if len(ids) < 300 else 0.95):
            pool = controls
        elif closing and rng.random() < 0.5:
            pool = closing
        elif plain and rng.random() < 0.9:
            pool = plain
        else:
            pool = allowed
        ids.append(rng.choice(pool))
        assert matcher.accept(ids[-1])
    raise AssertionError(f"no end within {limit} tokens: {tok.decode(ids[:200])} ... {tok.decode(ids[-300:])}")
