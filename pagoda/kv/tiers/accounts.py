"""Accounts: what each owner has of a tier, and who gives way when another needs room.

As for blocks of the pool (see pagoda.kv.tenants), of which a tier knows neither tenants nor names: an owner with a
share of its own has an account, all others have one together, the commons, without a guarantee and of weight 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pagoda.kv.keys import OwnerTag
from pagoda.kv.tenants import COMMONS, Share

Shares = Mapping[OwnerTag, Share]


class Accounts:
    """Costs by owner and by account, out of `capacity`, in the tier's units. Not thread-safe.

    Attributes:
        costs: of each owner that has anything.
    """

    def __init__(self, capacity: int, shares: Shares) -> None:
        self.costs: Counter[OwnerTag] = Counter()
        self._accounts = {owner: account for account, owner in enumerate(shares, COMMONS + 1)}
        self._guaranteed = [0, *(int(share.guaranteed * capacity) for share in shares.values())]
        self._weights = [1.0, *(share.weight for share in shares.values())]
        self._used = [0] * len(self._weights)

    def __len__(self) -> int:
        """How many accounts there are."""
        return len(self._used)

    def of(self, owner: OwnerTag) -> int:
        """The account of an owner."""
        return self._accounts.get(owner, COMMONS)

    def charge(self, owner: OwnerTag, cost: int) -> None:
        """Add to what an owner has; a negative cost gives back."""
        self.costs[owner] += cost
        if not self.costs[owner]:
            del self.costs[owner]
        self._used[self.of(owner)] += cost

    def spare(self, account: int, taker: OwnerTag) -> int:
        """How much an account can lose to an owner: all of it to its own, and to others what no share guarantees."""
        kept = 0 if account == self.of(taker) else self._guaranteed[account]
        return max(0, self._used[account] - kept)

    def level(self, account: int) -> float:
        """How far over its share an account is; below zero if it is within."""
        return (self._used[account] - self._guaranteed[account]) / self._weights[account]

    def losers(self, taker: OwnerTag) -> list[int]:
        """The accounts that have something to lose to an owner: most over its share first, of equals its own."""
        own = self.of(taker)
        able = [account for account in range(len(self)) if self.spare(account, taker)]
        return sorted(able, key=lambda account: (-self.level(account), account != own))
