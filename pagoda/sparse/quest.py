"""Quest: blocks of tokens whose keys may matter most, by the bounds of their keys.

Tang et al., ICML 2024, arXiv:2406.10774. Of every block the least and the greatest value of each dimension of its keys
are known. No key in the block can score higher than the sum over dimensions of whichever product with the query is
larger; the blocks with the highest such bounds are attended to. The paper leaves all KV on the device and reads less of
it; here the rest is in host memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from pagoda.sparse.host import RecallMemory
from pagoda.sparse.recall import Sketch
from pagoda.sparse.recalling import Recalling


@dataclass(frozen=True, slots=True)
class Quest(Recalling):
    """As many blocks of `block` tokens as there are places for, by the bounds of their keys."""

    name: ClassVar[str] = "quest"
    block: int = 16

    def __post_init__(self) -> None:
        self.check(1 <= self.block <= 1024, "block", "must be between 1 and 1024")
        Recalling.__post_init__(self)

    @property
    def unit(self) -> int:
        """See Recalling."""
        return self.block

    def sketch(self, head_dim: int, recall: RecallMemory) -> Sketch:
        """See Recalling."""
        return KeyBounds(head_dim, self.block)


class KeyBounds:
    """Greatest and least values of the keys of `unit` tokens: two sketches as wide as a head.

    There is no threshold: as many blocks as have a place are wanted.
    """

    alpha = math.inf

    def __init__(self, head_dim: int, unit: int) -> None:
        self.unit = unit
        self.width = 2 * head_dim

    def of_keys(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """See Sketch."""
        grouped = keys.reshape(keys.shape[0], -1, self.unit, keys.shape[2])
        return torch.cat([grouped.amax(2), grouped.amin(2)], dim=-1)

    def columns(self, layer: int) -> None:
        """See Sketch. A product is largest with the greatest value where the query is positive, else with the least."""
