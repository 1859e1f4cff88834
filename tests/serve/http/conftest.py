import json

import pytest

from k3jax.chat.tokenizer import Tokenizer
from tests.conftest import DATA
from tests.k3jax.chat.folders import write_folder
from tests.serve.http.fake import Fake


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def tok(tmp_path_factory):
    """A byte-level tokenizer with K3's specials."""
    return Tokenizer(write_folder(tmp_path_factory.mktemp("k3") / "model"))


@pytest.fixture
def fake(tok):
    return Fake(tok)


def read_cases(name):
    return [json.loads(line) for line in (DATA / "cases" / name).read_text().splitlines()]
