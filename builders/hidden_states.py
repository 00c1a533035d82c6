"""Hidden states of texts on their way through a model of which one layer at a time is in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from quasar_trt.checkpoint import EMBEDDING
from quasar_trt.engines.reference import Observe, ReferenceModel
from quasar_trt.model_config import ModelConfig
from quasar_trt.recipe import Recipe


class HiddenStates:
    """The packed rows [rows, hidden_size] float32 of `texts`, one text after the other, from the embedding on.

    recipe: how the tensors given to `advance` are stored. observe, blocks: as of `ReferenceModel`; whoever observes may add to the
    dict given to `advance`, before the linear that is observed reads its tensors.
    """

    def __init__(
        self,
        config: ModelConfig,
        recipe: Recipe,
        embedding: Tensor,
        texts: Sequence[Sequence[int]],
        observe: Observe | None = None,
        blocks: Mapping[str, int] | None = None,
    ):
        self._model = ReferenceModel(config, recipe, {EMBEDDING: embedding}, observe=observe, blocks=blocks)
        self._texts = texts
        batch = self._batch()
        self.rows = self._model.embed(batch)
        self._rotations = self._model.rotations(batch)
        self._model.tensors = {}

    @property
    def recipe(self) -> Recipe:
        """May be replaced while layers are on their way."""
        return self._model.recipe

    @recipe.setter
    def recipe(self, recipe: Recipe) -> None:
        self._model.recipe = recipe

    def advance(self, i: int, tensors: Mapping[str, Tensor]) -> None:
        """Takes the rows through layer i, whose tensors are given by checkpoint name."""
        self._model.tensors = tensors
        self.rows = self._model.layer(i, self.rows, self._batch(), self._rotations)
        self._model.tensors = {}

    def _batch(self):
        return [(ids, self._model.new_cache()) for ids in self._texts]  # a layer's keys are of no use to the next
