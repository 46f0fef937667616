"""What [estimation] asks for that estimation.py can't do. train.py reads none of it, so these are no rules of a run."""

from __future__ import annotations

import os
from pathlib import Path

from titan.config.job_config import Estimation
from titan.config.rules import Mistakes

_WRITTEN = ("json", "html", "search_output")


def mistakes(own: Estimation) -> Mistakes:
    """A text per mistake, of a dry run that is about to start."""
    if own.search and own.json is not None:
        yield (
            f'estimation.json = "{own.json}" with estimation.search = true, which writes no estimate: write the layout '
            "that it finds with estimation.search_output, and estimate that file"
        )
    if own.search and own.calibrate is not None:
        yield (
            f'estimation.calibrate = "{own.calibrate}" with estimation.search = true: it scales the times of all '
            "layouts alike; leave it out, and estimate the layout that is found with it"
        )
    if own.search_output is not None and not own.search:
        yield f'estimation.search_output = "{own.search_output}": nothing is searched for; add estimation.search = true'
    for name in _WRITTEN:
        if (target := getattr(own, name)) is None:
            continue
        path = Path(os.path.expanduser(target))
        if path.is_dir():
            yield f'estimation.{name} = "{target}": this is a folder; name a file'
        elif not path.parent.is_dir():
            yield f'estimation.{name} = "{target}": there is no folder {path.parent}'
