from collections.abc import Iterator

import pytest

from tests.distributed.world import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """`worlds(4).run(function, …)` runs a module-level function on four gloo processes."""
    worlds = Worlds()
    yield worlds
    worlds.close()
