"""The engine on the device: every answer is the one that `generate` gives to the request alone."""

import asyncio

import numpy as np
import pytest

import k3jax
from serve.engine import Engine, EngineConfig
from serve.http.backend import Generate, Sampling, Unavailable


@pytest.fixture(scope="module")
def nano():
    return (*k3jax.load("nano"), k3jax.load_tokenizer("nano"))


def running(nano, **how):
    engine = Engine(*nano[:2], EngineConfig(**{"memory": 2**23, "max_running": 4, "max_length": 256, **how}))
    engine.start()
    return engine


async def read(engine, request):
    """(ids, finish reason, cached tokens, items)"""
    items = [item async for item in engine.generate(request)]
    return [i for item in items for i in item.ids], items[-1].finish_reason, items[-1].cached_tokens, items


def together(engine, requests):
    async def run():
        return await asyncio.gather(*(read(engine, r) for r in requests))

    return asyncio.run(run())


def stop(engine):
    """Stop, and see that nothing of the requests is left in the pool."""
    engine.stop()
    engine.scheduler.flush_cache()
    usage = engine.scheduler.pool.usage()
    assert engine.scheduler.idle and usage.states == usage.pages == 0
    assert not engine.ready()


def ask(tok, text, **how):
    prompt = tok.encode_chat([{"role": "user", "content": text}], thinking=False)
    return Generate(tuple(prompt), Sampling(**{"max_new_tokens": 24, "stop_ids": tok.stop_ids, **how}))


def alone(nano, request):
    cfg, params, _ = nano
    how = request.sampling
    filters = dict(temperature=how.temperature, top_k=how.top_k, top_p=how.top_p, min_p=how.min_p, seed=how.seed)
    out = k3jax.generate(
        cfg, params, [request.prompt], max_new_tokens=how.max_new_tokens, stop_ids=how.stop_ids, **filters
    )
    return out.tokens[0], out.logprobs[0], out.finish_reasons[0]


def test_answers_equal_those_given_alone(nano):
    """Greedy and drawn, in a batch of four lanes, with the logits' own log-probabilities."""
    cfg, params, tok = nano
    engine = running(nano)
    requests = [
        ask(tok, "23+45=", temperature=0.0, logprobs=2),
        ask(tok, "457-812=", temperature=1.3, seed=5, top_p=0.9),
        ask(tok, "reverse banana", temperature=1.3, seed=6, top_k=20),
        ask(tok, "12+7=", temperature=0.0, max_new_tokens=2),
        ask(tok, "99+99=", temperature=1.5, seed=7, min_p=0.01, stop_ids=()),
    ]
    for request, (ids, reason, cached, items) in zip(requests, together(engine, requests), strict=True):
        tokens, logprobs, expected = alone(nano, request)
        assert (ids[: len(tokens)], reason, cached) == (tokens, expected, 0)
        assert ids[len(tokens) :] == ([] if reason == "length" else [i for i in ids[-1:] if i in tok.stop_ids])
        measured = [p for item in items for p in item.logprobs]
        assert np.allclose(measured[: len(logprobs)], logprobs, atol=1e-4)
        if request.sampling.logprobs:
            assert all(max(item.top[0], key=item.top[0].get) == item.ids[0] for item in items)
    stop(engine)


def test_refusals(nano):
    cfg, params, tok = nano
    engine = running(nano, max_waiting=1)
    with pytest.raises(ValueError, match="the limit is 256 together"):
        together(engine, [ask(tok, "1+1=", max_new_tokens=250)])
    with pytest.raises(ValueError, match="adapter 'x' is not loaded"):
        together(engine, [Generate((1,), Sampling(max_new_tokens=1), adapter="x")])
    engine.scheduler.drain()
    with pytest.raises(Unavailable, match="shutting down"):
        together(engine, [ask(tok, "1+1=")])
    stop(engine)


@pytest.mark.slow
def test_a_storm_with_little_memory(nano):
    """64 requests on a pool that fits three: each gets its own answer, whatever else is cancelled or retracted."""
    cfg, params, tok = nano
    engine = running(nano, memory=10 * 83968, page=16, max_running=16, max_tokens=256)
    rng = np.random.default_rng(0)
    prefix = tok.encode("copy this: " + "abcdefgh " * 20)[:128]
    requests = []
    for i in range(64):
        tail = rng.integers(0, 700, int(rng.integers(1, 60))).tolist()
        prompt = (*(prefix if i % 2 else []), *tail)
        how = dict(temperature=float(rng.choice([0.0, 1.0])), seed=i, stop_ids=())
        requests.append(Generate(tuple(prompt), Sampling(max_new_tokens=int(rng.integers(1, 60)), **how)))

    async def client(request, vanish):
        got = []
        stream = engine.generate(request)
        async for item in stream:
            got += item.ids
            if vanish and len(got) >= vanish:
                await stream.aclose()
                break
        return got

    async def run():
        vanish = [int(rng.integers(1, 9)) if i % 5 == 0 else 0 for i in range(64)]
        return vanish, await asyncio.gather(*(client(r, v) for r, v in zip(requests, vanish, strict=True)))

    vanish, answers = asyncio.run(run())
    expected = k3jax.generate(
        cfg,
        params,
        [r.prompt for r in requests],
        max_new_tokens=[r.sampling.max_new_tokens for r in requests],
        temperature=[r.sampling.temperature for r in requests],
        seed=[r.sampling.seed for r in requests],
        stop_ids=(),
    ).tokens
    for v, got, want in zip(vanish, answers, expected, strict=True):
        assert got == want[: len(got)] and (v or len(got) == len(want))
    stop(engine)
    counts = engine.scheduler.stats().counts
    assert sum(n for name, n in counts.items() if name.startswith("finished_")) == 64
