"""What is seen when a running job fails: the cause, once, with its rank, and an exit status that ends the job."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from titan.config.errors import UserError
from titan.observability.logging import logger

_WAIT_SECONDS = 3.0


@contextmanager
def failures_shown() -> Iterator[None]:
    """Report what the block raises, to people and to the launcher, whose summary names the rank that failed first.

    A UserError becomes one line and exit status 1. Most of them come up on all ranks together: rank 0 is the one to
    speak, and its exit makes the launcher end the others. A rank that is still there after a moment failed alone.

    Raises:
        SystemExit: status 1 after a UserError, 130 after an interrupt.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    try:
        yield
    except UserError as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_WAIT_SECONDS)
        handler.record_exception(error)
        logger.error(str(error))
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        handler.record_exception(error)
        raise
