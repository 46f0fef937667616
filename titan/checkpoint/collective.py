"""Work that one rank or every rank does, with an outcome that all ranks share.

A failure that stays on one rank leaves the others waiting in the next collective until it times out. Here each piece of
work ends with every rank holding the same result or raising the same error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from titan.config.errors import UserError

Share = TypeVar("Share")
Result = TypeVar("Result")


@dataclass(frozen=True)
class _Failure:
    """An exception as text: the object itself may not survive pickling, or need a module that a peer lacks."""

    rank: int
    text: str
    by_user: bool


class Ranks:
    """All ranks of the job on a gloo group of their own.

    Storage is slower than training's collectives may ever be, hence the time limit of its own; and a save in the
    background never meets training's messages.
    """

    def __init__(self, time_limit: timedelta) -> None:
        self.group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=time_limit, group_desc="checkpoint")
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)

    def on_first(self, task: str, work: Callable[[], Result]) -> Result:
        """Do `work` on rank 0. No rank goes on before it is done.

        Args:
            task: what is done, as in "could not <task>".

        Returns:
            Rank 0's result, on all ranks.

        Raises:
            UserError: on all ranks, when `work` raised one.
            RuntimeError: on all ranks, when `work` raised anything else.
        """
        result, failure, cause = self._attempt(work) if self.rank == 0 else (None, None, None)
        return self._shared(task, result, [failure] if failure else [], cause)

    def on_each(self, task: str, work: Callable[[], Share], combine: Callable[[list[Share]], Result]) -> Result:
        """Do `work` on each rank and combine the results, listed by rank, on rank 0.

        Returns:
            The combined result, on all ranks.

        Raises:
            UserError: on all ranks, when nothing but UserErrors were raised.
            RuntimeError: on all ranks, when `work` failed on any rank, or `combine` did. It names ranks and causes.
        """
        share, failure, cause = self._attempt(work)
        gathered: list[Any] = [None] * self.size
        dist.gather_object((share, failure), gathered if self.rank == 0 else None, dst=0, group=self.group)
        failures: list[_Failure] = []
        result: Result | None = None
        if self.rank == 0:
            failures = [failure for _, failure in gathered if failure]
            if not failures:
                result, failure, cause = self._attempt(lambda: combine([share for share, _ in gathered]))
                failures = [failure] if failure else []
        return self._shared(task, result, failures, cause)

    def agree(self, flag: bool) -> bool:
        """Rank 0's answer, on all ranks. Cheap enough for every step."""
        answer = torch.tensor(flag)
        dist.broadcast(answer, src=0, group=self.group)
        return bool(answer)

    def _attempt(self, work: Callable[[], Result]) -> tuple[Result | None, _Failure | None, Exception | None]:
        try:
            return work(), None, None
        except Exception as error:
            by_user = isinstance(error, UserError)
            text = str(error) if by_user else f"{type(error).__name__}: {error}"
            return None, _Failure(self.rank, text, by_user), error

    def _shared(self, task: str, result: Result | None, failures: list[_Failure], cause: Exception | None) -> Result:
        outcome: list[Any] = [result, failures]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        result, failures = outcome
        if failures:
            _raise(task, failures, cause)
        return cast(Result, result)


def _raise(task: str, failures: list[_Failure], cause: Exception | None) -> NoReturn:
    if all(failure.by_user for failure in failures):
        raise UserError("\n".join(dict.fromkeys(failure.text for failure in failures))) from cause
    causes = "; ".join(f"rank {failure.rank}: {failure.text}" for failure in failures)
    raise RuntimeError(f"could not {task}: {causes}") from cause


class Alone:
    """This process by itself, with what `Ranks` offers, for scripts that have no process group."""

    group = None
    rank, size = 0, 1

    def on_first(self, task: str, work: Callable[[], Result]) -> Result:
        """Do `work`."""
        return work()

    def on_each(self, task: str, work: Callable[[], Share], combine: Callable[[list[Share]], Result]) -> Result:
        """Do `work` and combine its one result."""
        return combine([work()])
