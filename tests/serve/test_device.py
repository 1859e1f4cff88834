"""The pooled cache against the dense one, on shuffled slots and pages among poisoned neighbours."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.sample import sampling
from serve.device import Batch, Layout, copy_units, run_step
from tests.conftest import relative_l2

PAGE = 8
POISON = 0x7FC00000  # NaN as float32 and in both halves of a word as bfloat16 or zero


@pytest.fixture(scope="module", params=["tiny", "tiny48"])
def model(request):
    cfg = dataclasses.replace(k3jax.preset(request.param), dtype="float32", vision=None)
    return cfg, k3jax.init_params(cfg, jax.random.key(0)), Layout.of(cfg, PAGE)


def place(layout, rng, requests, pages):
    """Slots and pages of a pool in which states lie below pages, each in random order."""
    slots = 1 + rng.permutation(requests)
    first = -(-(1 + requests) * layout.state_rows // layout.page_rows) + 1
    table = first + rng.permutation(requests * pages).reshape(requests, pages)
    rows = (first + requests * pages) * layout.page_rows
    return slots.astype(np.int32), table.astype(np.int32), jnp.full((rows, 128), POISON, jnp.uint32)


def batch(tokens, count, slots, fresh, pages, length, **how):
    R = len(count)  # copies: the caller changes `length` while the step runs
    return Batch(
        tokens=jnp.array(tokens, jnp.int32),
        count=jnp.array(count, jnp.int32),
        row=jnp.array(slots, jnp.int32),
        slots=jnp.array(slots, jnp.int32),
        fresh=jnp.array(fresh),
        pages=jnp.array(pages, jnp.int32),
        length=jnp.array(length, jnp.int32),
        write_from=jnp.zeros(R, jnp.int32),
        sampling=sampling(R, **how),
        bias=jnp.zeros((R, 512)),
        repetition=jnp.ones((R, 512)),
    )


def test_chunks_and_decode_steps_equal_the_dense_cache(model):
    """Ragged chunks of three requests and a padding one, then decode from the table of last tokens."""
    cfg, params, layout = model
    rng = np.random.default_rng(0)
    slots, pages, pool = place(layout, rng, 3, 6)
    slots, pages = np.append(slots, 0), np.concatenate([pages, np.zeros((1, 6), np.int32)])
    prompts = [rng.integers(0, 512, n) for n in (29, 13, 7)]
    last, length = jnp.zeros(8, jnp.int32), np.zeros(4, np.int32)
    tokens_of = [[], [], []]
    while any(n < len(p) for n, p in zip(length, prompts, strict=False)):
        tokens, count = np.zeros((4, 16), np.int32), np.zeros(4, np.int32)
        for i, p in enumerate(prompts):
            part = p[length[i] : length[i] + 16]
            tokens[i, : len(part)], count[i] = part, len(part)
        step = batch(tokens, count, slots, length == 0, pages, length)
        pool, last, drawn = run_step(cfg, layout, params, pool, last, step)
        length += count
        for i, p in enumerate(prompts):
            if count[i] and length[i] == len(p):
                tokens_of[i].append(int(drawn.token[i]))
    for _ in range(4):
        step = batch(np.full((4, 1), -1), [1, 1, 1, 0], slots, length == 0, pages, length)
        pool, last, drawn = run_step(cfg, layout, params, pool, last, step)
        length += [1, 1, 1, 0]
        for i in range(3):
            tokens_of[i].append(int(drawn.token[i]))
            assert np.isfinite(drawn.logprob[i])
    for p, tokens in zip(prompts, tokens_of, strict=True):
        expected = k3jax.generate(cfg, params, [p.tolist()], max_new_tokens=5, stop_ids=())
        assert tokens == expected.tokens[0]


def test_logprobs_and_alternatives(model):
    cfg, params, layout = model
    slots, pages, pool = place(layout, np.random.default_rng(1), 1, 2)
    step = batch(np.arange(16)[None], [11], slots, [True], pages, [0], temperature=1.0, seed=3)
    bias = jnp.zeros((1, 512)).at[0, 17].set(1e9)
    pool, last, drawn = run_step(
        cfg, layout, params, pool, jnp.zeros(4, jnp.int32), dataclasses.replace(step, bias=bias)
    )
    logits, _ = k3jax.forward(cfg, params, jnp.arange(11)[None])
    logprobs = np.asarray(jax.nn.log_softmax(logits[0, -1]))
    assert drawn.token.tolist() == [17] and last[slots[0]] == 17
    assert abs(float(drawn.logprob[0]) - logprobs[17]) < 1e-4  # of the unmodified distribution
    assert drawn.top_ids[0].tolist() == np.argsort(-logprobs, kind="stable")[:20].tolist()
    assert relative_l2(drawn.top_logprobs[0], np.sort(logprobs)[::-1][:20]) < 1e-5


def test_units_are_copied_as_one(model):
    _, _, layout = model
    rows = layout.state_rows
    pool = jnp.repeat(jnp.arange(5, dtype=jnp.uint32), rows)[:, None] * jnp.ones((1, 128), jnp.uint32)
    swapped = copy_units(pool, rows, jnp.array([1, 2, 0]), jnp.array([2, 1, 0]))
    assert swapped[::rows, 0].tolist() == [0, 2, 1, 3, 4]


def test_units_are_whole_rows():
    cfg = dataclasses.replace(k3jax.preset("k3"), dtype="bfloat16")
    layout = Layout.of(cfg, 64)
    geometry = layout.geometry(10**12)
    assert geometry.page == 64 * 27_648
    assert geometry.state == 69 * (96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2) == 449_372_160
    assert geometry.total == 10**12 // 512 * 512
