"""StepPlan: how many rows each sample has in the step that is being planned, and what they take of its budget.

Charges are kept as samples come and go: adding them up anew for each sample was a tenth of a step's bookkeeping.
"""

from __future__ import annotations

from pagoda.engine.request import Sample


class StepPlan:
    """See the module.

    Attributes:
        counts: rows of each planned sample, in the order in which they were planned.
        charged: what they take of the step's budget.
        charged_prompts: of it, for samples of more than one row: one row is decoding, more are prompt.
    """

    def __init__(self) -> None:
        self.counts: dict[Sample, int] = {}
        self.charged = 0
        self.charged_prompts = 0
        self._charges: dict[Sample, int] = {}

    def put(self, sample: Sample, count: int) -> None:
        """Plan the next rows of a sample that is not planned yet. It must be running."""
        self.counts[sample] = count
        self._charges[sample] = sample.charge(count)
        self._add(count, self._charges[sample])

    def drop(self, sample: Sample) -> None:
        """Leave a sample out, if it was planned."""
        if sample in self.counts:
            self._add(self.counts.pop(sample), -self._charges.pop(sample))

    def _add(self, count: int, charge: int) -> None:
        self.charged += charge
        if count > 1:
            self.charged_prompts += charge
