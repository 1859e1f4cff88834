"""Batches: a pure function of (config, tokenizer, step), made in this process or by workers ahead of time."""

import collections
import dataclasses
import functools
import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import numpy as np

from k3jax.chat.tokenizer import Tokenizer
from train.config import SftConfig
from train.conversations import conversation, encode


@dataclasses.dataclass(frozen=True)
class Batch:
    """R conversations padded to W places; position t predicts `labels[t]`, where `targets` says that it counts."""

    tokens: np.ndarray  # [R, W] int32
    labels: np.ndarray  # [R, W] int32
    targets: np.ndarray  # [R, W] bool
    lengths: np.ndarray  # [R] int32, places in use


def make_batch(config: SftConfig, tokenizer: Tokenizer, step: int) -> Batch:
    """The batch of step `step` (from 0): one width, conversations that fit it and no smaller one."""
    width = random.Random(f"{config.seed} {step} width").choices(config.widths, config.width_shares)[0]
    shorter = max((w for w in config.widths if w < width), default=0)
    rows = config.tokens // width
    tokens, labels = np.zeros((2, rows, width), np.int32)
    targets = np.zeros((rows, width), bool)
    lengths = np.zeros(rows, np.int32)
    weights = dict(config.tasks)
    row = drawn = 0
    while row < rows:
        rng = random.Random(f"{config.seed} {step} {drawn}")
        drawn += 1
        ids, mask = encode(tokenizer, conversation(rng, weights, config.thinking))
        n = len(ids) - 1  # the last token is only a label
        if not shorter < n <= width:
            if drawn > 1000 * (row + 1):
                raise ValueError(
                    f"width {width} suits {row} of {drawn} conversations; choose widths near those of the tasks"
                )
            continue
        tokens[row, :n], labels[row, :n], targets[row, :n], lengths[row] = ids[:-1], ids[1:], mask[1:], n
        row += 1
    return Batch(tokens, labels, targets, lengths)


def batches(config: SftConfig, tokenizer: Tokenizer, start: int) -> Iterator[Batch]:
    """The batches of the steps from `start` on. Workers change the speed only."""
    steps = range(start, config.steps)
    if config.workers == 0:
        yield from (make_batch(config, tokenizer, step) for step in steps)
        return
    context = multiprocessing.get_context("spawn")
    make = functools.partial(_worker_batch, config, str(tokenizer.folder))
    ahead: collections.deque[Future[Batch]] = collections.deque()
    with ProcessPoolExecutor(config.workers, context) as pool:
        for step in steps:
            ahead.append(pool.submit(make, step))
            if len(ahead) > 2 * config.workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


@functools.lru_cache(1)
def _worker_tokenizer(folder: str) -> Tokenizer:
    return Tokenizer(folder)


def _worker_batch(config: SftConfig, folder: str, step: int) -> Batch:
    return make_batch(config, _worker_tokenizer(folder), step)
