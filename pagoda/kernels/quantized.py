"""Quantized keys and values in plain torch: codes, scales and back. What the native kernels must do, to the bit.

    by row    int8, float8   scale = largest magnitude / largest code, as bfloat16; code = x / scale, rounded
    nibbles   uint8          scale = (the largest - the least) / 15, to three bits of mantissa; zero = the least, plus
                             half of what the scale falls short of, as bfloat16; code = (x - zero) / scale, rounded,
                             within 0..15

Rows are quantized over their head_dim: a scale for each token and head. Keys have channels that are large in every
token, and one scale for all would leave the others few codes. So such rows of keys are mixed first, by a Hadamard
matrix that spreads each channel over all (QuaRot, arXiv:2404.00456), and so are the queries that meet them. A block of
keys in nibbles is quantized over its tokens instead: a scale and a zero for each head and channel (KIVI,
arXiv:2402.02750).

All arithmetic is float32, division by a scale is multiplication by its reciprocal, and rounding is to the nearest, ties
to even. What is not finite makes its own scale or zero NaN, and so all that is read with it.
"""

from __future__ import annotations

import torch

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_LEAST_SCALE = 2.0**-126  # the least normal float32: its reciprocal is finite
_MOST_SCALE_CODE = 0x7BFF >> 7  # the largest finite float16


def mix(x: torch.Tensor) -> torch.Tensor:
    """Float32 products of Hadamard matrices with runs of the last dimension, each as long as a power of two divides it.

    By sums and differences of values that are half a run apart, then a quarter, and so on.
    """
    mixed, apart = x.float().contiguous(), _mix_order(x) // 2
    while apart:
        first, second = mixed.view(*x.shape[:-1], -1, 2, apart).unbind(-2)
        mixed = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        apart //= 2
    return mixed


def unmix(mixed: torch.Tensor) -> torch.Tensor:
    """What was mixed: the matrix is symmetric, and its square its order times one."""
    return mix(mixed) / _mix_order(mixed)


def _mix_order(x: torch.Tensor) -> int:
    dim = x.shape[-1]
    return dim & -dim


def encode_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of this dtype, shaped like `x`, and their bfloat16 scales, one for each row of the last dimension."""
    wide = x.float()
    largest = LARGEST_CODE[dtype]
    scale = (wide.abs().amax(-1) / largest).clamp_min(_LEAST_SCALE).to(torch.bfloat16)
    finite = scale.isfinite()
    scaled = torch.where(finite[..., None], wide * (1.0 / scale.float())[..., None], 0.0).clamp(-largest, largest)
    codes = scaled.round() if dtype == torch.int8 else scaled
    return codes.to(dtype), torch.where(finite, scale, torch.nan)


def decode_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 values of `encode_rows`' codes."""
    return codes.float() * scales.float()[..., None]


def encode_nibbles(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, two to a byte, of `x` `[..., head_dim]`; uint8 scales and bfloat16 zeros of `x`'s shape without `dim`."""
    wide = x.float()
    least = wide.amin(dim)
    spread = wide.amax(dim) - least
    scales = _scale_codes(spread / 15)
    step = decode_scales(scales)
    # Where the scale was rounded down, by less than a step in all, both ends are cut off alike.
    zeros = (least + torch.minimum((spread - 15 * step).clamp_min(0), step) / 2).to(torch.bfloat16)
    finite = wide.isfinite().all(dim)
    inverse = 1.0 / step
    scaled = (wide - zeros.float().unsqueeze(dim)) * inverse.unsqueeze(dim)
    codes = torch.where(finite.unsqueeze(dim), scaled, 0.0).round().clamp(0, 15).to(torch.uint8)
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4, scales, torch.where(finite, zeros, torch.nan)


def decode_nibbles(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, dim: int) -> torch.Tensor:
    """Float32 values of `encode_nibbles`' codes."""
    wide = torch.cat((codes & 15, codes >> 4), dim=-1).float()
    return zeros.float().unsqueeze(dim) + wide * decode_scales(scales).unsqueeze(dim)


def decode_scales(codes: torch.Tensor) -> torch.Tensor:
    """Float32 values of uint8 scales: the upper eight bits of a float16 without its sign."""
    return (codes.to(torch.int16) << 7).view(torch.float16).float()


def _scale_codes(scale: torch.Tensor) -> torch.Tensor:
    """The nearest uint8 scales to these as float16, of two the greater; never 0."""
    most = torch.finfo(torch.float16).max
    bits = scale.nan_to_num(0.0, posinf=most).clamp(0, most).to(torch.float16).view(torch.int16).int()
    return ((bits + 0x40) >> 7).clamp(1, _MOST_SCALE_CODE).to(torch.uint8)
