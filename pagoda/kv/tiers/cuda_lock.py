"""Page-locks host memory for CUDA, so that copies to and from the device run at full speed and asynchronously."""

from __future__ import annotations

from collections.abc import Callable

from pagoda.errors import ConfigError
from pagoda.kv.tiers.records import ByteArray


def cuda_page_lock(memory: ByteArray) -> Callable[[], None]:
    """Register `memory` with CUDA; the result unregisters it. Raises ConfigError if CUDA refuses or is not there.

    Needs torch, imported here so that the tiers work without it.
    """
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("memory can be page-locked only where CUDA is available")
    address = memory.ctypes.data
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if code:
        raise ConfigError(f"CUDA did not page-lock {memory.nbytes} bytes (error {code}); is there a memlock limit?")
    return lambda: runtime.cudaHostUnregister(address)
