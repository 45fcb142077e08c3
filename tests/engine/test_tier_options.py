"""What the engine makes of its tier options: records sealed with a key, and a SPEC that says when it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagoda import Engine, SamplingParams
from pagoda.errors import ConfigError
from pagoda.kv.tiers.spec import load_key, open_tier, parse_tier
from tests.model import models, tokenizers_made_here

PROMPT = "The lighthouse keeper writes down every ship that passes, its flag, its cargo and the hour." * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = tokenizers_made_here.byte_level()
    built = models.build("llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=512)
    return str(tokenizers_made_here.save(tokenizer, models.save(built, tmp_path_factory.mktemp("tiny"))))


def answer(model: str, *tiers: str, tier_key: str | None = None) -> str:
    engine = Engine(
        model, dtype="float32", kv_memory="1MiB", tiers=tiers, tier_key=tier_key, block_size=16, progress=False
    )
    text = engine.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))[0].text
    engine.close()
    return text


def test_with_a_key_records_are_sealed(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography", reason="encryption needs the extra 'encryption'")
    monkeypatch.setenv("KEY", "1f" * 32)
    spec = parse_tier(f"disk:{tmp_path / 'kv'}:16MiB")
    first = answer(model, f"disk:{tmp_path / 'kv'}:16MiB", tier_key="env:KEY")
    assert answer(model, f"disk:{tmp_path / 'kv'}:16MiB", tier_key="env:KEY") == first
    with open_tier(spec, key=load_key("env:KEY")) as tier:
        opened = {info.num_bytes for info in tier.scan()}
    with open_tier(spec) as tier:
        stored = {info.num_bytes for info in tier.scan()}
    assert opened
    assert stored == {size + 28 for size in opened}


def test_a_spec_says_when_it_is_written(model: str, tmp_path: Path) -> None:
    """What nothing evicts does not come to a tier that is written back."""
    for write, wanted in (("through", True), ("back", False)):
        spec = f"disk:{tmp_path / write}:16MiB"
        answer(model, f"{spec}?write={write}")
        with open_tier(parse_tier(spec)) as tier:
            assert (tier.usage().num_records > 0) == wanted
    with pytest.raises(ConfigError, match=r"through, back.*not 'never'"):
        answer(model, f"disk:{tmp_path / 'x'}:16MiB?write=never")
