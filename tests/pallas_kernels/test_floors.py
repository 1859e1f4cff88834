"""Cost floors against the numbers that the specification works out by hand."""

import pytest

from pallas_kernels import attn_res, kda, mla, moe, router


@pytest.mark.parametrize("chunk_size, flops", [(16, 114_688), (64, 163_840)])
def test_kda_per_token_and_head(chunk_size, flops):
    """Spec kernels 1.3: 1,282 bytes and 98,304 + 1,024 C operations; a state of 64 KiB goes in and out."""
    floor = kda.floor(1, 1, 128, 128, sequences=1, chunk_size=chunk_size)
    assert floor == (1_282 + 2 * 65_536, flops)
    assert kda.floor(8192, 96, 128, 128, sequences=0).bytes == 8192 * 96 * 1_282  # 1.01 GB


def test_mla_decode():
    """Spec kernels 7: 1,152 bytes per cached token, 2,176 operations per head and cached token."""
    one, two = (mla.floor_absorbed(1, keys, 12, 512, 64) for keys in (1, 2))
    assert two.bytes - one.bytes == 1_152 and two.flops - one.flops == 12 * 2_176
    assert mla.floor_absorbed(1, 131_072, 12, 512, 64).bytes == pytest.approx(151e6, rel=1e-2)
    assert mla.floor_absorbed(1, 131_072, 12, 512, 64, queries=8).flops == 8 * 12 * 131_072 * 2_176


def test_mla_prefill():
    """Spec kernels 8: 2.06e12 operations for 8,192 causal tokens and 96 heads."""
    assert mla.floor_expanded(8192, 8192, 96, 192, 128).flops == pytest.approx(2.06e12, rel=1e-2)
    one = mla.floor_expanded(1, 100, 2, 192, 128)
    assert one.flops == 2 * 2 * 100 * 320


def test_attention_residual():
    """Spec kernels 9: 1.17 GB at 8,192 tokens and 9 rows of 7,168."""
    assert attn_res.floor(8192, 9, 7168).bytes == 8192 * 10 * 14_336 == pytest.approx(1.17e9, rel=1e-2)


def test_experts_and_router():
    """Spec model 7.2: 17,547,264 bytes per packed expert, 66,060,288 in bfloat16; 66.06 million operations per row."""
    rows = 2 * 2 * 3584
    assert moe.floor(1, 1, 1, 3584, 3072) == (17_547_264 + rows, 66_060_288)
    assert moe.floor(1, 16, 16, 3584, 3072, bits=16).bytes == 16 * 66_060_288 + rows
    assert router.floor(1, 7168, 896, 16) == (2 * 7168 * 897 + 8 * 16, 2 * 7168 * 896)
