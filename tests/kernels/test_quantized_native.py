"""Native kernels on quantized keys and values: codes to the bit, and attention to what they mean."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from pagoda.errors import KernelError
from pagoda.kernels import KVView, SharedPrefix, native, reference
from tests.kernels.quantized_pools import ROW, Written, clone, make_view
from tests.kernels.test_attention import TOLERANCE
from tests.kernels.test_fused import SIZES, assert_as_good, call_by_call, tokens
from tests.kernels.test_quantized import each_format
from tests.model.models import build, load, save
from tests.model.paged import PagedRun

PARTS = ("keys", "values", "key_scales", "value_scales", "key_zeros", "value_zeros")
BOUNDS = [0, 37, 38, 48, 49, 64, 81]


def pair(
    formats: tuple[str, str], length: int, dtype: torch.dtype, group: int = 2, **sizes: int
) -> tuple[Written, Written]:
    """The same request in two pools."""
    written = [Written(make_view(*formats, dtype=dtype, **sizes), length, group=group, dtype=dtype) for _ in range(2)]
    return written[0], written[1]


def bits(view: KVView) -> dict[str, torch.Tensor]:
    return {name: part.contiguous().view(torch.uint8) for name in PARTS if (part := getattr(view, name)) is not None}


def widened(written: Written) -> Written:
    """For the oracle: queries and staged copies in float32, the same codes."""
    wide = object.__new__(Written)
    wide.__dict__ = dict(written.__dict__)
    wide.q = written.q.float()
    staging = written.view.staging
    if staging is not None:
        firsts = staging.firsts
        firsts = replace(firsts, keys=firsts.keys.float(), values=firsts.values.float())
        staging = replace(staging, keys=staging.keys.float(), values=staging.values.float(), firsts=firsts)
    wide.view = replace(written.view, staging=staging)
    return wide


def check_chunks(written: Written, bounds: list[int], **options: object) -> None:
    # On tiles, a key of four bits is rounded to BF16, and so is a query that was mixed.
    rounded = written.q.dtype == torch.bfloat16 and (
        written.view.keys_are_mixed or "int4" in (written.view.key_format, written.view.value_format)
    )
    for start, stop in itertools.pairwise(bounds):
        written.stage(start, stop)
        native.write_kv(written.view, written.k[start:stop], written.v[start:stop], written.slots(start, stop))
        before = bits(clone(written.view))
        got, want = (
            written.attend(native, start, stop, **options),
            widened(written).attend(reference, start, stop, **options),
        )
        tolerance = TOLERANCE[written.q.dtype]
        torch.testing.assert_close(got.out.float(), want.out, rtol=tolerance, atol=tolerance)
        assert got.lse is not None
        assert got.mass is not None
        loose = 1e-2 if rounded else 2e-5
        torch.testing.assert_close(got.lse, want.lse, rtol=loose, atol=loose)
        torch.testing.assert_close(got.mass, want.mass, rtol=5 * loose, atol=loose)
        for name, part in bits(written.view).items():
            assert torch.equal(part, before[name]), f"attention wrote to {name}"
        written.close(stop)


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 256])
def test_what_is_written_is_the_reference_to_the_bit(
    isa: str, formats: tuple[str, str], dtype: torch.dtype, head_dim: int
) -> None:
    one, other = pair(formats, 40, dtype, head_dim=head_dim)
    for written in (one, other):
        written.k[7] *= 1e-30  # below what a scale's reciprocal can be
        written.v[9, 1] = 0
        written.stage(0, 40)
    for start, stop in ((0, 5), (5, 40)):
        for backend, written in ((native, one), (reference, other)):
            backend.write_kv(written.view, written.k[start:stop], written.v[start:stop], written.slots(start, stop))
    want = bits(other.view)
    for name, got in bits(one.view).items():
        assert torch.equal(got, want[name]), name


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_read_as_nan_and_spoils_no_earlier_step(
    isa: str, formats: tuple[str, str], dtype: torch.dtype, bad: float
) -> None:
    spoilt, sound = pair(formats, 40, dtype)
    spoilt.k[33] = spoilt.v[33] = bad
    for start, stop in ((0, 20), (20, 33)):
        assert torch.equal(spoilt.step(native, start, stop).out, sound.step(native, start, stop).out)
    for start, stop in ((33, 34), (34, 40)):
        after = spoilt.step(native, start, stop).out
        if spoilt.view.staging is None and spoilt.view.is_quantized:
            assert after.isnan().all()


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_attention(isa: str, formats: tuple[str, str], dtype: torch.dtype, group: int) -> None:
    written, _ = pair(formats, 81, dtype, group)
    check_chunks(written, BOUNDS)


@each_format
@pytest.mark.parametrize("head_dim", [8, 80, 96, 128, 256])
def test_head_sizes(isa: str, formats: tuple[str, str], head_dim: int) -> None:
    check_chunks(pair(formats, 81, torch.bfloat16, head_dim=head_dim)[0], BOUNDS)


@each_format
@pytest.mark.parametrize("block_size", [1, 7, 32])
@pytest.mark.parametrize("options", [{"window": 20}, {"softcap": 5.0}])
def test_blocks_windows_and_caps(
    isa: str, formats: tuple[str, str], block_size: int, options: dict[str, object]
) -> None:
    num_blocks = 81 // block_size + 3
    written, _ = pair(formats, 81, torch.bfloat16, block_size=block_size, num_blocks=num_blocks)
    check_chunks(written, BOUNDS, **options)


@each_format
@pytest.mark.parametrize(
    ("num_kv_heads", "group", "tokens", "head_dim", "block_size"),
    [
        (5, 1, 1, 64, 16),  # one row of each head: four heads are computed together, and one is left
        (3, 2, 1, 128, 32),
        (2, 3, 1, 192, 7),
        (1, 2, 2, 64, 48),  # two tokens, which see different entries
        (2, 4, 1, 256, 1),
    ],
)
def test_few_rows_of_long_contexts(
    isa: str, formats: tuple[str, str], num_kv_heads: int, group: int, tokens: int, head_dim: int, block_size: int
) -> None:
    length = 333
    view = make_view(
        *formats,
        num_blocks=-(-length // block_size) + 1,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        dtype=torch.bfloat16,
    )
    check_chunks(Written(view, length, group=group, dtype=torch.bfloat16), [0, length - tokens, length])


@pytest.mark.parametrize("values", ["int4", "int8"])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("start", "window"), [(40, 41), (15, 16), (15, None)])
def test_a_first_token_that_only_one_of_two_rows_reads(
    isa: str, values: str, group: int, start: int, window: int | None
) -> None:
    """A window ends between the rows; the first of them is in the first block, whose tokens read it as their own."""
    written, _ = pair(("int4", values), start + 2, torch.bfloat16, group)
    check_chunks(written, [0, start, start + 2], window=window)


@pytest.mark.parametrize("values", ["int4", "int8"])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_requests_of_one_call_have_first_tokens_of_their_own(isa: str, values: str, group: int) -> None:
    view = make_view("int4", values, num_blocks=20, dtype=torch.bfloat16)
    assert view.staging is not None
    firsts, lens, rows_of = view.staging.firsts, [81, 20, 100, 50], [2, -1, 0, 2]
    requests = [Written(view, length, group=group, dtype=torch.bfloat16, seed=i) for i, length in enumerate(lens)]
    blocks = torch.randperm(20, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    firsts.row_of.fill_(-1)
    for part in (firsts.keys, firsts.values):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(1)) * 2)
    for each, row in zip(requests, rows_of, strict=True):
        each.table, blocks = blocks.split([len(each.table), len(blocks) - len(each.table)])
        firsts.row_of[each.table[0]] = row
        length = len(each.k)
        each.step(native, 0, length - 1)
        each.stage(length - 1, length)
        native.write_kv(view, each.k[-1:], each.v[-1:], each.slots(length - 1, length))
    tables = torch.nn.utils.rnn.pad_sequence([each.table for each in requests], batch_first=True)
    got, want = (
        backend.paged_attention(
            torch.cat([each.q[-1:] for each in as_read]),
            as_read[0].view,
            tables,
            torch.arange(5, dtype=torch.int32),
            torch.tensor(lens, dtype=torch.int32),
            scale=0.125,
            window=None,
            softcap=None,
            need_lse=True,
            need_mass=False,
            shared_prefixes=(),
        )
        for backend, as_read in ((native, requests), (reference, [widened(each) for each in requests]))
    )
    torch.testing.assert_close(got.out.float(), want.out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("group", [1, 3])
def test_channels_of_every_size(isa: str, group: int) -> None:
    """Scales of keys from the least code on, queries as different, and rows that differ by orders of magnitude."""
    written, _ = pair(("int4", "int4"), 161, torch.bfloat16, group, num_blocks=12)
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-7, 3, 64)[torch.randperm(64, generator=generator)]
    written.k = (torch.randn(written.k.shape, generator=generator) * sizes).bfloat16()
    rows = torch.logspace(-4, 0, written.q.shape[1])[:, None]
    written.q = (torch.randn(written.q.shape, generator=generator) / sizes.clamp(min=1e-5) * rows).bfloat16()
    written.q[:, 0] = 0
    check_chunks(written, [0, 160, 161])


@each_format
@pytest.mark.parametrize("group", [2, 8])
def test_long_contexts_in_parts_and_shared_prefixes(isa: str, formats: tuple[str, str], group: int) -> None:
    """Two requests that share the first 1,024 entries, and decode."""
    written, _ = pair(formats, 1201, torch.bfloat16, group, num_blocks=80)
    written.stage(0, 1200)
    native.write_kv(written.view, written.k[:1200], written.v[:1200], written.slots(0, 1200))
    written.close(1200)
    written.stage(1200, 1201)
    native.write_kv(written.view, written.k[1200:], written.v[1200:], written.slots(1200, 1201))
    wide, tables = widened(written), written.table.repeat(2, 1)
    results = []
    for backend, each, shared in (
        (native, written, (SharedPrefix(0, 2, 64),)),
        (native, written, ()),
        (reference, wide, ()),
    ):
        results.append(
            backend.paged_attention(
                torch.cat((each.q[1200:], -each.q[1200:])),
                each.view,
                tables,
                torch.tensor([0, 1, 2], dtype=torch.int32),
                torch.tensor([1201, 1201], dtype=torch.int32),
                scale=0.125,
                window=None,
                softcap=None,
                need_lse=True,
                need_mass=False,
                shared_prefixes=shared,
            )
        )
    for got in results[:2]:
        torch.testing.assert_close(got.out.float(), results[2].out, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(got.lse, results[2].lse, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_of_a_float_means_what_torch_says(isa: str, name: str, dtype: torch.dtype) -> None:
    written, _ = pair((name, name), 1, dtype, head_dim=256)
    written.step(native, 0, 1)
    slot = written.view.values[written.table[0], :, 0]
    codes = torch.arange(256, dtype=torch.uint8).view(slot.dtype)
    finite = torch.where(codes.float().isfinite(), codes.float(), torch.zeros(256))
    slot.copy_(finite.to(slot.dtype).expand(slot.shape))
    assert written.view.value_scales is not None
    written.view.value_scales.fill_(0.5)
    out = written.attend(native, 0, 1, need_mass=False).out
    torch.testing.assert_close(out.float(), (finite * 0.5).expand(out.shape), rtol=1e-6, atol=0)


@each_format
def test_rope_writes_what_it_rotated(isa: str, formats: tuple[str, str]) -> None:
    one, other = pair(formats, 40, torch.float32)
    angles = torch.outer(torch.arange(64.0), 100 ** -torch.arange(0, 1, 2 / 64))
    tables, positions = (angles.cos(), angles.sin()), torch.arange(3, 43)
    for backend, written in ((native, one), (reference, other)):
        written.stage(0, 40)
        backend.rope_write_kv(written.q, written.k, written.v, *tables, positions, written.view, written.slots(0, 40))
    torch.testing.assert_close(one.q, other.q, rtol=1e-5, atol=1e-5)
    got, want = (written.attend(reference, 0, 40).out for written in (one, other))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_a_block_without_a_staged_copy_is_refused(isa: str) -> None:
    written, _ = pair(("int4", "int4"), 20, torch.float32)
    with pytest.raises(KernelError, match="staged copy"):
        native.write_kv(written.view, written.k, written.v, written.slots(0, 20))
    assert written.view.staging is not None
    assert written.view.staging.keys.isnan().all()
    written.stage(0, 20)
    native.write_kv(written.view, written.k, written.v, written.slots(0, 20))
    written.close(32)
    with pytest.raises(KernelError, match="staged copy"):
        written.attend(native, 10, 20)
    written.stage(0, 20)
    written.view.staging.firsts.row_of[written.table[0]] = 3
    for backend in (native, reference):
        with pytest.raises(KernelError, match=r"first token of .*request.* is 3, outside 0\.\.2"):
            written.attend(backend, 17, 20)


@each_format
@pytest.mark.parametrize("threads", [1, 3])
def test_the_fused_decoder_reads_and_writes_every_format(formats: tuple[str, str], threads: int, tmp_path) -> None:
    folder = save(build("llama", **SIZES).bfloat16(), tmp_path)
    fused = load(folder, torch.bfloat16)
    if not fused._can_fuse:
        pytest.skip("no matrix tiles on this machine")
    outcomes, before = [], torch.get_num_threads()
    torch.set_num_threads(threads)
    for decoder in (fused, call_by_call(fused), load(folder, torch.float32)):
        run = PagedRun(decoder)
        shape = {"num_blocks": run.num_blocks, "num_kv_heads": 2, "block_size": run.block_size, "head_dim": 16}
        run.kv = [make_view(*formats, dtype=decoder.dtype, **shape) for _ in run.kv]
        for view in run.kv:
            if view.staging is not None:
                view.staging.slot_of.copy_(torch.arange(run.num_blocks))
                firsts = view.staging.firsts  # read by blocks past the first, whatever it was
                firsts.row_of[run.free[0][-1]] = ROW
                firsts.keys[ROW], firsts.values[ROW] = torch.linspace(-1, 1, 16), torch.linspace(0, 0.5, 16)
        outcomes.append(run.chunked(tokens(60), [20, 1, 7]))
    torch.set_num_threads(before)
    assert_as_good(*outcomes)
