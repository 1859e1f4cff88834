"""Sampling, ragged rows and the decode loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.cache import init_cache
from k3jax.decode import bucket, prefill
from k3jax.model import logits_of, step
from k3jax.rows import ragged, rectangle
from k3jax.sample import sample, sampling
from tests.conftest import relative_l2


@pytest.fixture(scope="module")
def tiny():
    cfg = k3jax.preset("tiny")
    cfg = dataclasses.replace(cfg, dtype="float32", vision=None)
    params = jax.tree.map(lambda x: x * 5 if x.ndim > 1 else x, k3jax.init_params(cfg, jax.random.key(0)))
    return cfg, params


def draw(logits, n=4000, **how):
    """Frequencies of n draws of one row."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, len(logits)))
    tokens, logprobs = sample(rows, sampling(n, seed=np.arange(n), **how), jnp.zeros(n, jnp.int32))
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / n, np.asarray(tokens), np.asarray(logprobs)


def test_draws_follow_the_distribution():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    freq, tokens, logprobs = draw(np.log(p), temperature=1.0)
    assert np.abs(freq - p).max() < 0.03
    assert np.allclose(logprobs, np.log(p)[tokens], atol=1e-6)
    sharp = p**2 / (p**2).sum()
    freq, tokens, logprobs = draw(np.log(p), temperature=0.5)
    assert np.abs(freq - sharp).max() < 0.03
    assert np.allclose(logprobs, np.log(p)[tokens], atol=1e-6)  # of the unmodified distribution


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        (dict(top_k=1), [0]),
        (dict(top_k=2), [0, 1]),
        (dict(top_p=0.5), [0]),
        (dict(top_p=0.51), [0, 1]),
        (dict(top_p=0.81), [0, 1, 2]),
        (dict(min_p=0.5), [0, 1]),
        (dict(min_p=1.0), [0]),
        (dict(top_k=3, top_p=0.6), [0, 1]),  # 0.5/0.95 < 0.6: top-p looks at what top-k kept
        (dict(top_p=1e-6), [0]),
    ],
)
def test_filters_keep_exactly(how, kept):
    p = np.array([0.5, 0.3, 0.15, 0.05])
    freq, _, _ = draw(np.log(p), temperature=1.0, **how)
    assert np.flatnonzero(freq).tolist() == kept
    expected = p[kept] / p[kept].sum()
    assert np.abs(freq[kept] - expected).max() < 0.03


def test_greedy_and_ties():
    freq, _, _ = draw([1.0, 2.0, 2.0, 0.0], temperature=0.0)
    assert freq.tolist() == [0, 1, 0, 0]
    freq, _, _ = draw([1.0, 2.0, 2.0, 0.0], temperature=1.0, top_k=1)
    assert freq.tolist() == [0, 1, 0, 0]


def test_a_draw_depends_on_seed_and_position_only():
    logits = jnp.zeros((4, 100))
    how = sampling(4, temperature=1.0, seed=[7, 8, 7, 7])
    tokens, _ = sample(logits, how, jnp.array([3, 3, 3, 4]))
    assert tokens[0] == tokens[2] and len({int(t) for t in tokens[jnp.array([0, 1, 3])]}) == 3
    mixed = sampling(4, temperature=[1.0, 0.0, 1.0, 1.0], top_k=[0, 0, 5, 0], seed=[7, 8, 7, 7])
    again, _ = sample(logits, mixed, jnp.array([3, 3, 3, 4]))
    assert again[0] == tokens[0] and again[1] == 0 and again[2] < 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -1),
        ("top_k", -1),
    ],
)
def test_sampling_ranges(name, value):
    with pytest.raises(ValueError, match=f"{name} is"):
        sampling(2, **{name: value})


def test_ragged_rows_equal_each_request_alone(tiny):
    """Decode, verification and prefill rows of different requests in one step, with padding rows at the end."""
    cfg, params = tiny
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 512, n) for n in (5, 1, 9, 30)]
    more = [rng.integers(0, 512, n) for n in (1, 4, 0, 25)]
    cache, _ = prefill(cfg, params, prompts, init_cache(cfg, 4, 64))
    splits = np.concatenate([[0], np.cumsum([len(m) for m in more])])
    tokens = np.concatenate([*more, [0, 0]]).astype(np.int32)
    rows = ragged(jnp.asarray(splits, jnp.int32), len(tokens), 32)
    hidden, after = jax.jit(step, static_argnums=0)(cfg, params, jnp.asarray(tokens), rows, cache)
    logits = np.asarray(logits_of(params, hidden))
    assert after.length.tolist() == [6, 5, 9, 55]
    for i, (prompt, extra) in enumerate(zip(prompts, more, strict=True)):
        n = len(prompt) + len(extra)
        padded = np.zeros((1, 64), np.int32)
        padded[0, :n] = np.concatenate([prompt, extra])
        alone, single = k3jax.forward(cfg, params, padded, lengths=jnp.array([n]))
        if len(extra):
            assert relative_l2(logits[splits[i] : splits[i + 1]], alone[0, len(prompt) : n]) < 1e-5
        for layer in cfg.kda_layers:
            assert relative_l2(after.layers[layer].state[i], single.layers[layer].state[0]) < 1e-5
            assert relative_l2(after.layers[layer].conv[i], single.layers[layer].conv[0]) < 1e-5


def test_rows_layouts_agree():
    x = jnp.arange(12.0).reshape(6, 2)
    box = rectangle(jnp.array([3, 1]), 3)
    assert box.to_rectangle(x).shape == (2, 3, 2) and np.array_equal(box.to_rows(box.to_rectangle(x)), x)
    packed = ragged(jnp.array([0, 3, 3, 4]), 6, 3)
    cells = packed.to_rectangle(x)
    assert np.array_equal(cells[0], x[:3]) and np.array_equal(cells[2, 0], x[3]) and float(jnp.abs(cells[1]).sum()) == 0
    assert np.array_equal(packed.to_rows(cells)[:4], x[:4]) and float(jnp.abs(packed.to_rows(cells)[4:]).sum()) == 0
    assert packed.last(x)[jnp.array([0, 2])].tolist() == [x[2].tolist(), x[3].tolist()]
    assert packed.valid.tolist() == [[True] * 3, [False] * 3, [True, False, False]]


def test_stop_limit_and_logprobs(tiny):
    cfg, params = tiny
    prompts = [[1, 2, 3], [4], [5, 6]]
    free = k3jax.generate(cfg, params, prompts, max_new_tokens=[6, 3, 1], stop_ids=())
    assert [len(t) for t in free.tokens] == [6, 3, 1] and free.finish_reasons == ["length"] * 3
    logits, _ = k3jax.forward(cfg, params, jnp.array([prompts[0] + free.tokens[0]]))
    expected = jax.nn.log_softmax(logits[0, 2:-1])[jnp.arange(6), jnp.array(free.tokens[0])]
    assert np.allclose(free.logprobs[0], expected, atol=1e-5)
    stop = free.tokens[0][2]
    first = free.tokens[0].index(stop)
    stopped = k3jax.generate(cfg, params, prompts[:1], max_new_tokens=6, stop_ids=[stop])
    assert stopped.tokens == [free.tokens[0][:first]] and stopped.finish_reasons == ["stop"]


def test_prompts_longer_than_a_chunk(tiny):
    cfg, params = tiny
    prompt = np.random.default_rng(1).integers(0, 512, 333).tolist()
    cache, logits = prefill(cfg, params, [prompt, prompt[:100]], init_cache(cfg, 2, 512))
    whole, _ = k3jax.forward(cfg, params, jnp.array([prompt]))
    assert relative_l2(logits[0], whole[0, -1]) < 1e-5
    assert relative_l2(logits[1], whole[0, 99]) < 1e-5
    assert cache.length.tolist() == [333, 100]


def test_seeds(tiny):
    cfg, params = tiny
    how = dict(max_new_tokens=8, temperature=1.0, stop_ids=())
    one = k3jax.generate(cfg, params, [[1, 2]] * 2, key=jax.random.key(5), **how)
    assert one.tokens[0] != one.tokens[1]
    assert one == k3jax.generate(cfg, params, [[1, 2]] * 2, key=jax.random.key(5), **how)
    assert k3jax.generate(cfg, params, [[1, 2]], seed=-1, **how) == k3jax.generate(
        cfg, params, [[1, 2]], seed=-1, **how
    )
    with pytest.raises(ValueError, match="needs randomness"):
        k3jax.generate(cfg, params, [[1, 2]], **how)
    with pytest.raises(ValueError, match="both key and seed"):
        k3jax.generate(cfg, params, [[1, 2]], key=jax.random.key(5), seed=5, **how)


BAD_CALLS = {
    "no prompts": (([],), {}, "no prompts"),
    "empty prompt": (([[1], []],), {}, "prompt 1 is empty"),
    "id out of range": (([[1, 512]],), {}, "prompt 0 has token id 512"),
    "negative id": (([[-1]],), {}, "prompt 0 has token id -1"),
    "too long": (([[1] * 4090],), dict(max_new_tokens=7), "prompt 0 has 4090 tokens"),
    "one prompt, not a list": (([1, 2, 3],), {}, "prompt 0 is 1, not a list"),
    "huge id": (([[1, 2**64 - 1]],), {}, "prompt 0 has token id 18446744073709551615"),
    "not an id": (([[1, True]],), {}, "prompt 0 holds True"),
    "limit of a kind": (([[1]],), dict(max_new_tokens=2.5), "max_new_tokens is 2.5"),
    "seed": (([[1]],), dict(temperature=1.0, seed=1.5), "seed is 1.5"),
    "huge seed": (([[1]],), dict(temperature=1.0, seed=2**63), "seed is 9223372036854775808"),
    "seeds": (([[1]] * 3,), dict(temperature=1.0, seed=[1, 2]), "seed has 2 entries for 3 prompts"),
    "temperatures": (([[1]] * 3,), dict(temperature=[0, 1], seed=0), r"temperature is \[0, 1\], expected a number"),
    "top_k": (([[1]],), dict(top_k=2.5), "top_k is 2.5, expected a whole number"),
    "stop id": (([[1]],), dict(stop_ids=[512]), "stop id 512 is outside"),
    "nothing to do": (([[1]],), dict(max_new_tokens=0), "max_new_tokens is 0"),
    "stop ids": (([[1]],), dict(stop_ids=range(33)), "33 stop ids"),
    "limits": (([[1], [2]],), dict(max_new_tokens=[3]), "max_new_tokens has 1"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_get_one_sentence(tiny, case):
    args, kwargs, message = BAD_CALLS[case]
    with pytest.raises(ValueError, match=message) as error:
        k3jax.generate(*tiny, *args, **kwargs)
    assert "\n" not in str(error.value)


def test_forward_refuses_what_would_wrap_or_not_belong(tiny):
    cfg, params = tiny
    for tokens, message in (
        ([[2**32 + 5]], "token id 4294967301 is outside"),
        (np.array([[2**63 + 1]], np.uint64), "token id 9223372036854775809 is outside"),
        ([[1, 2], [3]], "different lengths"),
        ([[1.0]], "expected integers"),
    ):
        with pytest.raises(ValueError, match=message):
            k3jax.forward(cfg, params, tokens)
    for lengths, message in (([2**32 + 1], "must lie in 0..2"), ([1.7], "expected integers"), ([True], "integers")):
        with pytest.raises(ValueError, match=message):
            k3jax.forward(cfg, params, [[1, 2]], lengths=lengths)
    cache = init_cache(cfg, 1, 8)
    other = init_cache(dataclasses.replace(cfg, layer_types=("mla", "kda", "kda", "kda", "mla")), 1, 8)
    bf16 = init_cache(dataclasses.replace(cfg, dtype="bfloat16"), 1, 8)
    fewer = dataclasses.replace(cache, layers=cache.layers[:-1])
    for wrong in (other, bf16, fewer, "x", dataclasses.replace(cache, length=jnp.zeros(1))):
        with pytest.raises(ValueError, match="init_cache"):
            k3jax.forward(cfg, params, [[1]], cache=wrong)
    with pytest.raises(ValueError, match="pass its own"):
        k3jax.forward(dataclasses.replace(cfg, vocab_size=600), params, [[550]])
    with pytest.raises(ValueError, match="every is 0"):
        next(k3jax.stream(cfg, params, [1], every=0))


def test_forward_refuses(tiny):
    cfg, params = tiny
    with pytest.raises(ValueError, match="token id 512 is outside"):
        k3jax.forward(cfg, params, jnp.array([[512]]))
    with pytest.raises(ValueError, match="add the batch axis"):
        k3jax.forward(cfg, params, jnp.array([1, 2]))
    with pytest.raises(ValueError, match="lengths"):
        k3jax.forward(cfg, params, jnp.array([[1, 2]]), lengths=jnp.array([3]))
    _, cache = k3jax.forward(cfg, params, jnp.array([[1, 2]]))
    with pytest.raises(ValueError, match="3 tokens do not fit the cache of 2"):
        k3jax.forward(cfg, params, jnp.array([[1]]), cache=cache)
    with pytest.raises(ValueError, match="cache holds 1 sequences, tokens 2"):
        k3jax.forward(cfg, params, jnp.array([[1], [2]]), cache=cache)
    with pytest.raises(ValueError, match="max_len 5000 exceeds"):
        init_cache(cfg, 1, 5000)


def test_the_cache_is_donated(tiny):
    cfg, params = tiny
    cache = init_cache(cfg, 1, 256)
    prefill(cfg, params, [[1, 2, 3]], cache)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache.layers))


def test_buckets():
    assert bucket(17, (16, 64), "x") == 64
    with pytest.raises(ValueError, match="x 65 exceeds the largest bucket 64"):
        bucket(65, (16, 64), "x")


@pytest.mark.slow
def test_no_compilation_after_warmup(tiny, caplog):
    cfg, params = tiny
    k3jax.warmup(cfg, params, batch=4, max_len=256)
    rng = np.random.default_rng(2)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    for _ in range(200):
        prompts = [rng.integers(0, 512, rng.integers(1, 250)).tolist() for _ in range(rng.integers(1, 5))]
        new = [int(rng.integers(1, min(257 - len(p), 20))) for p in prompts]
        how = dict(temperature=float(rng.choice([0.0, 0.7])), top_k=int(rng.integers(0, 9)), top_p=0.9)
        out = k3jax.generate(cfg, params, prompts, max_new_tokens=new, seed=int(rng.integers(99)), **how)
        assert len(out.tokens) == len(prompts)
    assert compiled == []
    jax.jit(lambda x: x + 1)(jnp.zeros(77))
    assert compiled  # the counter counts
    jax.monitoring.clear_event_listeners()
