"""Intake: what a caller asks for, held against what this engine has: context, blocks, policies, beams."""

from __future__ import annotations

from pagoda.engine.beam import BeamState
from pagoda.engine.config import EngineConfig
from pagoda.engine.params import SamplingParams
from pagoda.engine.request import Request
from pagoda.engine.sparse.sparsity import Sparsity
from pagoda.errors import ContextTooLong, InvalidRequest
from pagoda.kv.cache import KVCache
from pagoda.kv.keys import Scope
from pagoda.kv.radix_node import TokenArray
from pagoda.sparse.base import SparsePolicy


class Intake:
    """Makes requests, or refuses them. Queues nothing and takes no block.

    Attributes:
        sparsity: what a kv_policy needs; without, requests that ask for one are computed in full.
    """

    def __init__(
        self, cache: KVCache, config: EngineConfig, vocab_size: int, eos_ids: frozenset[int], max_model_len: int
    ) -> None:
        self.sparsity: Sparsity | None = None
        self._cache = cache
        self._config = config
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._max_model_len = max_model_len

    def request(
        self,
        request_id: str,
        tokens: TokenArray,
        params: SamplingParams,
        scope: Scope,
        priority: int,
        *,
        whole: str | None = None,
    ) -> Request:
        """A request without samples: what of its parameters depends on the engine is decided here.

        Args:
            whole: why its KV must stay whole; None: it may be sparse.

        Raises:
            InvalidRequest: a setting that cannot be had here.
            ContextTooLong: prompt and output can never fit; the message has the numbers.
        """
        policy = self._policy(params, "has no beams" if params.beam is not None else whole)
        max_tokens = self._max_tokens(int(tokens.size), params, policy)
        request = Request(request_id, tokens, params, scope, priority, max_tokens)
        if policy is not None and self.sparsity is not None:
            total = int(tokens.size) + max_tokens
            request.peak_blocks = self.sparsity.peak_blocks(policy, int(tokens.size), total)
            try:
                request.sparse = self.sparsity.open(policy, int(tokens.size), total)
            except InvalidRequest as error:
                if params.kv_policy is not None:
                    raise
                raise InvalidRequest(f"the server's default kv_policy does not go with this request: {error}") from None
        if params.beam is not None:
            limits = {"the vocabulary": self._vocab_size, "max_num_seqs": self._config.max_num_seqs}
            for what, limit in limits.items():
                if params.beam.width > limit:
                    raise InvalidRequest(f"{params.beam.width} beams are more than {what}, {limit}", param="n")
            end_ids = params.stop_token_ids | (frozenset() if params.ignore_eos else self._eos_ids)
            request.beams = BeamState(params.beam, end_ids, max_tokens)
        return request

    def _policy(self, params: SamplingParams, whole: str | None) -> SparsePolicy | None:
        return None if self.sparsity is None else self.sparsity.policy_for(params.wished_policy, whole=whole)

    def _max_tokens(self, prompt_len: int, params: SamplingParams, policy: SparsePolicy | None) -> int:
        if policy is not None and self.sparsity is not None:
            return self.sparsity.max_tokens(policy, prompt_len, params.max_tokens, self._max_model_len)
        wanted = params.max_tokens if params.max_tokens is not None else max(1, self._max_model_len - prompt_len)
        total = prompt_len + wanted
        if total > self._max_model_len:
            said = f"this model's context is {self._max_model_len} tokens"
            if prompt_len >= self._max_model_len:
                raise ContextTooLong(f"{said} for prompt and answer; the prompt alone has {prompt_len}", param="prompt")
            asked = f"the prompt has {prompt_len} and max_tokens asks for {wanted} more: {total}"
            raise ContextTooLong(f"{said}; {asked}", param="max_tokens")
        needed = self._cache.peak_blocks(total, self._config.token_budget)
        room = self._cache.num_blocks
        if params.beam is not None:  # beams go on together, so there must always be room for all of them
            needed = self._cache.peak_blocks(total, self._config.token_budget, params.beam.width, prompt_len)
            room -= self._cache.retention.limit_blocks
        if needed > room:
            raise ContextTooLong(
                f"{prompt_len} prompt tokens and {wanted} more need {needed} KV blocks; there are {room} for a request",
                param="prompt",
            )
        return wanted
