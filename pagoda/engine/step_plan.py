"""StepPlan: which rows of each sample are in the step that is being planned, and what they take of its budget.

Charges are kept as samples come and go: adding them up anew for each sample was a tenth of a step's bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.engine.request import Sample
from pagoda.kv.lease import Lease


@dataclass(slots=True)  # not frozen: see outputs.py
class Rows:
    """Tokens `start` to `stop` of a running sample, to be computed; if those are all, the last row's logits matter."""

    sample: Sample
    lease: Lease
    start: int
    stop: int
    needs_logits: bool

    @classmethod
    def of(cls, sample: Sample, start: int, stop: int) -> Rows:
        """Rows of a running sample."""
        return cls(sample, sample.running_lease, start, stop, stop == len(sample.tokens))


class StepPlan:
    """See the module.

    Attributes:
        charged: what the planned rows take of the step's budget.
        charged_prompts: of it, for samples of more than one row: one row is decoding, more are prompt.
    """

    def __init__(self) -> None:
        self.charged = 0
        self.charged_prompts = 0
        self._rows: dict[Sample, Rows] = {}
        self._charges: dict[Sample, int] = {}

    @property
    def rows(self) -> list[Rows]:
        """What is planned, in the order in which it was."""
        return list(self._rows.values())

    def put(self, sample: Sample, count: int) -> None:
        """Plan the next rows of a sample that is not planned yet. It must be running."""
        start = sample.running_lease.num_computed_tokens
        self._rows[sample] = Rows.of(sample, start, start + count)
        charge = self._charges[sample] = sample.charge(count)
        self._add(count, charge)

    def drop(self, sample: Sample) -> None:
        """Leave a sample out, if it was planned."""
        rows = self._rows.pop(sample, None)
        if rows is not None:
            self._add(rows.stop - rows.start, -self._charges.pop(sample))

    def _add(self, count: int, charge: int) -> None:
        self.charged += charge
        if count > 1:
            self.charged_prompts += charge
