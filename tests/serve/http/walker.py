"""Draws tokens that a grammar allows, with a leaning towards its end."""

import functools
import random

import numpy as np


@functools.cache
def _kinds(tok):
    """(stop ids, other specials, closing characters, letters and digits)."""
    ids = range(tok.vocab_size)
    specials = {id for id in ids if tok.is_special(id)}
    stops = set(tok.stop_ids)
    closing = {tok.encode(char)[0] for char in '"}]'}
    return stops, specials - stops, closing, {id for id in ids if id not in specials and tok.token_bytes(id).isalnum()}


def walk(tok, matcher, seed=0, limit=4000):
    """Ids of a whole output, without the final stop id; fails if the grammar does not end within `limit` tokens."""
    rng = random.Random(seed)
    stops, specials, closing, plain = _kinds(tok)
    ids = []
    while len(ids) < limit:
        allowed = set(np.flatnonzero(matcher.mask()).tolist())
        assert allowed
        if allowed <= stops or (allowed & stops and rng.random() < 0.8):
            return ids
        allowed -= stops
        pool = allowed
        if allowed & specials and rng.random() < (0.5 if len(ids) < 300 else 0.95):
            pool = allowed & specials
        elif allowed & closing and rng.random() < 0.5:
            pool = allowed & closing
        elif allowed & plain and rng.random() < 0.9:
            pool = allowed & plain
        pool = sorted(pool)
        ids.append(rng.choice(pool))
        assert matcher.accept(ids[-1])
    raise AssertionError(f"no end within {limit} tokens: {tok.decode(ids[:200])} ... {tok.decode(ids[-300:])}")
