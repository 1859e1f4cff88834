"""KDA cases: prefill against packed random sequences, decode, verify and fold on pools."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.case import Check, Timing, compare, normal
from pallas_kernels import kda as kda_op
from pallas_kernels import kda_decode as dec
from pallas_kernels.kda_prefill import kda_prefill

H3, K = 96, 128
BOUND, EPS = -5.0, 1e-5
LENGTHS = (1, 15, 16, 17, 63, 64, 65)


def prefill_inputs(rng, T, H, *, gates=None, scale=1.0):
    q, k, v, f = (normal(rng, 1, T, H, K) * scale for _ in range(4))
    if gates is not None:
        f = jnp.full_like(f, gates)
    a_log, dt_bias = normal(rng, H, dtype=jnp.float32), normal(rng, H, K, dtype=jnp.float32)
    return q, k, v, f, normal(rng, 1, T, H), a_log, dt_bias


def check_prefill(rng) -> Iterator[Check]:
    """32 packings of 8 sequences into 640 rows, half bounded gates and half not; rows of no sequence are NaN."""
    T, H, S = 640, 4, 8
    run = {
        (impl, bound): jax.jit(
            lambda cu, s0, *a, impl=impl, bound=bound: kda_prefill(
                *a, s0, cu_seqlens=cu, lower_bound=bound, return_states=True, impl=impl
            )
        )
        for impl in ("triton", "xla", "ref")
        for bound in (BOUND, None)
    }
    for n in range(32):
        bound = BOUND if n % 2 == 0 else None
        lengths = rng.choice([*LENGTHS, 0, 128, 100], S)
        lengths[rng.integers(S)] = LENGTHS[n % len(LENGTHS)]
        cu = np.minimum(np.concatenate([[0], np.cumsum(lengths)]), T - 3).astype(np.int32)
        gates = {8: 60.0, 9: 60.0, 16: -200.0, 17: -200.0}.get(n)
        args = [*prefill_inputs(rng, T, H, gates=gates, scale=100.0 if n == 24 else 1.0)]
        args[:5] = [a.at[:, cu[-1] :].set(jnp.nan) for a in args[:5]]
        s0 = normal(rng, S, H, K, K, dtype=jnp.float32) * (n % 3 > 0)
        got, xla = (run[impl, bound](cu, s0, *args) for impl in ("triton", "xla"))
        with jax.enable_x64(True):
            want = run["ref", bound](cu, *(jnp.asarray(a, jnp.float64) for a in (s0, *args)))
        yield compare("kda_prefill", f"packed {n} {bound} {lengths.tolist()}", got, xla, want)


def check_prefill_neighbours(rng) -> list[Check]:
    """A sequence gives the same bits wherever it stands and whatever stands beside it."""
    T, H = 640, 4
    run = jax.jit(lambda cu, *a: kda_prefill(*a, cu_seqlens=cu, lower_bound=BOUND, impl="triton"))
    args = prefill_inputs(rng, T, H)
    other = prefill_inputs(rng, T, H)
    moved = [jnp.roll(a, 117, axis=1) if a.ndim > 2 and a.shape[1] == T else a for a in args[:5]]
    moved = [jnp.concatenate([o[:, :117], m[:, 117:]], axis=1) for o, m in zip(other[:5], moved, strict=True)]
    o, final = run(jnp.array([0, 200, 500]), *args)
    o2, final2 = run(jnp.array([0, 117, 317]), *moved, *args[5:])
    same = bool(jnp.array_equal(o[:, :200], o2[:, 117:317]) & jnp.array_equal(final[0], final2[1]))
    return [Check("kda_prefill", "independent of place and neighbours", {"bit_equal": float(same)}, same)]


def time_prefill(rng) -> Iterator[Timing]:
    for T, H in ((8192, 96), (8192, 12), (32768, 12), (8192, 32)):
        bound = None if H == 32 else BOUND
        sets = [prefill_inputs(rng, T, H) for _ in range(2)]
        for impl in ("triton", "xla"):
            if impl == "xla" and (T, H) != (8192, 12):
                continue

            def step(carry, i, impl=impl, sets=sets, bound=bound):
                return carry, kda_prefill(*carry[i % 2], lower_bound=bound, impl=impl)

            yield Timing("kda_prefill", f"B1 T{T} H{H}", impl, step, sets, 4, kda_op.floor(T, H, K, K))


def decode_inputs(rng, batch, H, rows=()):
    return dec.KdaRows(
        qkv=normal(rng, batch, *rows, 3, H, K),
        f=normal(rng, batch, *rows, H, K),
        b=normal(rng, batch, *rows, H),
        gate=normal(rng, batch, *rows, H, K),
    )


def heads_of(rng, H):
    conv, a_log, dt_bias, norm = (normal(rng, *s, dtype=jnp.float32) for s in ((3, H, K, 4), (H,), (H, K), (K,)))
    return dec.KdaHeads(conv=conv * 0.5, a_log=a_log, dt_bias=dt_bias, norm=1 + 0.1 * norm)


def pools(rng, P, H):
    return normal(rng, P, H, K, K, dtype=jnp.float32), normal(rng, P, 3, 3, H, K)


def check_decode(rng) -> Iterator[Check]:
    """Random slots with padding rows among them; then verify and fold against the steps they stand for."""
    H, P, R = 4, 24, 8
    options = dict(lower_bound=BOUND, eps=EPS)
    step = {i: jax.jit(lambda *a, i=i: dec.kda_decode(*a, **options, impl=i)) for i in ("triton", "xla")}
    verify = {i: jax.jit(lambda *a, i=i: dec.kda_verify(*a, **options, impl=i)) for i in ("triton", "xla")}
    exact = jax.jit(lambda *a: dec.kda_decode(*a, **options, impl="xla"))
    exact_verify = jax.jit(lambda *a: dec.kda_verify(*a, **options, impl="xla"))
    fold = jax.jit(lambda *a: dec.kda_fold(*a, impl="triton"))
    heads = heads_of(rng, H)
    for n in range(15):
        B = 8
        rows, (states, windows) = decode_inputs(rng, B, H, (R,)), pools(rng, P, H)
        slots = rng.permutation(P)[:B].astype(np.int32)
        slots[n % B] = -1
        slots = jnp.asarray(slots)
        real = slots >= 0
        states = states.at[P - 1].set(jnp.where(jnp.any(slots == P - 1), states[P - 1], jnp.nan))
        one = jax.tree.map(lambda a: a[:, 0], rows)
        got, xla = (step[i](one, heads, states, windows, slots) for i in ("triton", "xla"))
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (one, heads, states, windows))
            want = exact(*wide, slots)
        keep = jnp.asarray(sorted(set(range(P)) - {P - 1}))
        pick = lambda t, keep=keep: (t[0], t[1][keep], t[2])
        yield compare("kda_decode", f"random {n}", pick(got), pick(xla), pick(want))
        out, record = verify["triton"](rows, heads, states, windows, slots)
        out_xla, _ = verify["xla"](rows, heads, states, windows, slots)
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (rows, heads, states, windows))
            want, _ = exact_verify(*wide, slots)
        yield compare("kda_verify", f"random {n}", (out,), (out_xla,), (want,))
        count = jnp.asarray(rng.integers(0, R + 1, B), jnp.int32).at[0].set(R)
        folded = fold(record, rows.qkv, states, windows, slots, count)
        s, w, outs = states, windows, []
        for t in range(R):
            live = jnp.where(t < count, slots, -1)
            o, s, w = step["triton"](jax.tree.map(lambda a, t=t: a[:, t], rows), heads, s, w, live)
            outs.append(o)
        equal = bool(jnp.array_equal(folded[0], s, equal_nan=True) & jnp.array_equal(folded[1], w))
        drift = float(jnp.max(jnp.abs(jnp.nan_to_num(folded[0]) - jnp.nan_to_num(s))))
        yield Check("kda_fold", f"equals steps {n}", {"bit_equal": float(equal), "largest_difference": drift}, equal)
        alive = (jnp.arange(R) < count[:, None]) & real[:, None]
        steps = jnp.stack(outs, 1)
        equal = bool(
            jnp.array_equal(jnp.where(alive[..., None, None], out, 0), jnp.where(alive[..., None, None], steps, 0))
        )
        yield Check("kda_verify", f"equals steps {n}", {"bit_equal": float(equal)}, equal)
        order = jnp.asarray(rng.permutation(B))
        shuffled = step["triton"](
            jax.tree.map(lambda a, order=order: a[order], one), heads, states, windows, slots[order]
        )
        equal = bool(jnp.array_equal(shuffled[0], got[0][order]) & jnp.array_equal(shuffled[1], got[1], equal_nan=True))
        yield Check("kda_decode", f"independent of place {n}", {"bit_equal": float(equal)}, equal)


def time_decode(rng) -> Iterator[Timing]:
    heads = heads_of(rng, H3)
    for batch in (1, 16, 64, 256):
        P = max(64, 2 * batch)
        rows = decode_inputs(rng, batch, H3)
        for impl in ("triton", "xla"):

            def step(carry, i, impl=impl, batch=batch, P=P):
                states, windows, rows = carry
                slots = (jnp.arange(batch, dtype=jnp.int32) + i * batch) % P
                o, states, windows = dec.kda_decode(
                    rows, heads, states, windows, slots, lower_bound=BOUND, eps=EPS, impl=impl
                )
                return (states, windows, rows), o

            floor = dec.floor_decode(batch, H3, K)
            yield Timing("kda_decode", f"batch {batch} H96", impl, step, (*pools(rng, P, H3), rows), P // batch, floor)


def time_verify_fold(rng) -> Iterator[Timing]:
    batch, R = 64, 8
    heads = heads_of(rng, H3)
    rows = decode_inputs(rng, batch, H3, (R,))
    slots = jnp.arange(batch, dtype=jnp.int32)
    for impl in ("triton", "xla"):

        def step(carry, i, impl=impl):
            at = slots + (i % 2) * batch
            return carry, dec.kda_verify(carry[2], heads, *carry[:2], at, lower_bound=BOUND, eps=EPS, impl=impl)

        floor = dec.floor_verify(batch, R, H3, K)
        yield Timing("kda_verify", "batch 64 W8 H96", impl, step, (*pools(rng, 2 * batch, H3), rows), 4, floor)
    record = jax.jit(lambda *a: dec.kda_verify(*a, lower_bound=BOUND, eps=EPS, impl="xla"))(
        rows, heads, *pools(rng, batch, H3), slots
    )[1]
    for impl in ("triton", "xla"):
        for name, layers, H in (("batch 64 W8 H96, 2 layers", 2, 96), ("batch 64 W8 H12, 69 layers", 69, 12)):
            if impl == "xla" and layers > 2:
                continue
            part = jax.tree.map(lambda a, H=H: a[:, :, :H], record)
            part = jax.tree.map(lambda a, L=layers: jnp.concatenate([a] * L), part)
            qkv = jnp.concatenate([rows.qkv[..., :H, :]] * layers)
            at = jnp.arange(layers * batch, dtype=jnp.int32)
            count = jnp.full(layers * batch, R, jnp.int32)

            def step(carry, i, impl=impl, at=at, count=count):
                states, windows = dec.kda_fold(*carry[2:], *carry[:2], at, count, impl=impl)
                return (states, windows, *carry[2:]), states[0, 0, 0, 0]

            floor = dec.floor_fold(layers * batch, R, H, K)
            yield Timing("kda_fold", name, impl, step, (*pools(rng, layers * batch, H), part, qkv), 2, floor)
