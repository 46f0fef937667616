"""Sources in the proportions of their weights: from which of them each row of a step comes.

It follows from the weights, the windows that every source has given so far and the global batch, as shares.py says.
Every rank works it out for the whole batch, so that it is the same in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from titan.config.job_config import SourceStage, Training
from titan.data.documents import Documents, StreamedDocuments
from titan.data.packing import State
from titan.data.shares import Shares, integer_weights
from titan.data.token_files import TokenFiles
from titan.observability.logging import logger


class MixedSource(NamedTuple):
    """One source of a mixture, opened.

    Attributes:
        text: [training] as if this were its dataset; `infinite` says whether it begins again.
        weight: until the first stage.
    """

    name: str
    text: Training
    source: Documents | StreamedDocuments | TokenFiles
    weight: float

    @property
    def by_number(self) -> bool:
        """Any of its windows can be read by itself."""
        return isinstance(self.source, TokenFiles)


class Mixture:
    """The sources of a run and the stages of their weights."""

    def __init__(self, sources: Sequence[MixedSource], stages: Sequence[SourceStage]) -> None:
        self.sources = list(sources)
        self._stages = list(stages)

    @property
    def by_number(self) -> bool:
        """See `MixedSource`."""
        return all(source.by_number for source in self.sources)

    def identity(self) -> State:
        """What can't change between a position and a resume from it. Weights and stages can."""
        return {
            f"sources.{source.name}.{key}": value
            for source in self.sources
            for key, value in {
                "dataset": source.source.name,
                "documents": source.source.fingerprint,
                "when_exhausted": "loop" if source.text.infinite else "end",
            }.items()
        }

    def weights(self, step: int, tokens: int, ended: Sequence[str] = ()) -> list[int]:
        """The sources' weights after so many steps and tokens of the run, in whole numbers; of those that ended 0."""
        weights = {source.name: source.weight for source in self.sources}
        for stage in self._stages:
            if (stage.after_step is not None and step >= stage.after_step) or (
                stage.after_tokens is not None and tokens >= stage.after_tokens
            ):
                weights = stage.weights
        names = [source.name for source in self.sources]
        return integer_weights([0.0 if name in ended else weights.get(name, 0.0) for name in names])

    def describe(self, weights: Sequence[int]) -> str:
        """`web 80.0 %, code 20.0 %`."""
        shares = [weight / sum(weights) for weight in weights]
        return ", ".join(
            f"{source.name} {share:.1%}".replace("%", " %")
            for source, share in zip(self.sources, shares, strict=True)
            if share
        )


class Schedule:
    """The sources of the rows, step after step. The logical streams of a process share one, and go on together.

    Args:
        global_batch: rows of a step.
    """

    def __init__(self, mixture: Mixture, global_batch: int, seq_len: int) -> None:
        self.mixture = mixture
        self._names = [source.name for source in mixture.sources]
        self._global_batch = global_batch
        self._seq_len = seq_len
        self._step = self._tokens = 0
        self._rows: list[int] | None = None
        self._ended: list[str] = []
        self._shares = Shares(mixture.weights(0, 0))

    def rows(self, step: int, has: Mapping[int, Callable[[int], bool]], *, tells: bool) -> list[int] | None:
        """The number of the source of each row of the global batch; None when the data ends before the last one.

        Args:
            step: the step that was asked for last, or the one after it; the first is 1.
            has: of each source that ends, whether so many windows of it are left at the start of the step.
            tells: log what changes.
        """
        if step > self._step:
            self._rows = self._next_step(has, tells)
            self._step += 1
            self._tokens += self._global_batch * self._seq_len
        return self._rows

    def _next_step(self, has: Mapping[int, Callable[[int], bool]], tells: bool) -> list[int] | None:
        weights = self._weights()
        if not any(weights):
            return None
        if weights != self._shares.weights:
            self._shares = Shares(weights)
            if tells:
                logger.info(f"from step {self._step + 1} on: {self.mixture.describe(weights)}")
        before = Shares(weights, self._shares.counts)
        given: list[int] = []
        used = [0] * len(weights)
        while len(given) < self._global_batch:
            source = self._shares.next()
            if source in has and not has[source](used[source] + 1):
                if not self._leave_out(source, tells):
                    return None
                continue
            self._shares.give(source)
            used[source] += 1
            given.append(source)
        return before.turned(given) if self._shares.weights == before.weights else given

    def _leave_out(self, source: int, tells: bool) -> bool:
        """Go on without a source that has ended, with counts that start anew; False when no other has a weight."""
        self._ended.append(self._names[source])
        weights = self._weights()
        left = any(weights)
        if tells:
            then = f"from there on: {self.mixture.describe(weights)}" if left else "no other has a weight"
            logger.info(f"source {self._names[source]} has ended, in step {self._step + 1}; {then}")
        if left:
            self._shares = Shares(weights)
        return left

    def _weights(self) -> list[int]:
        return self.mixture.weights(self._step, self._tokens, self._ended)

    def state_dict(self) -> State:
        """How far the proportions are fulfilled, by the sources' names, in whole numbers."""
        return {
            "step": self._step,
            "tokens": self._tokens,
            "weights": dict(zip(self._names, self._shares.weights, strict=True)),
            "counts": dict(zip(self._names, self._shares.counts, strict=True)),
            "ended": list(self._ended),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from there. Weights that are others now count from there."""
        self._step, self._tokens = state["step"], state["tokens"]
        self._ended = list(state["ended"])
        self._shares = Shares(*([state[key][name] for name in self._names] for key in ("weights", "counts")))
