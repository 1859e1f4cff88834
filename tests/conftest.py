"""Tests run on eight virtual CPU devices. Compilation dominates their time, so XLA optimises little unless
XLA_FLAGS says otherwise."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", QUICK) + " --xla_force_host_platform_device_count=8"

from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402

DATA = Path(__file__).parent / "data"


def relative_l2(actual, expected) -> float:
    """||actual - expected|| / ||expected|| in float64; NaN never passes a comparison."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30))


@pytest.fixture
def golden() -> Path:
    return DATA / "golden"
