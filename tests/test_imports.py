"""Who may import whom: the drawing of DESIGN section 3, enforced on the source of every module.

                 cli, pagoda/__init__ ──> anything
    cluster ──> server, engine, kv.events    integrations ──> kv
    server  ──> engine, kv.keys (Scope)      plan ──> kv, cluster.routing (pure)
    engine  ──> model, kernels (types), kv, sparse, blend
    sparse, blend ──> kv, kernels            model ──> kernels
    kv, kernels ──> errors, files, kinds, memory and toml, which everyone may import

Every import counts: inside functions, because a lazy dependency is one; under TYPE_CHECKING too, because a package
that names another's types cannot be read, type-checked or changed without it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pagoda"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
EXTENSION = "pagoda._native"  # compiled from csrc/: kernels only
KERNEL_TYPES = ("AttentionOutput", "FirstTokens", "KVView", "LayerStep", "RowRecall", "Staging", "Steering")

LEAVES = (
    "layout",
    "keys",
    "allocator",
    "block_table",
    "radix",
    "radix_index",
    "radix_node",
    "eviction",
    "retained",
    "retention",
    "tenants",
)
METADATA = (
    "formats",
    "ages",
    "block_map",
    "books",
    "cache",
    "committing",
    "compaction",
    "events",
    "lease",
    "observe",
    "purging",
    "room",
    "view",
    *LEAVES,
)

# What a package may import besides itself and what everyone may: a name covers everything below it, and "a:B" is
# only B from a.
EVERYONE = ("errors", "files", "kinds", "memory", "toml", ":__version__")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "files": (),
    "kinds": (),
    "toml": (),
    "memory": (),
    "config": (),
    "kernels": ("_native",),
    "kv": (),
    "sparse": ("kv", "kernels"),
    "blend": ("kv", "kernels"),
    "model": ("kernels",),
    "engine": ("model", *(f"kernels:{name}" for name in KERNEL_TYPES), "kv", "sparse", "blend"),
    "server": ("engine", "kv.keys"),
    "cluster": ("server", "engine", "kv.events"),
    "plan": ("cluster.routing", *(f"kv.{part}" for part in ("sizes", *METADATA))),
    "integrations": ("kv",),
}
UNRESTRICTED = {"", "cli"}

TIER_PROTOCOL = ("tiers.base", "tiers.records")  # what is above the tiers knows these, and no tier by name

# Inside kv, by the first part of the name below pagoda.kv.
WITHIN_KV: dict[str, tuple[str, ...]] = {
    "": (),
    "layout": (),
    "keys": (),
    "sizes": (),
    "allocator": (),
    "block_table": ("allocator",),
    "tenants": ("allocator",),
    "radix_node": ("allocator", "eviction", "keys"),
    "eviction": (),
    "retained": ("allocator", "keys", "lineage", "radix_node"),
    "retention": ("allocator", "eviction", "keys", "lineage", "radix_node", "retained"),
    "lineage": ("keys", "radix_node"),
    "radix_index": ("allocator", "keys", "lineage", "radix_node"),
    "radix": ("allocator", "eviction", "keys", "radix_index", "radix_node"),
    "directives": (),
    "lease": ("block_table", "directives", "keys", "lineage", "radix_node"),
    "computing": ("keys", "lease", "lineage", "radix_node"),
    "pool": ("layout",),
    "staging": ("layout", "pool", "room"),
    "room": ("layout",),
    "formats": ("layout",),
    "tiers": ("formats", "keys", "layout", "sizes", "tenants"),
    "speed": (),
    "breaker": (),
    "workers": (),
    "tier_report": ("breaker", *TIER_PROTOCOL),
    "transfer": ("breaker", "keys", "layout", "speed", "tier_report", "workers", *TIER_PROTOCOL),
    "fetch": ("transfer", *TIER_PROTOCOL),
    "fetcher": ("fetch", "transfer", "workers", *TIER_PROTOCOL),
    "frequency": (),
    "write_queue": ("keys", "transfer", *TIER_PROTOCOL),
    "hierarchy": ("fetcher", "frequency", "keys", "layout", "tier_report", "transfer", "write_queue", *TIER_PROTOCOL),
    "restore": ("fetch", "lease", "radix_node", "transfer"),
    "prefetch": ("fetch", "fetcher", "keys"),
    "observe": ("lease", "lineage", *LEAVES),
    "view": LEAVES,
    "ages": ("allocator",),
    "block_map": ("allocator", "retention"),
    "events": ("allocator", "keys", "lineage", "radix_node"),
    "tier_events": ("events", "transfer", *TIER_PROTOCOL),
    "books": ("ages", "block_map", "computing", "events", "lease", "lineage", "observe", "view", *LEAVES),
    "committing": ("books", "directives", "lease", "lineage", *LEAVES),
    "purging": ("books", "committing", "lease", *LEAVES),
    "compaction": ("lease", "purging", *LEAVES),
    "cache": ("books", "compaction", "computing", "directives", "lease", "lineage", *LEAVES),
    "tier_leases": ("hierarchy", "lease", "transfer", "write_queue", *LEAVES, *TIER_PROTOCOL),
    "leased_below": ("cache", "hierarchy", "lease", "tier_leases", "transfer", *LEAVES, *TIER_PROTOCOL),
    "written_below": (
        "cache",
        "events",
        "hierarchy",
        "lease",
        "leased_below",
        "lineage",
        "tier_events",
        "transfer",
        "write_queue",
        *LEAVES,
        *TIER_PROTOCOL,
    ),
    "tiered": (
        "compaction",
        "fetch",
        "hierarchy",
        "lease",
        "leased_below",
        "lineage",
        "prefetch",
        "restore",
        "transfer",
        "write_queue",
        "written_below",
        *LEAVES,
        *TIER_PROTOCOL,
    ),
}
USES_TORCH = {"pool", "staging"}


def imports(module: str, source: str | None = None) -> Iterator[tuple[str, str]]:
    """Every (module, name) that a module imports, wherever the statement stands; the name is "" for a whole module."""
    path = MODULES.get(module)
    tree = ast.parse(source if source is not None else path.read_text())  # type: ignore[union-attr]
    package = module if path is not None and path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (inner, "") if inner in MODULES or inner == EXTENSION else (base, alias.name)


def covered(target: str, name: str, allowed: tuple[str, ...]) -> bool:
    """Whether a list of allowed names, as in MAY_IMPORT, has `name` of module `target`."""
    for entry in allowed:
        base, _, only = entry.partition(":")
        if (target == base or target.startswith(base + ".")) and only in ("", name):
            return True
    return False


def inside(module: str, package: str) -> str | None:
    """The name of a module below a package: "" for the package itself, None for a stranger."""
    if module == package:
        return ""
    return module.removeprefix(package + ".") if module.startswith(package + ".") else None


def violations(module: str, source: str | None = None) -> list[str]:
    """What a module imports against the drawing."""
    below = inside(module, "pagoda")
    assert below is not None
    package = below.split(".")[0]
    if package in UNRESTRICTED:
        return []
    wrong = []
    for target, name in imports(module, source):
        other = inside(target, "pagoda")
        if other is None:
            continue
        if other.split(".")[0] != package and not covered(other, name, EVERYONE + MAY_IMPORT[package]):
            wrong.append(f"{module} imports {target} {name}".rstrip())
        elif package == "kv" and other.startswith("kv"):
            wrong += within_kv(module, target)
    return wrong


def within_kv(module: str, target: str) -> list[str]:
    own, other = inside(module, "pagoda.kv"), inside(target, "pagoda.kv")
    assert own is not None
    assert other is not None
    part = own.split(".")[0]
    if part == other.split(".")[0]:
        siblings = part == "tiers" and own not in ("tiers", "tiers.spec") and not is_shared_by_tiers(other)
        return [f"{module} imports its sibling {target}"] if siblings and own != other else []
    return [] if covered(other, "", WITHIN_KV[part]) else [f"{module} imports {target}"]


def is_shared_by_tiers(name: str) -> bool:
    """Whether a module of kv.tiers is what tiers are built from, and not a tier: it defines no class named *Tier."""
    tree = ast.parse(MODULES["pagoda.kv." + name].read_text())
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return name in ("tiers.base", "tiers.wrapped") or not any(n.endswith("Tier") for n in names)


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_drawing(module: str) -> None:
    assert violations(module) == []


def part_of_kv(module: str) -> str | None:
    below = inside(module, "pagoda.kv")
    return None if below is None else below.split(".")[0]


@pytest.mark.parametrize("module", [module for module in MODULES if part_of_kv(module) not in (None, "tiers")])
def test_kv_needs_only_the_standard_library_numpy_and_torch(module: str) -> None:
    """Tiers may import their client library too, an optional extra."""
    allowed = {"pagoda", "numpy", *sys.stdlib_module_names} | ({"torch"} if part_of_kv(module) in USES_TORCH else set())
    assert {target.split(".")[0] for target, _ in imports(module)} <= allowed


def test_every_package_is_in_the_drawing() -> None:
    packages = {str(inside(module, "pagoda")).split(".")[0] for module in MODULES}
    assert packages <= MAY_IMPORT.keys() | UNRESTRICTED
    assert {part_of_kv(module) for module in MODULES} <= WITHIN_KV.keys() | {None}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pagoda.kernels.dispatch", "import pagoda.kv.layout"),
        ("pagoda.kernels.dispatch", "def f():\n    from pagoda.kv import layout"),
        ("pagoda.kernels.dispatch", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..kv import layout"),
        ("pagoda.kv.cache", "from pagoda.engine.request import Request"),
        ("pagoda.kv.radix", "from pagoda.kv.cache import KVCache"),
        ("pagoda.kv.allocator", "from .pool import BlockPool"),
        ("pagoda.kv.cache", "from pagoda.kv.pool import BlockPool"),
        ("pagoda.kv.hierarchy", "from pagoda.kv.tiers.disk import DiskTier"),
        ("pagoda.kv.tiers.disk", "from pagoda.kv.tiers.dram import DramTier"),
        ("pagoda.engine.runner", "from pagoda.kernels import paged_attention"),
        ("pagoda.model.decoder", "from pagoda.kv.pool import BlockPool"),
        ("pagoda.server.app", "from pagoda.kv.cache import KVCache"),
        ("pagoda.server.app", "from pagoda import kv"),
        ("pagoda.server.app", "from pagoda import Engine"),
        ("pagoda.plan.replay", "from pagoda.kv.pool import BlockPool"),
        ("pagoda.model.decoder", "import pagoda._native"),
        ("pagoda.errors", "from pagoda.kv.keys import Scope"),
    ],
)
def test_a_forbidden_import_is_seen(module: str, source: str) -> None:
    assert violations(module, source) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pagoda.engine.runner", "from pagoda.kernels import KVView"),
        ("pagoda.server.backend", "from pagoda.kv.keys import Scope"),
        ("pagoda.server.app", "from pagoda import __version__"),
        ("pagoda.kernels.dispatch", "import pagoda._native"),
        ("pagoda.kernels.dispatch", "from pagoda import _native"),
        ("pagoda.cli.serve", "from pagoda.kv.pool import BlockPool"),
        ("pagoda.kernels.dispatch", "from . import reference\nfrom pagoda.errors import KernelError"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_kv_metadata_imports_without_torch() -> None:
    modules = ", ".join(f"pagoda.kv.{part}" for part in METADATA if f"pagoda.kv.{part}" in MODULES)
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_what_runs_inside_vllm_needs_no_engine() -> None:
    ours = [m for m in MODULES if inside(m, "pagoda.integrations") is not None]
    needs_vllm = {m for m in ours if any(target.split(".")[0] == "vllm" for target, _ in imports(m))}
    assert needs_vllm == {"pagoda.integrations.vllm_connector", "pagoda.integrations.vllm.metrics"}
    engine = "[m for m in sys.modules if m.startswith(('pagoda.engine', 'pagoda.model', 'pagoda.kernels'))]"
    code = f"import sys, {', '.join(set(ours) - needs_vllm)}; assert not {engine}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_plan_needs_no_torch() -> None:
    plan = [module for module in MODULES if inside(module, "pagoda.plan") is not None]
    code = f"import sys, {', '.join(plan or ['pagoda'])}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_router_needs_no_torch() -> None:
    modules = "pagoda.cluster.router, pagoda.cluster.local, pagoda.cli.route"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
