"""Every formula of `pagoda plan` against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagoda.engine.config import EngineConfig
from pagoda.engine.memory import make_pool
from pagoda.errors import ConfigError
from pagoda.plan.capacity import (
    MAX_NUM_SEQS,
    TOKEN_BUDGET,
    Workload,
    cost,
    kv_copies,
    num_tokens,
    num_users,
    offers,
    room,
    tier_figures,
)
from pagoda.plan.catalog import CATALOG, shape_of
from pagoda.plan.footprint import Footprint, without_sharing_heads, without_windows
from pagoda.plan.hardware import GB, HARDWARE, Hardware, find_hardware, parse_tier_plan
from pagoda.plan.report import Question, make_plan
from pagoda.plan.shape import ModelShape
from pagoda.plan.work import Machine, prefill_ops

LLAMA = shape_of("llama-3-8b")
TOY = ModelShape.from_config(  # 2 layers of 100 parameters x 64: small enough to count on paper
    "toy",
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
    },
)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("llama-3-8b", 131_072),  # 2 x 32 x 8 x 128 x 2
        ("llama-3-70b", 327_680),  # 2 x 80 x 8 x 128 x 2
        ("deepseek-v3", (512 + 64) * 61 * 2),
        ("gemma-3-27b", 2 * 62 * 16 * 128 * 2),
        ("smollm2-135m", 23_040),  # 2 x 30 x 3 x 64 x 2
        ("gpt-oss-20b", 2 * 24 * 8 * 64 * 2),
    ],
)
def test_bytes_of_a_token(name: str, num_bytes: int) -> None:
    footprint = Footprint(shape_of(name))
    assert footprint.bytes_per_token == num_bytes
    assert sum(term.bytes_per_token for term in footprint.terms()) == num_bytes


@pytest.mark.parametrize(
    ("kv_format", "num_bytes"),
    [
        ("fp32", 262_144),
        ("fp16", 131_072),
        ("fp8_e4m3", 2 * 32 * 8 * (128 + 2)),
        ("int8", 2 * 32 * 8 * (128 + 2)),
        ("int4", 32 * 8 * (64 + 3 * 128 // 16 + 64 + 3)),
        ("int8/int4", 32 * 8 * (128 + 2 + 64 + 3)),
    ],
)
def test_bytes_in_other_formats(kv_format: str, num_bytes: int) -> None:
    assert Footprint(LLAMA, kv_format).bytes_per_token == num_bytes


def test_the_formula_is_shown_term_by_term() -> None:
    (term,) = Footprint(LLAMA).terms()
    assert term.formula == "32 layers x 2 (K, V) x 8 KV heads x 128 head_dim x 2 bytes"
    (term,) = Footprint(shape_of("deepseek-v3"), "int8").terms()
    assert term.formula == "61 layers x ((512 latent + 64 rotary) x 1 byte + 2 of scale)"
    (term,) = Footprint(LLAMA, "int4").terms()
    assert term.formula == (
        "32 layers x 8 KV heads x "
        "(K: (128 head_dim / 2 bytes + 24 of scales) + V: (128 head_dim / 2 bytes + 3 of scales))"
    )
    sliding, full = Footprint(shape_of("gemma-3-12b")).terms()
    assert (sliding.num_layers, sliding.window, sliding.bytes_per_token) == (40, 1024, 327_680)
    assert (full.num_layers, full.window, full.bytes_per_token) == (8, None, 65_536)


def test_grouped_queries_save_eight_times_on_llama_70b() -> None:
    shape = shape_of("llama-3-70b")
    gqa, mha = Footprint(shape), Footprint(without_sharing_heads(shape))
    assert (mha.bytes_per_token, gqa.bytes_per_token) == (2_621_440, 327_680)
    assert 4096 * gqa.bytes_per_token / 1e9 == pytest.approx(1.34, abs=0.005)
    assert 4096 * mha.bytes_per_token / 1e9 == pytest.approx(10.74, abs=0.005)


def test_the_latent_saves_what_deepseek_says() -> None:
    assert Footprint(without_sharing_heads(shape_of("deepseek-v3"))).bytes_per_token == 128 * (192 + 128) * 61 * 2


def test_of_a_window_only_its_blocks_are_held() -> None:
    shape = shape_of("gemma-3-12b")
    footprint = Footprint(shape)
    groups = footprint.layout.groups  # of 8 layers each: one full and five sliding
    assert [len(group.layers) for group in groups] == [8] * 6
    assert footprint.blocks(512) == 6 * 32
    assert footprint.blocks(8192) == 512 + 5 * 64
    assert footprint.blocks(8200) == 513 + 5 * 65  # the window begins in the middle of a block
    assert Footprint(without_windows(shape)).blocks(8192) * Footprint(without_windows(shape)).layout.block_bytes == (
        8192 * 393_216
    )
    assert footprint.read_bytes(8192) == 8192 * 65_536 + 1024 * 327_680


def test_a_shared_prefix_is_held_once() -> None:
    footprint = Footprint(LLAMA)
    assert footprint.blocks(100, shared=40) == 7 - 2  # whole blocks only
    assert footprint.shared_blocks(100, 40) == 2
    assert footprint.blocks(96, shared=96) == 0


def test_a_prefix_out_of_the_window_is_shared_by_full_layers_only() -> None:
    footprint = Footprint(shape_of("gemma-3-12b"))
    assert footprint.shared_blocks(8192, 4096) == 256  # the windows begin at 7,168
    assert footprint.shared_blocks(2048, 1600) == 100 + 5 * (100 - 64)


def test_devices_beyond_the_kv_heads_keep_copies() -> None:
    assert [kv_copies(LLAMA, devices) for devices in (1, 8, 16)] == [1, 1, 2]
    assert kv_copies(shape_of("deepseek-v3"), 8) == 8
    assert Footprint(LLAMA, copies=2).bytes_per_token == 2 * 131_072


def test_memory_is_weights_reserve_and_kv() -> None:
    space = room(Machine(LLAMA, find_hardware("h100"), 2), 0.9)
    assert space.total == 80 * 2**30
    assert space.weights == 2 * 8_030_261_248
    assert space.reserve == pytest.approx(8 * 2**30)
    assert space.kv == pytest.approx(0.9 * 80 * 2**30 - 2 * 8_030_261_248)


def test_tokens_and_users_are_whole_blocks() -> None:
    footprint = Footprint(LLAMA)
    assert footprint.block_bytes == 16 * 131_072 + 32 * 64  # a cache line a layer
    kv = 1000.5 * footprint.block_bytes
    assert num_tokens(footprint, kv) == 16_000
    assert num_users(footprint, kv, Workload(1600)) == 10
    assert num_users(footprint, kv, Workload(1600, shared=800)) == 19  # 50 blocks once, and 50 each
    assert num_users(footprint, -1.0, Workload(1600)) == num_tokens(footprint, -1.0) == 0


def test_copies_of_blocks_that_are_being_filled_take_their_part() -> None:
    config = EngineConfig()
    assert (config.max_num_seqs, config.token_budget) == (MAX_NUM_SEQS, TOKEN_BUDGET) == (64, 512)
    footprint = Footprint(TOY, "int4")
    first = 2 * 2 * 2 * 16 * 2  # layers, K and V, heads, head_dim, bytes
    copy = 16 * first
    kv = 8 * 2**20
    # 64 samples fill a block each, and one ends another in the same step; layers take turns with what it fills whole.
    # Each has a first token, too.
    blocks = int((kv - (64 + 1 + 32 / 2) * copy - (64 + 1) * first) // footprint.block_bytes)
    assert num_tokens(footprint, kv) == 16 * blocks
    assert make_pool(footprint.layout, kv, config, torch.device("cpu")).num_blocks == blocks
    small = 2**20  # copies for as many would take more than a 16th
    fewer = int((small - (14 + 1 + 32 / 2) * copy - (14 + 1) * first) // footprint.block_bytes)
    assert num_tokens(footprint, small) == 16 * fewer
    each = 10 * footprint.block_bytes + copy + first
    assert num_users(footprint, (1 + 32 / 2) * copy + first + 7.5 * each, Workload(160)) == 7


@pytest.mark.parametrize(
    ("kv_format", "block_size", "gibibytes", "times"),
    [("int8", 16, 1, 1.9), ("int4", 16, 0.25, 3.0), ("int4", 16, 1, 3.1), ("int4", 32, 4, 3.4)],
)
def test_tokens_in_the_same_memory(kv_format: str, block_size: int, gibibytes: float, times: float) -> None:
    shape = shape_of("smollm2-135m")
    quantized, plain = (
        num_tokens(Footprint(shape, name, block_size), gibibytes * 2**30) for name in (kv_format, "bf16")
    )
    assert quantized >= times * plain, "copies of blocks that are being filled included"


def test_prefill_operations() -> None:
    parameters = TOY.parameters
    # q, o: 64 x 64; k, v: 64 x 32; three MLP matrices 64 x 96; two norms; and the final norm
    assert parameters.active == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64) + 64
    attended = 1 + 2 + 3 + 4
    assert prefill_ops(TOY, 4) == 2 * parameters.active * 4 + 2 * 2 * (4 * 16 * 2) * attended
    assert prefill_ops(TOY, 4) == prefill_ops(TOY, 3) + prefill_ops(TOY, 4, start=3)
    sliding = replace(TOY, windows=(None, 2))
    assert prefill_ops(sliding, 4) == 2 * parameters.active * 4 + 2 * (4 * 16 * 2) * (attended + 1 + 2 + 2 + 2)


def test_a_step_takes_the_longer_of_reading_and_computing() -> None:
    parameters = TOY.parameters
    read = parameters.active + parameters.output
    slow_memory = Machine(TOY, Hardware("m", 10**9, 1000.0, 1e15, 1.0, 0.0), 2, 1.0, 0.5)
    assert slow_memory.decode_s(3, 100, Footprint(TOY)) == pytest.approx((2 * read + 3 * 100 * 256) / 500)
    slow_compute = Machine(TOY, Hardware("c", 10**9, 1e15, 1000.0, 1.0, 0.0, count=2), 2, 0.5, 1.0)
    ops = 2 * read + 2 * 2 * (4 * 16 * 2) * 100
    assert slow_compute.decode_s(3, 100, Footprint(TOY)) == pytest.approx(3 * ops / 1000)
    assert slow_compute.prefill_s(8, 8) == 0


def test_loading_breaks_even_where_it_takes_as_long_as_computing() -> None:
    machine = Machine(LLAMA, find_hardware("h100"), 2)
    footprint = Footprint(LLAMA)
    figures = tier_figures(machine, footprint, parse_tier_plan("disk:1TB@2GB", 50e9), 8000)
    assert figures.tier.bandwidth == 2e9
    assert figures.num_contexts == int(1e12 // (500 * footprint.block_bytes / 8000)) // 8000
    assert figures.load_s == pytest.approx(200e-6 + 500 * footprint.block_bytes / 2e9)
    assert figures.recompute_s == pytest.approx(prefill_ops(LLAMA, 8000) / (989e12 / 2))
    at_break_even = replace(figures.tier, bandwidth=figures.break_even, latency_s=0.0)
    assert tier_figures(machine, footprint, at_break_even, 8000).load_s == pytest.approx(figures.recompute_s)


def test_cost_is_price_times_time_per_token() -> None:
    machine = Machine(LLAMA, replace(find_hardware("h100"), price=3.6), 2)
    footprint = Footprint(LLAMA)
    figures = cost(machine, footprint, 100 * 500 * footprint.block_bytes, Workload(8000, shared=0))
    assert figures is not None
    assert figures.batch == 100
    assert figures.prompt_cold == pytest.approx(1000 * machine.prefill_s(8000) / 8000)  # US$ 0.001 a second
    assert figures.output == pytest.approx(1000 * machine.decode_s(100, 8000, footprint) / 100)
    assert figures.tokens_per_s == pytest.approx(1 / machine.decode_s(100, 8000, footprint))
    assert cost(machine, footprint, 10.0, Workload(8000)) is None


def test_offers_fit_and_are_fast_enough() -> None:
    machine = Machine(LLAMA, find_hardware("h100"), 2)
    found = offers(machine, HARDWARE.values(), "bf16", 16, 0.9, 100, 20.0, Workload(8192))
    assert [offer.price_per_hour for offer in found] == sorted(offer.price_per_hour for offer in found)
    for offer in found:
        assert offer.replicas * offer.users_each >= 100 > (offer.replicas - 1) * offer.users_each
        of = replace(machine, hardware=offer.hardware)
        footprint = Footprint(LLAMA, copies=kv_copies(LLAMA, offer.hardware.count))
        assert offer.users_each <= num_users(footprint, room(of, 0.9).kv, Workload(8192))
        assert offer.tokens_per_s >= 20
    assert "t4" not in [o.hardware.name for o in found if o.hardware.count == 1]  # 16 GiB hold no such model
    with pytest.raises(ConfigError, match="positive"):
        offers(machine, [], "bf16", 16, 0.9, 0, 1.0, Workload(8192))


def test_deepseek_v3_needs_a_machine_full_of_devices() -> None:
    machine = Machine(shape_of("deepseek-v3"), find_hardware("h200"), 1)
    (offer,) = offers(machine, [find_hardware("h200")], "bf16", 16, 0.9, 8, 1.0, Workload(32768))
    assert (offer.hardware.count, offer.replicas) == (8, 1)
    assert not offers(machine, [find_hardware("l4")], "bf16", 16, 0.9, 8, 1.0, Workload(32768))


def test_a_plan_has_a_figure_for_every_context_and_tier() -> None:
    question = Question(contexts=(2048, 8192), shared=512, tiers=("dram:64GiB", "object:@1GB"), users=50)
    plan = make_plan(shape_of("gemma-3-4b"), find_hardware("l4"), question)
    assert [figures.context for figures in plan.contexts] == [2048, 8192]
    assert [[figures.tier.name for figures in tiers] for tiers in plan.tiers] == [["dram", "object"]] * 2
    labels = [way.label for way in plan.techniques]
    assert labels[:3] == ["without grouped-query attention", "without sliding windows", "as it is, bf16"]
    assert plan.to_json()["shape"]["windows"] == plan.shape.windows


def test_host_memory_is_as_fast_as_all_links_that_carry_a_copy() -> None:
    question = Question(contexts=(8192,), tiers=("dram:64GiB",))
    (((llama,),), ((deepseek,),)) = (
        make_plan(shape_of(name), find_hardware("h200", 8), question).tiers for name in ("llama-3-8b", "deepseek-v3")
    )
    assert (llama.tier.bandwidth, deepseek.tier.bandwidth) == (8 * 50 * GB, 50 * GB)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contexts": ()}, "at least one context"),
        ({"shared": 4096}, "does not fit in a context"),
        ({"kv_format": "fp2"}, "fp2"),
        ({"weight_format": "fp2"}, "fp2"),
        ({"tiers": ("tape:1TB",)}, "tape:1TB"),
        ({"tiers": ("disk",)}, "disk"),
        ({"tiers": ("disk:much",)}, "much"),
        ({"utilization": 1.5}, "share"),
        ({"compute_share": 0.0}, "share"),
        ({"block_size": 0}, "at least 1"),
    ],
)
def test_a_wrong_setting_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(LLAMA, find_hardware("h100"), replace(Question(contexts=(4096,)), **change))  # type: ignore[arg-type]


def test_unknown_hardware_is_named() -> None:
    with pytest.raises(ConfigError, match="h100"):
        find_hardware("abacus")
    with pytest.raises(ConfigError, match="positive"):
        find_hardware("h100", 0)


def test_the_catalog_covers_the_families_it_promises() -> None:
    families = ("llama-3", "mistral", "mixtral", "qwen2.5", "qwen3", "gemma-2", "gemma-3", "phi", "deepseek", "smollm2")
    assert all(any(name.startswith(family) for name in CATALOG) for family in families)
