import pytest
from safetensors.numpy import load_file

import k3jax
from tests.conftest import DATA


@pytest.fixture(scope="session")
def seeing(tmp_path_factory):
    """(config, parameters, golden tensors) of the tiny model with vision, float32."""
    place = tmp_path_factory.mktemp("seeing")
    folder = DATA / "golden" / "k3_tiny"
    for name in ("model.safetensors", "config.json"):
        (place / name).symlink_to(folder / name)
    return *k3jax.load(place, dtype="float32"), load_file(folder / "golden.safetensors")
