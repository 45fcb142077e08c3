"""Every test with `isa` runs on every instruction set that this build and CPU have."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

if importlib.util.find_spec("pagoda._native") is None:
    collect_ignore = [
        "test_argmax.py",
        "test_attention.py",
        "test_cascade.py",
        "test_compact.py",
        "test_elementwise.py",
        "test_fused.py",
        "test_int8.py",
        "test_linear.py",
        "test_quantized_native.py",
    ]
    ISAS = []
else:
    from pagoda import _native

    ISAS = _native.available_isas()


@pytest.fixture(autouse=True, scope="package")
def two_threads() -> Iterator[None]:
    """Kernels share their work, whatever OMP_NUM_THREADS says."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    _native.use_isa(request.param)
    yield request.param
    _native.use_isa(before)
