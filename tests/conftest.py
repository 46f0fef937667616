from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import browser
from tests.distributed.world import Worlds

__all__ = ["browser", "worlds"]


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """`worlds(4).run(function, …)` runs a module-level function on four gloo processes."""
    worlds = Worlds()
    yield worlds
    worlds.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For pytest-xdist: one process takes all that runs in worlds, so that these are started once, the other takes the
    rest meanwhile. Whole programs come first (tests/test_*.py): they wait much, and leave the cores free.
    """
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)
    for item in items:
        if "worlds" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("worlds"))
