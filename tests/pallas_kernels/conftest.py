"""Every op states its dtypes: an accidental bfloat16 times float32 is an error here."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield
