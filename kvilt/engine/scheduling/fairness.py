"""Fair shares between the owners of requests, which are API keys: weighted max-min, in whole units.

No owner gets more than it demands. What one owner leaves goes to the others by weight. Knows only counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Account:
    """The record of one owner while it has samples."""

    weight: float = 1.0
    served: float = 0.0  # tokens it was given, by weight: of those with equal rights the least served goes first
    samples: int = 0  # that wait or run


@dataclass(slots=True)
class Share:
    """What one owner may still take of a step."""

    rows: int
    tokens: int


def max_min(
    total: int, demands: Mapping[str, int], accounts: Mapping[str, Account], order: Sequence[str]
) -> dict[str, int]:
    """Whole units of `total` for each owner; units that cannot be divided go to the first in `order`."""
    given = dict.fromkeys(demands, 0)
    left, hungry = total, [owner for owner in order if demands[owner]]
    while hungry:
        weight = sum(accounts[owner].weight for owner in hungry)
        content = [owner for owner in hungry if demands[owner] * weight <= left * accounts[owner].weight]
        if not content:
            break
        for owner in content:
            given[owner] = demands[owner]
            left -= demands[owner]
        hungry = [owner for owner in hungry if owner not in content]
    if hungry:
        weight, whole = sum(accounts[owner].weight for owner in hungry), left
        for owner in hungry:
            given[owner] = int(whole * accounts[owner].weight / weight)
            left -= given[owner]
        for owner in hungry[:left]:
            given[owner] += 1
    return given


class Owners:
    """The owners that have samples, and their shares."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.accounts: dict[str, Account] = {}

    def add_sample(self, owner: str) -> None:
        """One more sample of an owner. A new owner has no credit for the time in which it wanted nothing."""
        if owner not in self.accounts:
            served = min((account.served for account in self.accounts.values()), default=0.0)
            self.accounts[owner] = Account(self._weights.get(owner, 1.0), served)
        self.accounts[owner].samples += 1

    def remove_sample(self, owner: str) -> None:
        """One sample of an owner less."""
        self.accounts[owner].samples -= 1
        if not self.accounts[owner].samples:
            del self.accounts[owner]

    def serve(self, owner: str, tokens: int) -> None:
        """An owner was given so many tokens of a step."""
        self.accounts[owner].served += tokens / self.accounts[owner].weight

    def rights(self, total: int) -> dict[str, int]:
        """What each owner has a right to of so many units."""
        weight = sum(account.weight for account in self.accounts.values())
        return {owner: int(total * account.weight / weight) for owner, account in self.accounts.items()}

    def shares(self, rows: int, tokens: int, wants: Callable[[], Mapping[str, Sequence[int]]]) -> dict[str, Share]:
        """What each owner may take of a step; an owner that is alone may take everything.

        `wants` says for each owner the tokens of each row that it could use, in the order in which it would.
        """
        if len(self.accounts) <= 1:
            return {owner: Share(rows, tokens) for owner in self.accounts}
        wanted = wants()
        order = sorted(wanted, key=lambda owner: (self.accounts[owner].served, owner))
        own_rows = max_min(rows, {owner: len(want) for owner, want in wanted.items()}, self.accounts, order)
        demands = {owner: min(tokens, sum(want[: own_rows[owner]])) for owner, want in wanted.items()}
        own_tokens = max_min(tokens, demands, self.accounts, order)
        return {owner: Share(own_rows[owner], own_tokens[owner]) for owner in wanted}
