"""What is seen when a running job fails: the cause, once, with its rank, and an exit status that ends the job."""

from __future__ import annotations

import faulthandler
import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan.config.errors import UserError
from titan.observability.logging import log_to_file, logger

_WAIT_SECONDS = 3.0


@contextmanager
def failures_shown() -> Iterator[None]:
    """Report what the block raises, to people and to the launcher, whose summary names the rank that failed first.

    A UserError becomes one line and exit status 1. Most of them come up on all ranks together: rank 0 is the one to
    speak, and its exit makes the launcher end the others. A rank that is still there after a moment failed alone.

    Raises:
        SystemExit: status 1 after a UserError, 130 after an interrupt.
    """
    faulthandler.enable()
    try:
        yield
    except UserError as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_WAIT_SECONDS)
        record_for_launcher(str(error))
        logger.error(str(error))
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception:
        record_for_launcher(traceback.format_exc())
        log_to_file(traceback.format_exc())
        raise


def record_for_launcher(message: str) -> None:
    """Leave a cause for torchrun's summary, in the form of its own error handler, without importing torch for it."""
    if not (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}  # the summary shows no other text
    Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
