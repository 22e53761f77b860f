"""The layers of docs/ARCHITECTURE.md: which package may import which, and what loads no large library."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS = (
    {"p2ptrain", "base"},
    {"outer", "codec", "swarm"},
    {"manifest", "recipes", "framing", "wire", "ports", "statements", "admission", "receipts"},
    {"trainer", "host", "train", "data", "tokens", "checkpoint", "page"},
    {"net"},
    {"cli", "peer", "bootstrap"},
    {"sim"},
    {"lab"},
)
"""Layers, from low to high. A package imports from lower layers, and from its own if no cycle arises."""

STRANGERS = ({"swarm", "outer"}, {"swarm", "codec"}, {"sim", "net"}, {"sim", "peer"}, {"sim", "bootstrap"})
"""Packages that never import each other: the two cores; the simulator, and the network and its applications."""

HEAVY = {"torch", "transformers", "hivemind", "pyarrow"}

FORBIDDEN_PACKAGES = {
    "swarm": HEAVY | {"numpy", "asyncio", "socket", "time"},
    "manifest": HEAVY,
    "admission": HEAVY | {"asyncio", "socket", "time"},
    "statements": HEAVY | {"asyncio", "socket", "time"},
    "receipts": HEAVY | {"asyncio", "socket", "time"},
    "recipes": HEAVY,
    "page": HEAVY | {"numpy"},
    "framing": HEAVY | {"asyncio", "socket", "time"},
    "wire": HEAVY,
    "cli": HEAVY | {"peer", "bootstrap"},
    "outer": {"hivemind", "transformers", "asyncio"},
    "codec": {"hivemind", "transformers", "asyncio"},
}
"""Further forbidden packages: only net imports hivemind, and none imports pickle."""


def room(module: str) -> str | None:
    """Return the package of a module; None outside the project."""
    first, *rest = module.split(".")
    if first in ("peer", "bootstrap", "sim", "lab"):
        return first
    if first == "p2ptrain":
        return rest[0] if rest else "p2ptrain"
    return None


def floor(name: str) -> int:
    return next(index for index, layer in enumerate(LAYERS) if name in layer)


def imports(source: str) -> Iterator[tuple[str, bool]]:
    """Return all modules that the source imports, also inside functions, and whether only type checkers do."""

    def visit(node: ast.AST, typing_only: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            # `from p2ptrain import wire` names a package; `from p2ptrain import __version__` does not.
            rooms = [f"p2ptrain.{alias.name}" for alias in node.names if module == "p2ptrain" and known(alias.name)]
            yield from ((name, typing_only) for name in rooms or [module])
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                yield from visit(child, True)
            for child in node.orelse:
                yield from visit(child, typing_only)
        else:
            for child in ast.iter_child_nodes(node):
                yield from visit(child, typing_only)

    yield from visit(ast.parse(source), False)


def known(name: str) -> bool:
    return any(name in layer for layer in LAYERS)


def faults(own: str, source: str) -> list[str]:
    """Return the imports of a source file in the package ``own`` that break the rules."""
    found = []
    for module, typing_only in imports(source):
        package = module.split(".")[0]
        forbidden = FORBIDDEN_PACKAGES.get(own, set()) | {"pickle", "cloudpickle", "dill"}
        if own != "net":
            forbidden |= {"hivemind"}
        if package in forbidden and not typing_only:
            found.append(f"{own} imports {package}")
        other = room(module)
        if other is None or other == own:
            continue
        if not known(other):
            found.append(f"{other} has no floor in LAYERS")
        elif floor(other) > floor(own):
            found.append(f"{own} imports {other}, which is above it")
        elif {own, other} in STRANGERS:
            found.append(f"{own} imports {other}, a stranger")
    return found


def modules() -> dict[Path, str]:
    """Return every source file of the project with its package."""
    files = [
        path for package in ("p2ptrain", "peer", "bootstrap", "sim", "lab") for path in (ROOT / package).rglob("*.py")
    ]
    return {path: str(room(dotted(path))) for path in sorted(files)}


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = modules()


def test_the_house_is_not_empty() -> None:
    assert {"base", "swarm", "manifest", "cli"} <= set(MODULES.values())


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_keep_to_the_floors(path: Path) -> None:
    assert known(MODULES[path]), f"give {MODULES[path]} a floor in LAYERS"
    assert faults(MODULES[path], path.read_text()) == []


def test_no_circles_between_rooms() -> None:
    """Check also packages of one layer; raises CycleError with the cycle."""
    graph: dict[str, set[str]] = {}
    for path, own in MODULES.items():
        others = {room(module) for module, _ in imports(path.read_text())}
        graph.setdefault(own, set()).update(other for other in others if other and other != own)
    TopologicalSorter(graph).prepare()


def test_the_network_knows_a_learner_by_its_ports() -> None:
    sources = [path.read_text() for path, own in MODULES.items() if own == "net"]
    learners = {name for each in sources for name, _ in imports(each) if room(name) in ("host", "train")}
    assert learners <= {"p2ptrain.host.sketch"}


def test_host_state_knows_no_model_and_no_trainer_knows_it() -> None:
    arrows = {(own, room(name)) for path, own in MODULES.items() for name, _ in imports(path.read_text())}
    apart = ("train", "trainer", "data")
    assert not arrows & {*(("host", each) for each in apart), *((each, "host") for each in apart)}


def test_the_hubs_client_is_imported_without_its_telemetry() -> None:
    users = [dotted(path) for path in MODULES if "huggingface_hub" in {name for name, _ in imports(path.read_text())}]
    assert users == ["p2ptrain.data.hub"]


@pytest.mark.parametrize(
    ("own", "source", "said"),
    [
        ("swarm", "import torch", "swarm imports torch"),
        ("swarm", "def late():\n    from torch import nn", "swarm imports torch"),
        ("swarm", "from p2ptrain.outer import step", "swarm imports outer, a stranger"),
        ("sim", "from p2ptrain.net.links import StreamLink", "sim imports net, a stranger"),
        ("data", "from p2ptrain import net", "data imports net, which is above it"),
        ("sim", "import hivemind.p2p", "sim imports hivemind"),
        ("sim", "from peer.app import run_peer", "sim imports peer, a stranger"),
        ("peer", "from sim.learners import QuadraticTask", "peer imports sim, which is above it"),
        ("page", "import sim.report", "page imports sim, which is above it"),
        ("cli", "import peer.cli", "cli imports peer"),
        ("train", "from peer.app import run", "train imports peer, which is above it"),
        ("net", "import pickle", "net imports pickle"),
        ("net", "import p2ptrain.novelty", "novelty has no floor in LAYERS"),
    ],
)
def test_each_rule_can_be_broken(own: str, source: str, said: str) -> None:
    assert said in faults(own, source)


@pytest.mark.parametrize(
    ("own", "source"),
    [
        ("net", "import hivemind"),
        ("ports", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("sim", "from p2ptrain import __version__, swarm"),
        ("train", "from p2ptrain.data import Corpus"),
        ("peer", "from p2ptrain.cli import run_command"),
    ],
)
def test_what_is_allowed(own: str, source: str) -> None:
    assert faults(own, source) == []


def heavy_modules_after(code: str) -> str:
    """Return the large packages that a fresh interpreter has loaded after the code."""
    script = f"import sys\n{code}\nprint('LOADED', sorted(set(sys.modules) & {HEAVY!r}))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.rpartition("LOADED ")[2].strip()


def test_light_modules_stay_light() -> None:
    assert heavy_modules_after("import p2ptrain, p2ptrain.cli, p2ptrain.manifest, p2ptrain.recipes") == "[]"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["init", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"sys.argv = ['p2ptrain', *{arguments!r}]\nfrom p2ptrain.cli import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert done.code == 0, done.code"
    )
    assert heavy_modules_after(code) == "[]"


def test_the_probe_notices_heavy_modules() -> None:
    assert heavy_modules_after("sys.modules['torch'] = sys") == "['torch']"


def test_nothing_is_raised_where_groups_are_taken_apart() -> None:
    """Check that no ``except*`` raises: Python before 3.11.4, as in Debian 12, groups the error again (gh-103590)."""
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.TryStar):
                raised = [
                    each for handler in node.handlers for each in ast.walk(handler) if isinstance(each, ast.Raise)
                ]
                assert raised == [], f"{path}, line {raised[0].lineno if raised else 0}"
