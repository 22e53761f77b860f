""".ci/venv on systems without a suitable Python: it says what to type, and another command if that was not enough."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / ".ci" / "venv"
PYTHON = """#!/bin/sh
case "$2" in
  *exit*) case {version} in 3.11|3.12|3.13|3.14) exit 0 ;; *) exit 1 ;; esac ;;
  *print*) echo {version} ;;
  *ensurepip*) exit {lacks_venv} ;;
  *) echo "{version} $*" >> "$ASKED" ;;
esac
"""


class System:
    """A PATH that holds only what a test puts there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.home = root / "home" / ".local" / "bin"
        for each in (self.bin, self.home):
            each.mkdir(parents=True)
        self.tool("id", "#!/bin/sh\necho 1000\n")
        self.tool("apt-get", '#!/bin/sh\necho "apt-get $*" >> "$ASKED"\n')

    def tool(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def python(self, name: str, version: str, *, lacks_venv: bool = False, folder: Path | None = None) -> None:
        path = (folder or self.bin) / name
        path.write_text(PYTHON.format(version=version, lacks_venv=int(lacks_venv)))
        path.chmod(0o755)

    def run(self) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "HOME": str(self.root / "home"), "ASKED": str(self.root / "asked")}
        return subprocess.run(
            ["/bin/bash", str(SCRIPT), str(self.root / "venv")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def asked(self) -> str:
        path = self.root / "asked"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


@pytest.mark.parametrize("user", ["0", "1000"])
@pytest.mark.parametrize("version", ["3.10", "3.15"])
def test_another_python_alone_is_named_with_a_way_out(system: System, version: str, user: str) -> None:
    """Check a wrong system Python: its packages would install the same one again."""
    system.python("python3", version)
    system.tool("id", f"#!/bin/sh\necho {user}\n")
    done = system.run()
    assert done.returncode == 1
    assert f"Found only Python {version}; p2ptrain needs 3.11 to 3.14. Install one, for instance:" in done.stderr
    assert "uv python install 3.12" in done.stderr
    assert "apt-get" not in done.stderr + system.asked


def test_what_uv_brought_is_found_by_a_shell_that_was_open_before(system: System) -> None:
    system.python("python3", "3.10")
    system.python("python3.12", "3.12", folder=system.home)
    assert system.run().returncode == 0
    assert system.asked.splitlines()[-1] == f"3.12 -m venv --clear {system.root / 'venv'}"


def test_without_any_python_the_systems_own_is_named(system: System) -> None:
    done = system.run()
    assert done.returncode == 1
    assert "sudo apt-get install python3 python3-venv python3-pip" in done.stderr
    (system.bin / "apt-get").unlink()
    assert "uv python install" in system.run().stderr


@pytest.mark.parametrize(
    ("name", "package"), [("python3", "python3-venv python3-pip"), ("python3.12", "python3.12-venv")]
)
def test_a_missing_venv_module_is_named_by_its_python(system: System, name: str, package: str) -> None:
    """Check the package's name: next to a system's Python 3.10, ``python3-venv`` would be for that one."""
    system.python("python3", "3.10")
    system.python(name, "3.12", lacks_venv=True)
    done = system.run()
    assert done.returncode == 1
    assert f"sudo apt-get install {package}\n" in done.stderr
    assert system.asked == ""


def test_root_gets_the_packages_installed(system: System) -> None:
    system.python("python3", "3.12", lacks_venv=True)
    system.tool("id", "#!/bin/sh\necho 0\n")
    system.run()
    assert "apt-get install -y -qq --no-install-recommends python3-venv python3-pip" in system.asked


def test_the_script_can_be_read() -> None:
    assert subprocess.run(["/bin/bash", "-n", str(SCRIPT)], check=False).returncode == 0
    assert os.access(SCRIPT, os.X_OK)
