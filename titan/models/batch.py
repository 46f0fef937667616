"""What a model is called with."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from titan.models.layers.head import Labels


class Batch(NamedTuple):
    """A rank's part of a microbatch, `[B, S]` each, on the device but for the labels.

    Attributes:
        tokens: what goes into the first stage.
        labels: of all of a stage's rows, wherever the head is.
        positions: of the tokens; None where they are 0 … S − 1.
        documents: the number of each token's document; None when a token sees all that came before it.
    """

    tokens: torch.Tensor
    labels: Labels
    positions: torch.Tensor | None = None
    documents: torch.Tensor | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """What goes to every stage of a model, beside its input; a family need not know of documents."""
        documents = {} if self.documents is None else {"documents": self.documents}
        return {"positions": self.positions, "labels": self.labels, **documents}

    def rows(self, part: slice) -> Batch:
        """Some of the rows."""
        return Batch(
            self.tokens[part],
            Labels(self.labels.tensor[part]),
            None if self.positions is None else self.positions[part],
            None if self.documents is None else self.documents[part],
        )
