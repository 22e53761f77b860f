"""The wheel is complete: modules, data, documents and metadata, as a package index and an installed copy show them."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from swarm import Swarm

from p2ptrain.cli import EXIT_USER_ERROR

ROOT = Path(__file__).parent.parent
PACKAGES = ("p2ptrain", "peer", "bootstrap")
RELATIVE_LINK = re.compile(r"\]\((?!\w+:|#)([^()\s#]+)")
FOR_A_CLONE = re.compile(r"^(\.\./)?docker/")
"""Targets of links in shipped pages that only a clone has."""


def pip(command: str, *arguments: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "P2PTRAIN_SOURCE_URL"}
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", command, *options, *arguments], env=environment, timeout=120, check=True
    )


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of its sources, as a build in the clone leaves files there."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in (*PACKAGES, "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for pattern in ("*.md", "setup.*", "pyproject.toml", "LICENSE", "NOTICE"):
        for file in ROOT.glob(pattern):
            shutil.copy(file, source)
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel alone, and return the folder with its modules."""
    place = tmp_path_factory.mktemp("installed")
    pip("install", "--no-compile", "--ignore-installed", "--prefix", str(place), str(wheel))
    return Path(sysconfig.get_path("purelib", vars={"base": str(place)}))


def run(installed: Path, cwd: Path, *arguments: str) -> str:
    """Run ``p2ptrain`` as installed, and return what it prints. Raises CalledProcessError."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "p2ptrain.cli", *arguments],
        env=os.environ | {"PYTHONPATH": str(installed)},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


def test_the_wheel_has_every_file_of_the_packages_and_no_other_package(wheel: Path) -> None:
    ours = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packed = {name for name in names if not re.match(r"[^/]+\.(data|dist-info)/", name)}
    assert packed == ours


def test_the_metadata_is_true(wheel: Path) -> None:
    about = metadata(wheel)
    lowest, end = re.findall(r"3\.(\d+)", about["Requires-Python"])
    minors = range(*sorted((int(lowest), int(end))))
    classifiers = about.get_all("Classifier", [])
    assert [each for each in classifiers if re.search(r":: 3\.", each)] == [
        f"Programming Language :: Python :: 3.{minor}" for minor in minors
    ]
    assert "Operating System :: POSIX :: Linux" in classifiers
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_all("License-File") == ["LICENSE", "NOTICE"]


def test_bounds_admit_the_tested_versions(wheel: Path) -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    needs = [Requirement(each) for each in metadata(wheel).get_all("Requires-Dist", [])]
    bounded = {need.name: need for need in needs if need.specifier}
    assert {"hivemind", "torch", "transformers", "tokenizers", "pydantic"} <= set(bounded)
    assert [str(need) for need in bounded.values() if pinned[need.name] not in need.specifier] == []


def test_without_an_address_the_description_has_no_dead_links(wheel: Path) -> None:
    about = metadata(wheel)
    text = str(about.get_payload())
    assert "# p2ptrain" in text
    assert "docs/JOIN.md" in text
    assert RELATIVE_LINK.findall(text) == []
    assert "![" not in text
    assert about.get_all("Project-URL") is None


def test_with_an_address_links_and_images_are_absolute() -> None:
    described = runpy.run_path(str(ROOT / "setup.py"))["described"]
    text = described((ROOT / "README.md").read_text(encoding="utf-8"), "https://example.org/p2ptrain")
    assert RELATIVE_LINK.findall(text) == []
    assert "](https://example.org/p2ptrain/blob/main/docs/JOIN.md)" in text
    assert "![The page of a swarm: losses, exchanges, peers](https://example.org/p2ptrain/raw/main/docs/images/" in text
    assert "[For developers](#for-developers)" in text


def test_documents_that_the_product_names_are_installed(installed: Path, tmp_path: Path) -> None:
    folder = Path(run(installed, tmp_path, "docs").strip())
    assert not folder.is_relative_to(ROOT)
    sources = [file.read_text(encoding="utf-8") for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"\bdocs/[\w/]+\.\w+", text)}
    named |= {f"docs/{name}" for text in sources for name in re.findall(r"\bdocument\(['\"](\w+\.md)", text)}
    assert {"docs/DATA.md", "docs/SECURITY.md"} <= named
    assert [name for name in sorted(named) if not (folder / name).is_file()] == []


def test_links_of_installed_documents_lead_to_installed_documents(installed: Path, tmp_path: Path) -> None:
    folder = Path(run(installed, tmp_path, "docs").strip())
    dead = [
        f"{page.relative_to(folder)}: {target}"
        for page in folder.rglob("*.md")
        for target in RELATIVE_LINK.findall(re.sub(r"`[^`]*`", "", page.read_text(encoding="utf-8")))
        if not (page.parent / target).exists() and not FOR_A_CLONE.match(target)
    ]
    assert dead == []


def test_a_run_begins_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    run(installed, tmp_path, "init", "my-run")
    assert "Signed: run" in run(installed, tmp_path, "sign", "my-run")


def test_what_needs_a_clone_says_so(installed: Path, tmp_path: Path) -> None:
    for arguments in (["simulate", "it.toml"], ["simulate", "--help"], ["testnet", "--scenario", "it.toml"]):
        with pytest.raises(subprocess.CalledProcessError) as failed:
            run(installed, tmp_path, *arguments)
        assert failed.value.returncode == EXIT_USER_ERROR
        assert "needs a clone of the repository" in failed.value.stderr
        assert "make install" in failed.value.stderr
        assert len(failed.value.stderr.splitlines()) == 2


@pytest.mark.net
def test_the_notebook_joins_a_swarm(wheel: Path, tmp_path: Path) -> None:
    """Run the cells as plain Python; pip installs the wheel into a folder, without its requirements."""
    cells = json.loads((ROOT / "docs" / "join.ipynb").read_text(encoding="utf-8"))["cells"]
    assert [cell["cell_type"] for cell in cells] == ["code"] * 3
    source = "\n".join("".join(cell["source"]) for cell in cells)
    modules = tmp_path / "modules"
    pip_options = {"PIP_TARGET": str(modules), "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}
    with Swarm(run__tokens=5_000, corpus__validation_fraction=0.0015) as swarm:
        bootstrap = swarm.bootstrap()
        values = {"LINK": swarm.link, "WHEEL": str(wheel), "HOME": str(swarm.root / "fox"), "OPTIONS": ["--local"]}
        for name, value in values.items():
            source, count = re.subn(rf"^{name} = .*$", lambda _, line=f"{name} = {value!r}": line, source, flags=re.M)
            assert count == 1, name
        (tmp_path / "cells.py").write_text(source, encoding="utf-8")
        environment = {**swarm.environment, **pip_options, "PYTHONPATH": str(modules)}
        done = subprocess.run(
            [sys.executable, "cells.py"],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:]
        assert bootstrap.terminate() == 0
    assert (modules / "p2ptrain").is_dir()
    assert (tmp_path / "my-model" / "model.safetensors").is_file(), done.stdout
    assert "\nTo be, or not" in done.stdout, done.stdout  # what cell 3 generates begins with the text
