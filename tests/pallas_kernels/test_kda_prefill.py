"""KDA from unprepared inputs, and how rows are cut into the GPU kernel's chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda, kda_gate, l2_norm
from pallas_kernels.kda_gpu import CHUNK, cut_even, cut_packed
from pallas_kernels.kda_prefill import kda_prefill
from tests.conftest import relative_l2


def test_prefill_is_kda_of_the_prepared_inputs():
    rng = np.random.default_rng(0)
    q, k, v, f = (jnp.asarray(rng.standard_normal((1, 70, 2, 8)), jnp.float32) for _ in range(4))
    b, a_log, dt_bias = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((1, 70, 2), (2,), (2, 8)))
    o, final = kda_prefill(q, k, v, f, b, a_log, dt_bias, lower_bound=-5.0)
    g = kda_gate(f, a_log, dt_bias, -5.0)
    want = kda(l2_norm(q), l2_norm(k), v, g, jax.nn.sigmoid(b), lower_bound=-5.0, impl="ref")
    assert relative_l2(o, want[0]) < 1e-5 and relative_l2(final, want[1]) < 1e-5


def test_prefill_refuses_gates_that_do_not_fit():
    wide, tokens = jnp.zeros((1, 4, 2, 8)), jnp.zeros((1, 4, 2))
    with pytest.raises(ValueError, match="dt_bias .* do not fit"):
        kda_prefill(wide, wide, wide, wide, tokens, jnp.zeros(2), jnp.zeros((2, 7)), lower_bound=-5.0)


def cut_by_hand(T, lengths, every):
    """Rows of each chunk, chunks of each sequence, snapshots, in plain loops."""
    rows, firsts, places, start, place = [], [0], [], 0, 0
    for n in lengths:
        for at in range(0, n, CHUNK):
            rows.append((start + at, min(CHUNK, n - at)))
            end = at + CHUNK
            full = end <= n and end % every == 0
            places.append(place if full else -1)
            place += full
        start += n
        firsts.append(len(rows))
    return rows, firsts, places, start


@pytest.mark.parametrize("every", [CHUNK, 2 * CHUNK])
@pytest.mark.parametrize("lengths", [(1,), (64, 0, 65, 1), (15, 16, 17, 63, 64, 130), (0, 0, 5)])
def test_packed_rows_are_cut_at_sequences_and_the_rest_is_cleared(lengths, every):
    used = sum(lengths)
    T = used + 70
    cu = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    got = jax.jit(cut_packed, static_argnums=(0, 2))(T, cu, every)
    rows, firsts, places, _ = cut_by_hand(T, lengths, every)
    n = len(rows)
    assert list(zip(got.row[:n].tolist(), got.length[:n].tolist(), strict=True)) == rows
    assert got.first.tolist() == firsts
    assert got.snapshot[:n].tolist() == places and set(got.snapshot[n:].tolist()) <= {-1}
    cleared = [
        r for at, size in zip(got.row[n:].tolist(), got.length[n:].tolist(), strict=True) for r in range(at, at - size)
    ]
    assert cleared == list(range(used, T))


def test_equal_sequences_are_cut_like_packed_ones():
    B, T = 3, 2 * CHUNK + 5
    got, want = cut_even(B, T, CHUNK), cut_by_hand(B * T, (T,) * B, CHUNK)
    assert list(zip(got.row.tolist(), got.length.tolist(), strict=True)) == want[0]
    assert got.first.tolist() == want[1] and got.snapshot.tolist() == want[2]
