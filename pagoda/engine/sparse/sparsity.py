"""Sparsity: kv_policy in the engine: the server's default, budgets in tokens, and what can never fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from pagoda.engine.request import Sample
from pagoda.engine.tenants import TenantSpec
from pagoda.errors import ConfigError, ContextTooLong, InvalidRequest, OutOfBlocks
from pagoda.kv.cache import KVCache
from pagoda.kv.sizes import parse_size
from pagoda.sparse.base import Demand, SparsePolicy, SparseSequence
from pagoda.sparse.dropping import Dropping
from pagoda.sparse.sequence import DroppingSequence
from pagoda.sparse.spec import FIT, Full, KVPolicy, UnderPressure, parse_kv_policy
from pagoda.sparse.store import SparseMemory

_FIT_PARTS = 17, 8  # a budget, an eighth of it between compressions, and a copy: 17 eighths


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Opens the sparse side of requests.

    Args:
        cache, memory: the engine's.
        step_tokens: most tokens computed in one step.
        default: the policy of requests that name none; None: full KV.
        fit_share: of all that fits, how much a request of budget `fit` may keep now.
        yielding: what requests of a tenant allow under pressure where they name no policy.

    Raises:
        ConfigError: the default, or what a tenant allows, is not for this model and its memory.
    """

    cache: KVCache
    memory: SparseMemory
    step_tokens: int
    default: SparsePolicy | UnderPressure | None = None
    fit_share: Callable[[], float] = lambda: 1.0
    yielding: Mapping[str, UnderPressure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            for policy in (self.default, *self.yielding.values()):
                self.policy_for(policy)
        except InvalidRequest as error:
            raise ConfigError(str(error)) from None

    def policy_for(self, wish: KVPolicy | None, *, whole: str | None = None) -> SparsePolicy | None:
        """The policy that a request begins with, its budget in tokens; None: full KV.

        Args:
            whole: what a request with a policy cannot be, and this one is: then the default is not for it.

        Raises:
            InvalidRequest: the policy is not for the kv_format, the KV must stay whole, no layer sees everything, or
                the budget is small.
        """
        if isinstance(wish, Full) or (wish is None and (whole or self.default is None)):
            return None
        chosen = wish if wish is not None else self.default
        assert chosen is not None, "one of the two is there"
        if whole is not None:
            raise InvalidRequest(f"a request with a kv_policy {whole}", param="kv_policy")
        self._check_format(chosen.policy if isinstance(chosen, UnderPressure) else chosen)
        if not self.memory.full_layers:
            message = "every layer of this model has a sliding window: its KV is bounded without a kv_policy"
            raise InvalidRequest(message, param="kv_policy")
        if isinstance(chosen, UnderPressure):
            self._in_tokens(chosen.policy)
            return None
        return self._in_tokens(chosen)

    def yielded(self, wish: KVPolicy | None, namespace: str) -> SparsePolicy | None:
        """What a running request without forks allows itself to be compressed to now; None: nothing more.

        That is the policy that it, its tenant or the engine's default names for under pressure, or the smaller budget
        that `fit` is by now.
        """
        default = self.default
        if default is None or isinstance(default, UnderPressure):
            default = self.yielding.get(namespace, default)
        chosen = wish if wish is not None else default
        if isinstance(chosen, UnderPressure):
            return self._in_tokens(chosen.policy)
        if chosen is None or isinstance(chosen, Full) or chosen.budget != FIT:
            return None
        return self._in_tokens(chosen)

    def _check_format(self, policy: SparsePolicy) -> None:
        views = self.memory.views
        if any(view.staging is not None for view in views):
            message = "a kv_policy moves tokens between blocks, and int4 keys are quantized a block at a time"
            raise InvalidRequest(message, param="kv_policy")
        if not policy.only_copies and any(view.is_quantized for view in views):
            message = f"{policy.name} computes with the keys it has kept, which does not go with a quantized kv_format"
            raise InvalidRequest(message, param="kv_policy")

    def _in_tokens(self, policy: SparsePolicy) -> SparsePolicy:
        """A policy with its budget in tokens."""
        if isinstance(policy.budget, int):
            return policy
        tokens, share = self._tokens(policy.budget), self.fit_share()
        if policy.budget == FIT and share < 1:
            with suppress(InvalidRequest):  # too little for the policy: pressure alone refuses nobody here
                return policy.with_budget(int(share * tokens))
        return policy.with_budget(tokens)

    def _tokens(self, budget: str) -> int:
        """A budget in bytes, or all that fits, in tokens: whole blocks of the layers that see everything."""
        layout, size = self.memory.layout, self.memory.layout.block_size
        num_groups = sum(group.window is None for group in layout.groups)
        if budget == FIT:
            whole, part = _FIT_PARTS
            # Beside it, a compression ends inside a block, and so does its copy.
            num_blocks = (self._room - 2 * self._window_blocks()) // num_groups - 4
            return max(0, min(num_blocks * part // whole * size, self.memory.max_positions * part // (part + 1)))
        return parse_size(budget) // (layout.pool_block_bytes * num_groups) * size

    @property
    def _room(self) -> int:
        """Blocks that one request can count on."""
        return self.cache.num_blocks - self.cache.retention.limit_blocks

    def _window_blocks(self) -> int:
        """The most blocks that a request holds in layers with a sliding window."""
        layout = self.memory.layout
        num_full = sum(group.window is None for group in layout.groups)
        whole = 1 << 40  # blocks: more than any window has
        return self.cache.peak_blocks(whole * layout.block_size, self.step_tokens) - num_full * whole

    def _num_blocks(self, demand: Demand) -> int:
        """The most blocks that a request with this demand holds at once."""
        size = self.memory.layout.block_size
        num_groups = sum(group.window is None for group in self.memory.layout.groups)
        copies = -(-demand.copies // size)
        return num_groups * (-(-demand.entries // size) + copies) + (2 if copies else 1) * self._window_blocks()

    def open(self, policy: SparsePolicy, num_prompt: int, num_total: int) -> SparseSequence | None:
        """The sparse side of a request; None if it never outgrows its budget: then it is as any other.

        Raises:
            ContextTooLong: it can never run; the message has the numbers.
        """
        demand, exact = self._demand(policy, num_prompt, num_total)
        if demand.positions > self.memory.max_positions:
            raise ContextTooLong(
                f"this model has {self.memory.max_positions} positions; {num_prompt} prompt tokens and "
                f"{num_total - num_prompt} more need {demand.positions} with kv_policy {policy.name}",
                param="prompt" if num_prompt >= self.memory.max_positions else "max_tokens",
            )
        needed = self._num_blocks(demand)
        if needed > self._room:
            raise ContextTooLong(
                f"{num_prompt} prompt tokens and {num_total - num_prompt} more need {needed} KV blocks with kv_policy "
                f"{policy.name} of {policy.budget} tokens; there are {self._room} for a request",
                param="prompt",
            )
        return policy.open(num_prompt, num_total, self.cache, self.memory, exact=exact)

    def compress(self, sample: Sample, policy: Dropping) -> int:
        """Compress what a running sample holds to the budget of `policy`, now, and let it go on under that budget.

        A request whose own policy drops keeps that one, with this budget if its own is larger. One that has none goes
        on under `policy`, once it holds more than the budget, as if it had asked for it.

        Returns:
            How many blocks it let go of; 0 if it holds no more than the budget, computes its prompt yet, shares, blends
            or recalls its KV, cannot be compressed, or if the pool has no room to copy what stays.

        Raises:
            InvalidRequest: `policy` goes by attention, which nobody looked at so far.
        """
        request, lease, memory = sample.request, sample.running_lease, self.memory
        num_prompt = int(request.prompt.size)
        if sample.sparse is None and policy.observed(num_prompt):
            message = f"{policy.name} goes by attention that nobody looked at: a running request takes streaming"
            raise InvalidRequest(message, param="kv_policy")
        is_alone = len(request.samples) == 1 and request.beams is None and request.blend is None
        can_move = memory.full_layers and not any(view.is_quantized for view in memory.views)
        sequence = sample.sparse or DroppingSequence(policy, num_prompt, self.cache, memory, exact=True)
        if not (isinstance(sequence, DroppingSequence) and is_alone and can_move and sample.num_uncomputed == 1):
            return 0
        num_blocks, num_compactions = lease.num_blocks, sequence.report.num_compactions
        with suppress(OutOfBlocks):
            sequence.compress(lease, policy.num_tokens)
        if sample.sparse is None and sequence.report.num_compactions > num_compactions:
            sample.sparse = sequence
            request.peak_blocks = self.peak_blocks(policy, num_prompt, num_prompt + request.max_tokens)
        return num_blocks - lease.num_blocks

    def _demand(self, policy: SparsePolicy, num_prompt: int, num_total: int) -> tuple[Demand, bool]:
        """What a request needs, and whether its prompt is computed exactly: if that fits, or if it must be."""
        exact = policy.demand(num_prompt, num_total, exact=True)
        fits = self._num_blocks(exact) <= self._room and exact.positions <= self.memory.max_positions
        if fits or not policy.bounds_prefill:
            return exact, True
        return policy.demand(num_prompt, num_total, exact=False), False

    def peak_blocks(self, policy: SparsePolicy, num_prompt: int, num_total: int) -> int:
        """The most blocks that a request holds at once."""
        return self._num_blocks(self._demand(policy, num_prompt, num_total)[0])

    def max_tokens(self, policy: SparsePolicy, num_prompt: int, wanted: int | None, max_model_len: int) -> int:
        """How many tokens a request may generate: what it wants; else up to the context, or as many after it."""
        if wanted is not None:
            return wanted
        left = max_model_len - num_prompt
        if left > 0:
            return left
        longest = policy.demand(num_prompt, num_prompt + max_model_len, exact=False).positions
        return max(1, max_model_len - max(0, longest - self.memory.max_positions))


def yielding_of(tenants: Mapping[str, TenantSpec]) -> dict[str, UnderPressure]:
    """What requests of tenants allow under pressure where they name no policy; raises ConfigError."""
    found = {}
    for name, spec in tenants.items():
        if spec.compress_under_pressure is None:
            continue
        try:
            policy = parse_kv_policy(spec.compress_under_pressure)
            if isinstance(policy, UnderPressure | Full):
                raise ConfigError(f"tenant {name!r}: compress_under_pressure names a policy, such as streaming:1024")
            found[name] = UnderPressure(policy)
        except InvalidRequest as error:
            raise ConfigError(f"tenant {name!r}: {error}") from None
    return found
