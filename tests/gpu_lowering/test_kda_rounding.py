"""A folded state equals the stepped one bit for bit: the compiled kernels leave the order of roundings no choice."""

import re

import pytest

from pallas_kernels.gpu import compile_kernel

H, D, ROWS = 96, 128, 8
FLOAT, HALF, INT = "*fp32", "*bf16", "*i32"
PROJECTIONS = (HALF, HALF, FLOAT, HALF, FLOAT, FLOAT, FLOAT, FLOAT, INT, FLOAT, HALF)
GATED = {"BOUND": -5.0, "EPS": 1e-5}


def compiled(name):
    from pallas_kernels import kda_decode_triton as kernels
    from pallas_kernels.kda_step_triton import REGISTERS, WARPS

    signature, extra = {
        "decode": ((*PROJECTIONS, HALF, FLOAT, HALF), GATED),
        "verify": ((*PROJECTIONS, HALF, FLOAT, HALF, FLOAT, FLOAT, FLOAT), {**GATED, "ROWS": ROWS}),
        "fold": ((FLOAT, HALF, FLOAT, FLOAT, HALF, INT, INT, FLOAT, HALF, FLOAT, HALF), {"ROWS": ROWS}),
    }[name]
    constants = tuple(sorted({"H": H, "D": D, **extra}.items()))
    options = (("num_warps", WARPS), ("num_stages", 3), ("enable_fp_fusion", False), ("maxnreg", REGISTERS))
    return compile_kernel(getattr(kernels, f"{name}_kernel"), signature, constants, options).asm


def layouts_of_sums(asm, shape) -> set[str]:
    """How the elements of summed tensors of this shape lie in threads: it fixes the order of the additions."""
    lines = asm["ttgir"]
    names = set(re.findall(rf"\}}\) : \(tensor<{shape}, #(\w+)>\) ->", lines))
    return {re.search(rf"^#{n} = (.*)$", lines, re.M)[1] for n in names}  # type: ignore[index]


@pytest.fixture(scope="module")
def kernels():
    return {name: compiled(name) for name in ("decode", "verify", "fold")}


def test_states_are_summed_in_one_order(kernels):
    layouts = [layouts_of_sums(asm, "128x128xf32") for asm in kernels.values()]
    assert len(layouts[0]) == 1 and layouts.count(layouts[0]) == 3


@pytest.mark.parametrize("shape", ["128xf32", "1x128xf32"])  # the norms of keys and queries, the output norm
def test_norms_are_summed_in_one_order(kernels, shape):
    decode, verify = (layouts_of_sums(kernels[name], shape) for name in ("decode", "verify"))
    assert len(decode) == 1 and decode == verify


def test_nothing_is_contracted_but_the_update_itself(kernels):
    """ptxas contracts a product and a sum unless both name their rounding."""
    elements_per_thread = D * D // 128
    for name, asm in kernels.items():
        assert not re.search(r"\b(mul|add|sub)(\.ftz)?\.f32", asm["ptx"]), name
        assert len(re.findall(r"\bfma\.rn(?:\.ftz)?\.f32", asm["ptx"])) == elements_per_thread, name
