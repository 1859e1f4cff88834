"""Float64 numpy truths that the tests of the ops share; none of them calls the code under test."""

import json
from collections.abc import Iterator

import numpy as np

from tests.conftest import DATA

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # magnitudes of the eight codes without a sign
E2M1 = np.concatenate([E2M1, -E2M1])


def cases(file: str) -> dict[str, dict]:
    """The cases of data/cases/`file` by id."""
    lines = (DATA / "cases" / file).read_text().splitlines()
    return {case["id"]: case for case in map(json.loads, lines)}


def sigmoid(x):
    return np.where(x >= 0, 1, np.exp(-np.abs(x))) / (1 + np.exp(-np.abs(x)))


def normalise(x):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def kda_tokens(q, k, v, g, beta, state) -> Iterator[tuple[np.ndarray, ...]]:
    """Token by token, q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H], state [B, H, K, V], all float64:
    yields o [B, H, V], the state before and after the decay, and after the token [B, H, K, V]."""
    for t in range(q.shape[1]):
        before, state = state, np.exp(g[:, t])[..., None] * state
        decayed = state
        u = v[:, t] - np.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * u)
        yield np.einsum("bhkv,bhk->bhv", state, q[:, t]) * q.shape[-1] ** -0.5, before, decayed, state


def kda_forward(q, k, v, g, beta, state):
    """o [B, T, H, V] and the state after every token [B, T, H, K, V]."""
    steps = list(kda_tokens(q, k, v, g, beta, state))
    return np.stack([s[0] for s in steps], axis=1), np.stack([s[3] for s in steps], axis=1)


def kda_backward(q, k, v, g, beta, state, do, dstate):
    """Gradients of sum(o * do) + sum(final state * dstate) in the order of the arguments, by the chain rule of
    each token in reverse."""
    dq, dk, dv, dg, dbeta = (np.zeros_like(a) for a in (q, k, v, g, beta))
    scale = q.shape[-1] ** -0.5
    steps = list(kda_tokens(q, k, v, g, beta, state))
    for t in reversed(range(q.shape[1])):
        _, _, decayed, after = steps[t]
        error = v[:, t] - np.einsum("bhkv,bhk->bhv", decayed, k[:, t])
        dq[:, t] = scale * np.einsum("bhkv,bhv->bhk", after, do[:, t])
        dstate = dstate + scale * np.einsum("bhk,bhv->bhkv", q[:, t], do[:, t])
        du = np.einsum("bhkv,bhk->bhv", dstate, k[:, t])
        dbeta[:, t] = np.sum(du * error, axis=-1)
        dv[:, t] = derror = beta[:, t, :, None] * du
        dk[:, t] = np.einsum("bhkv,bhv->bhk", dstate, beta[:, t, :, None] * error)
        dk[:, t] -= np.einsum("bhkv,bhv->bhk", decayed, derror)
        ddecayed = dstate - np.einsum("bhk,bhv->bhkv", k[:, t], derror)
        dg[:, t] = np.sum(ddecayed * decayed, axis=-1)
        dstate = np.exp(g[:, t])[..., None] * ddecayed
    return dq, dk, dv, dg, dbeta, dstate


def kda_inputs(rng, B, T, H, K, V, gate="mixed"):
    """Random q, k (normalised), v, g, beta and an initial state, float64 values that float32 holds exactly."""
    q, k = (normalise(rng.normal(size=(B, T, H, K))) for _ in range(2))
    v = rng.normal(size=(B, T, H, V))
    g = {
        "none": np.zeros((B, T, H, K)),
        "floor": np.full((B, T, H, K), -5.0),
        "mixed": -5 * sigmoid(3 * rng.normal(size=(B, T, H, K))),
        "slow": -0.01 * rng.random((B, T, H, K)),
        "split": np.where(rng.random((B, 1, H, K)) < 0.5, 0.0, -5.0) * np.ones((B, T, H, K)),
        "spike": np.where(np.arange(T)[:, None, None] == T // 2, -5.0, -0.001) * np.ones((B, T, H, K)),
        "unbounded": -np.exp(rng.uniform(-6, 6, size=(B, T, H, K))),
    }[gate]
    beta = sigmoid(2 * rng.normal(size=(B, T, H)))
    state = 0.1 * rng.normal(size=(B, H, K, V))
    return tuple(a.astype(np.float32).astype(np.float64) for a in (q, k, v, g, beta, state))


def attention(q, k, v, scale, q_start, kv_len):
    """q [B, T, H, Dq], k [B, S, H, Dq], v [B, S, H, Dv] -> o [B, T, H, Dv] and lse [B, T, H], one query at a time."""
    B, T, H, _ = q.shape
    o, lse = np.zeros((B, T, H, v.shape[-1])), np.full((B, T, H), -np.inf)
    for b, t, h in np.ndindex(B, T, H):
        seen = min(q_start[b] + t + 1, kv_len[b])
        if seen <= 0:
            continue
        scores = k[b, :seen, h] @ q[b, t, h] * scale
        peak = scores.max()
        weight = np.exp(scores - peak)
        o[b, t, h] = weight @ v[b, :seen, h] / weight.sum()
        lse[b, t, h] = peak + np.log(weight.sum())
    return o, lse


def situ(gate, up, beta=4.0, linear_beta=25.0):
    up = up if linear_beta is None else linear_beta * np.tanh(up / linear_beta)
    return beta * np.tanh(gate / beta) * sigmoid(gate) * up


def experts(x, ids, weights, w1, w3, w2, glu=situ, first_expert=0):
    """x [N, D], w1, w3 [E, D, F], w2 [E, F, Dout]: every chosen pair in turn."""
    y = np.zeros((x.shape[0], w2.shape[-1]))
    for n, j in np.ndindex(*ids.shape):
        e = ids[n, j] - first_expert
        if 0 <= e < len(w1):
            y[n] += weights[n, j] * (glu(x[n] @ w1[e], x[n] @ w3[e]) @ w2[e])
    return y


def mxfp4_values(packed, scale):
    """packed [..., out, in/2] and scale [..., out, in/32] uint8 -> values [..., out, in]."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return E2M1[codes] * np.exp2(np.repeat(scale.astype(np.float64), 32, axis=-1) - 127)
