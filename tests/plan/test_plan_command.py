from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagoda.cli import app
from pagoda.cli.plan import load_shape, parse_tokens
from pagoda.errors import ConfigError, ModelNotFound, PagodaError
from pagoda.plan.catalog import CATALOG
from pagoda.plan.hardware import find_hardware


def run(*args: str) -> str:
    result = CliRunner().invoke(app, ["plan", *args], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_tables() -> None:
    out = run("llama-3-8b", "--context", "8k", "--shared-prefix", "1k", "--users", "100")
    assert "32 layers x 2 (K, V) x 8 KV heads x 128 head_dim x 2 bytes  131,072" in out
    for title in ("Requests at once", "What each way", "Tiers", "Hardware for 100 at once at 8,192 tokens"):
        assert title in out


def test_no_figure_is_cut_on_a_narrow_terminal() -> None:
    question = "plan", "llama-3.1-8b", "--context", "8k", "--context", "128k", "--users", "10000"

    def figures(columns: str) -> set[str]:
        result = CliRunner().invoke(app, [*question, "--shared-prefix", "1k"], env={"COLUMNS": columns})
        assert result.exit_code == 0, result.output
        return {word for word in result.output.split() if any(letter.isdigit() for letter in word)}

    assert figures("200") == figures("80") == figures("40")


def test_contexts_leave_room_for_the_shared_prefix() -> None:
    """The example of docs/plan.md."""
    plan = json.loads(run("deepseek-v3", "--hardware", "h200", "--devices", "8", "--shared-prefix", "4k", "--json"))
    assert [each["context"] for each in plan["contexts"]] == [8192, 32768, 131072]


def test_a_context_beyond_the_models_is_said_so() -> None:
    result = CliRunner().invoke(app, ["plan", "llama-3.1-8b", "--context", "1m", "--context", "8k", "--json"])
    assert result.stderr.startswith("llama-3.1-8b has a context of 131,072 tokens: figures at 1,048,576 are of")
    assert [each["context"] for each in json.loads(result.stdout)["contexts"]] == [2**20, 8192]
    assert not CliRunner().invoke(app, ["plan", "llama-3.1-8b", "--context", "128k", "--json"]).stderr


def test_formats_are_compared_in_the_blocks_that_each_would_have() -> None:
    def way(label: str, *args: str) -> tuple[int, list[int]]:
        ways = json.loads(run("llama-3-8b", "--context", "8k", "--json", *args))["techniques"]
        (found,) = [each for each in ways if each["label"] == label]
        return found["num_tokens"], found["users"]

    assert way("in int4") == way("as it is, int4", "--kv-format", "int4")
    assert way("in int8", "--kv-format", "int4") == way("as it is, int8", "--kv-format", "int8")
    assert way("in int4", "--block-size", "16") == way("as it is, int4", "--kv-format", "int4", "--block-size", "16")
    assert way("in int4", "--block-size", "16")[0] < way("in int4")[0]


def test_a_model_that_does_not_fit_is_said_so() -> None:
    out = run("llama-3-70b", "--hardware", "l4")
    assert "leave no room" in out
    assert "none in the table" in run("llama-3-70b", "--hardware", "l4", "--users", "5", "--min-speed", "1e6")


def test_json_has_the_figures() -> None:
    plan = json.loads(run("deepseek-v3", "--devices", "8", "--hardware", "h200", "--context", "32k", "--json"))
    assert plan["bytes_per_token"] == 8 * 576 * 61 * 2
    assert plan["weight_format"] == "fp8"
    assert plan["contexts"][0]["context"] == 32768


def test_figures_of_the_hardware_can_be_given() -> None:
    given = ("--memory", "32GiB", "--bandwidth", "400GB/s", "--tflops", "30", "--host-link", "10GB", "--price", "0.5")
    hardware = json.loads(run("llama-3-8b", *given, "--json"))["hardware"]
    assert hardware == {
        "name": "h100, changed",
        "memory": 32 * 2**30,
        "bandwidth": 400e9,
        "flops": 30e12,
        "host_link": 10e9,
        "price": 0.5,
        "count": 1,
    }


def test_without_a_model_the_known_ones_are_listed() -> None:
    assert all(name in run("--list") for name in ("gemma-3-27b", "mi300x"))


def test_a_folder_a_file_and_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CATALOG["qwen3-8b"]))
    shape = load_shape("qwen3-8b")
    assert load_shape(str(tmp_path)).parameters == shape.parameters
    assert load_shape(str(tmp_path / "config.json")).windows == shape.windows
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(PagodaError, match=r"config\.json"):
        load_shape(str(tmp_path))
    with pytest.raises(ModelNotFound, match="built-in"):
        load_shape("no such model")


def test_of_a_hub_model_only_the_config_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CATALOG["qwen3-8b"]))
    asked: list[tuple[str, ...]] = []

    def download(*args: str) -> str:
        asked.append(args)
        if args[0] != "Qwen/Qwen3-8B":
            raise OSError("no network")
        return str(tmp_path / "config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert load_shape("Qwen/Qwen3-8B").parameters == load_shape("qwen3-8b").parameters
    assert asked == [("Qwen/Qwen3-8B", "config.json")]
    with pytest.raises(ModelNotFound, match=r"--list.*no network"):
        load_shape("nobody/nothing")


@pytest.mark.parametrize(("text", "count"), [("8192", 8192), ("8k", 8192), ("1M", 1048576), ("10,000", 10_000)])
def test_tokens(text: str, count: int) -> None:
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["", "k", "8kb", "-1", "1.5k"])
def test_no_tokens(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_tokens(text)


def test_planning_needs_no_torch() -> None:
    code = "import sys; from pagoda.cli.plan import load_shape; import pagoda.cli.plan_tables, pagoda.plan.report; "
    code += "load_shape('llama-3-8b'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_nearly_a_name_is_told() -> None:
    with pytest.raises(ConfigError, match="is h100 meant"):
        find_hardware("h1000")
    with pytest.raises(ModelNotFound, match="is llama-3-8b meant"):
        load_shape("llama-3-8")


def test_a_device_is_hardware() -> None:
    assert json.loads(run("llama-3-8b", "--device", "l4", "--json")) == json.loads(
        run("llama-3-8b", "--hardware", "l4", "--json")
    )
