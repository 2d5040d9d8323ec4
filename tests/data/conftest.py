from collections.abc import Iterator

import pytest

from tests.data.llm_server import Server, running_server


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server() as playing:
        yield playing
