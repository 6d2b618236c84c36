"""One headless browser, shared by all tests of pages."""

from __future__ import annotations

import pytest

from tests.support.browser import Browser, absent, started


@pytest.fixture(scope="session")
def browser(tmp_path_factory) -> Browser:
    if why := absent():
        pytest.skip(why)
    with started(tmp_path_factory.mktemp("browser")) as tab:
        yield tab
