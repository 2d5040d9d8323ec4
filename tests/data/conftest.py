from collections.abc import Iterator

import pytest

from tests.data.llm_server import Server
from tests.llm_endpoint import serving


@pytest.fixture
def server() -> Iterator[Server]:
    playing = Server()
    with serving(playing.answer) as playing.url:
        yield playing
