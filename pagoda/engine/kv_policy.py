"""What a request's kv_policy may say: for those who read requests."""

from __future__ import annotations

from pagoda.sparse.spec import KVPolicy as KVPolicy
from pagoda.sparse.spec import parse_kv_policy as parse_kv_policy
