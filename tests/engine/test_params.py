"""What callers of the library give: values of another type are refused where they are given, not where they fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagoda.blend.segments import BlendSpec, Span
from pagoda.engine.config import EngineConfig
from pagoda.engine.kv_retention import Directive, KVRetention
from pagoda.engine.params import BeamSearch, LeaseSpec, SamplingParams, TierUse
from pagoda.engine.tenants import ServiceClass, TenantSpec
from pagoda.errors import ConfigError, InvalidRequest
from pagoda.sparse.streaming import Streaming


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1.0),
        ("n", True),
        ("best_of", 2.0),
        ("beam", 4),
        ("max_tokens", 3.0),
        ("temperature", "0"),
        ("temperature", None),
        ("top_k", 1.5),
        ("top_p", True),
        ("seed", 1.5),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", [(5, 1.0)]),
        ("logprobs", True),
        ("stop", ("a", 3)),
        ("stop", {"a"}),
        ("stop_token_ids", 2),
        ("stop_token_ids", ["2"]),
        ("ignore_eos", "no"),
        ("skip_special_tokens", None),
        ("kv_retention", {"decode_priority": 5}),
        ("tier_use", None),
        ("tier_use", {"store": False}),
        ("kv_policy", 512),
    ],
)
def test_a_sampling_parameter_of_another_type_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field) as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field


@pytest.mark.parametrize(
    "make",
    [
        lambda: KVRetention(({"start": 0},)),  # type: ignore[arg-type]
        lambda: KVRetention(decode_priority="5"),  # type: ignore[arg-type]
        lambda: KVRetention(decode_priority=5, decode_duration_s="60"),  # type: ignore[arg-type]
        lambda: Directive(0.5, None, 90),  # type: ignore[arg-type]
        lambda: Directive(0, 9.5, 90),  # type: ignore[arg-type]
        lambda: Directive(0, None, True),
        lambda: LeaseSpec(8.0, 60.0),  # type: ignore[arg-type]
        lambda: LeaseSpec(8, "60"),  # type: ignore[arg-type]
        lambda: BeamSearch(2.0),  # type: ignore[arg-type]
        lambda: BeamSearch(2, early_stopping=1),  # type: ignore[arg-type]
        lambda: TierUse(max_restored_tokens=1.5),  # type: ignore[arg-type]
        lambda: TierUse(wait_s="1"),  # type: ignore[arg-type]
        lambda: TierUse(store=None),  # type: ignore[arg-type]
        lambda: TierUse(lossy="yes"),  # type: ignore[arg-type]
        lambda: BlendSpec(((0, 8),)),  # type: ignore[arg-type]
        lambda: BlendSpec((Span(0, 8.5),)),  # type: ignore[arg-type]
        lambda: BlendSpec((), ratio="0.1"),  # type: ignore[arg-type]
    ],
)
def test_what_parameters_are_made_of_is_refused_likewise(make: Any) -> None:
    with pytest.raises(InvalidRequest):
        make()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 16.0),
        ("max_num_seqs", True),
        ("token_budget", "512"),
        ("queue_policy", ["fcfs"]),
        ("lease_share", "0.5"),
        ("tenants", {"a": {"weight": 2}}),
        ("pressure", {"batch_share": 0.5}),
    ],
)
def test_a_setting_of_another_type_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field.removesuffix("s")):
        EngineConfig(**{field: value})


@pytest.mark.parametrize("given", [{"share": 0.5}, {"service_class": "slow"}, {"lease_bytes": "2GiB"}])
def test_a_tenants_spec_is_checked(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TenantSpec(**given)


def test_what_means_the_same_is_taken_for_it() -> None:
    assert TenantSpec(service_class="batch").service_class is ServiceClass.BATCH  # type: ignore[arg-type]
    given: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": [2, 3], "kv_policy": "streaming:64"}
    params = SamplingParams(**given)
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == frozenset((2, 3))
    assert params.kv_policy == Streaming(64)
    assert SamplingParams(kv_policy=Streaming(64)).kv_policy == Streaming(64)
    numpys = SamplingParams(n=np.int64(2), temperature=np.float32(0.5), logit_bias={np.int32(5): np.float32(1)})  # type: ignore[arg-type,dict-item]
    assert (numpys.n, numpys.temperature) == (2, 0.5)
    assert KVRetention([Directive(0, 8, 90)]).ranges == (Directive(0, 8, 90),)  # type: ignore[arg-type]
