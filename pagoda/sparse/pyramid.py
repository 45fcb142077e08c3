"""PyramidKV (Cai et al., arXiv:2406.02069): SnapKV with more of the budget for lower layers, less for higher ones.

    layer 0      ####################      lower layers spread their attention over the whole prompt,
    layer 1      ################          higher ones gather it on a few tokens
    layer 2      ###########
    layer 3      #######                   together as many entries as layers times the budget

Blocks hold all layers of a group, so a request holds as many blocks as its largest layer needs, up to twice the
budget's; the rest of a block is there and unused. Entries, and so the attention computed, are what the budget says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pagoda.sparse.snapkv import SnapKV


@dataclass(frozen=True, slots=True)
class Pyramid(SnapKV):
    """SnapKV whose last layer keeps `1 / steepness` of the budget beside the window, the first one what that saves."""

    name: ClassVar[str] = "pyramid"
    steepness: int = 20

    def __post_init__(self) -> None:
        self.check(self.steepness >= 2, "steepness", "must be at least 2")
        SnapKV.__post_init__(self)

    @property
    def largest_layer(self) -> int:
        """What the first layer keeps."""
        chosen = self.num_tokens - self.window
        return self.window + 2 * chosen - chosen // self.steepness

    def layer_budget(self, index: int, num_layers: int) -> int:
        """A straight line from the first layer to the last; the budget, if there is but one."""
        if num_layers == 1:
            return self.num_tokens
        least = self.window + (self.num_tokens - self.window) // self.steepness
        return self.largest_layer - round((self.largest_layer - least) * index / (num_layers - 1))
