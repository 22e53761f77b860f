"""The background compiler: what it does without a compiler, with a child that dies or hangs, and in each mode."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.manifest import preset
from p2ptrain.train import compiling
from p2ptrain.train.compiled_pass import CompiledPassError, PassShape
from p2ptrain.train.compiling import BackgroundCompiler, forget, is_whole, private_folder, reason

PATIENCE_S = 60.0
POLL_S = 0.01


def child(program: str) -> tuple[str, ...]:
    """Return a stand-in for the compiler: ``cache`` is its folder."""
    return sys.executable, "-S", "-c", f"import os, sys, time; cache = sys.argv[1]; {program}"


WRITES = child("sys.stdin.readline(); os.mkdir(cache); open(cache + '/kernel', 'w').write('compiled')")
HANGS = child("open(cache + '.pid', 'w').write(str(os.getpid())); time.sleep(600)")


@pytest.fixture(autouse=True)
def _cache(monkeypatch):
    """Restore the variable by which torch finds its caches."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nonexistent")


class Offers:
    """Stands for a task's ``offer``, which compiles."""

    def __init__(self) -> None:
        self.made, self.in_graphs = [], []
        self.came = threading.Event()

    def __call__(self, shape, in_graphs, failed) -> None:
        self.made.append((Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]), failed))
        self.in_graphs.append(in_graphs)
        self.came.set()


class Bench:
    """A background compiler of a tiny task, with a stand-in for the child."""

    def __init__(self, tiny, path, command=WRITES, mode="on", **options) -> None:
        self.log, self.path, self.offers = MemoryLog(), path / "compiled", Offers()
        self.task = tiny.task()
        self.task.offer = self.offers
        self.compiler = BackgroundCompiler(
            self.task,
            tiny.manifest.model,
            mode,
            self.path,
            self.log,
            **{"command": command, "poll_s": POLL_S, **options},
        )

    @property
    def why(self) -> str:
        return next(fields["why"] for kind, fields in self.log.notes if kind == "not compiled")

    def pid(self) -> int:
        """Return the id of a child that hangs, once it runs."""
        return int(until(lambda: "".join(each.read_text() for each in self.path.glob("*/*.pid"))))


def until(look, patience_s=PATIENCE_S):
    deadline = time.monotonic() + patience_s
    while not (seen := look()):
        assert time.monotonic() < deadline
        time.sleep(POLL_S)
    return seen


def test_a_pass_is_compiled_offered_and_found_again(tiny_run, tmp_path):
    bench = Bench(tiny_run(), tmp_path)
    with bench.compiler as compiler:
        assert bench.offers.came.wait(PATIENCE_S)
        cache, _ = bench.offers.made[0]
        assert (cache / "kernel").read_text() == "compiled"
    assert (compiler.state, compiler.is_final) == ("compiled code", True)
    assert bench.log.kinds() == ["compiling", "compiled"]
    never = child("sys.exit('it was made already')")
    again = Bench(tiny_run(), tmp_path, never, mode="auto", remaining_s=lambda: compiling.WARM_WORTH_S)
    with again.compiler:
        assert again.offers.came.wait(PATIENCE_S)
        assert again.offers.made[0][0] == cache
    assert again.log.kinds() == ["compiled"]


@pytest.mark.parametrize("has_room", [True, False])
def test_the_child_learns_whether_there_is_room_for_a_graph_and_says_whether_it_is_used(tiny_run, tmp_path, has_room):
    program = "import json; may = json.loads(sys.stdin.readline())['in_graphs']; os.mkdir(cache); "
    bench = Bench(tiny_run(), tmp_path, child(program + "may and open(cache + '/in_graphs', 'w')"))
    bench.task.has_room_for_graph = lambda: has_room
    with bench.compiler:
        assert bench.offers.came.wait(PATIENCE_S)
    assert bench.offers.in_graphs == [has_room]


def test_a_pass_that_fails_in_use_is_one_note(tiny_run, tmp_path):
    bench = Bench(tiny_run(), tmp_path)
    with bench.compiler as compiler:
        assert bench.offers.came.wait(PATIENCE_S)
        bench.offers.made[0][1]("RuntimeError: no such token")
    assert bench.why == "the compiled code failed: RuntimeError: no such token"
    assert compiler.state == f"off ({bench.why})"


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("sys.exit('a\\nCppCompileError: no such option')", "CppCompileError: no such option"),
        ("sys.exit(3)", "the compiler ended with status 3"),
        ("os.kill(os.getpid(), 9)", "signal SIGKILL ended the compiler; the memory may be too small"),
        ("sys.stderr.write('x' * 10**6 + '\\n' + 'y' * 1000); sys.exit(1)", "y" * 199 + "…"),
    ],
)
def test_a_child_that_fails_is_one_note(tiny_run, tmp_path, program, why):
    bench = Bench(tiny_run(), tmp_path, child(program))
    with bench.compiler as compiler:
        until(lambda: compiler.is_final)
    assert bench.log.kinds() == ["compiling", "not compiled"]
    assert bench.why == why
    assert compiler.state == f"off ({why})"
    assert bench.task.compiled is None


def test_a_child_that_hangs_is_killed_with_what_it_started(tiny_run, tmp_path):
    program = "import subprocess; grand = subprocess.Popen(['sleep', '600']); "
    program += "open(cache + '.pid', 'w').write(str(grand.pid)); time.sleep(600)"
    now = [0.0]
    bench = Bench(tiny_run(), tmp_path, child(program), clock=lambda: now[0], deadline_s=100.0)
    with bench.compiler as compiler:
        grandchild = psutil.Process(bench.pid())
        now[0] = 101.0
        until(lambda: compiler.is_final)
    assert bench.why == "the compiler did not end within 100 s"
    until(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)


def test_a_peer_that_ends_takes_the_child_with_it(tiny_run, tmp_path):
    bench = Bench(tiny_run(), tmp_path, HANGS)
    with bench.compiler:
        pid = bench.pid()
    assert not psutil.pid_exists(pid)
    assert bench.log.kinds() == ["compiling"]


def test_a_pause_ends_the_child_and_another_one_begins_after_it(tiny_run, tmp_path):
    trains = [True]
    program = "os.path.exists(cache + '.pid') and (os.mkdir(cache), sys.exit()); os.mkdir(cache); "
    program += "open(cache + '/half', 'w'); open(cache + '.pid', 'w').write(str(os.getpid())); time.sleep(600)"
    bench = Bench(tiny_run(), tmp_path, child(program), is_training=lambda: trains[0])
    with bench.compiler as compiler:
        pid = bench.pid()
        trains[0] = False
        until(lambda: compiler.state == "not compiled yet")
        assert not psutil.pid_exists(pid)
        trains[0] = True
        assert bench.offers.came.wait(PATIENCE_S)
    assert not (bench.offers.made[0][0] / "half").exists()
    assert bench.log.kinds() == ["compiling", "compiling", "compiled"]


def test_without_a_compiler_there_is_one_note(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    bench = Bench(tiny_run(), tmp_path)
    with bench.compiler as compiler:
        until(lambda: compiler.is_final)
    assert bench.log.kinds() == ["not compiled"]
    assert bench.why.startswith("there is no C++ compiler")


def test_an_obstacle_is_the_reason(tiny_run, tmp_path):
    bench = Bench(tiny_run(), tmp_path, obstacle=lambda: "too little memory")
    with bench.compiler as compiler:
        until(lambda: compiler.is_final)
    assert bench.why == "too little memory"


def test_auto_waits_for_the_speed_and_compiles_only_if_it_is_worth_it(tiny_run, tmp_path):
    left = iter([None, None, compiling.WORTH_S - 1])
    short = Bench(tiny_run(), tmp_path, mode="auto", remaining_s=lambda: next(left))
    with short.compiler as compiler:
        until(lambda: compiler.is_final)
    assert compiler.state == "off (too little is left to train)"
    assert short.log.kinds() == []
    long = Bench(tiny_run(), tmp_path, mode="auto", remaining_s=lambda: compiling.WORTH_S)
    with long.compiler:
        assert long.offers.came.wait(PATIENCE_S)
    end = Bench(tiny_run(), tmp_path, mode="auto", remaining_s=lambda: compiling.WARM_WORTH_S - 1)
    with end.compiler as compiler:
        until(lambda: compiler.is_final)
    assert (compiler.state, end.offers.made) == ("off (too little is left to train)", [])


def test_off_starts_nothing(tiny_run, tmp_path):
    bench = Bench(tiny_run(), tmp_path, mode="off")
    with bench.compiler as compiler:
        assert compiler.state == "off (compile is off)"
        assert compiler.is_final
    assert not bench.path.exists()
    assert bench.log.kinds() == []


def test_a_card_that_triton_does_not_support_starts_no_child(tiny_run, tmp_path, monkeypatch):
    bench = Bench(tiny_run(), tmp_path, child("sys.exit('started')"))
    monkeypatch.setattr(type(bench.task), "theta", SimpleNamespace(device=torch.device("cuda:0")))
    monkeypatch.setattr(compiling.accelerator, "triton_fault", lambda device: f"Triton does not support {device}")
    with bench.compiler as compiler:
        until(lambda: compiler.is_final)
    assert (bench.log.kinds(), bench.why) == (["not compiled"], "Triton does not support cuda:0")


def refuse(*_):
    raise CompiledPassError("only passes on the CPU are compiled")


def test_what_cannot_be_compiled_is_noted_where_the_owner_asked_for_it(tiny_run, tmp_path):
    for mode, kinds in (("auto", []), ("on", ["not compiled"])):
        log, tiny = MemoryLog(), tiny_run()
        task = tiny.task()
        task.pass_shape = refuse
        compiler = BackgroundCompiler(task, tiny.manifest.model, mode, tmp_path, log)
        assert compiler.state == "off (only passes on the CPU are compiled)"
        assert log.kinds() == kinds


def test_one_of_two_peers_compiles_and_both_use_it(tiny_run, tmp_path):
    waits = child("open(cache + '.pid', 'w').write(str(os.getpid()))\nwhile not os.path.exists(cache): time.sleep(.01)")
    first = Bench(tiny_run(), tmp_path, waits)
    never = child("sys.exit('the second one compiled')")
    second = Bench(tiny_run(), tmp_path, never)
    with first.compiler:
        first.pid()
        with second.compiler:
            until(lambda: second.compiler.state == "compiling")
            next(first.path.glob("*/*.lock")).with_suffix("").mkdir()
            assert first.offers.came.wait(PATIENCE_S)
            assert second.offers.came.wait(PATIENCE_S)
    assert second.log.kinds() == ["compiled"]
    assert first.log.kinds() == ["compiling", "compiled"]


def test_what_others_could_write_is_not_run(tiny_run, tmp_path):
    folder = private_folder(tmp_path / "compiled", f"torch-{torch.__version__}")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    bench = Bench(tiny_run(), tmp_path)
    with bench.compiler as compiler:
        until(lambda: compiler.is_final)
    assert bench.why == f"other users can write to {folder}; delete it, or make it yours alone"


def made(folder: Path, name: str, used_at: float) -> Path:
    """Return what a child left there, used at this time."""
    cache = folder / name
    cache.mkdir()
    (cache / "kernel").touch()
    cache.with_suffix(".whole").touch()
    for each in (cache, cache.with_suffix(".whole")):
        os.utime(each, (used_at, used_at))
    return cache


def test_what_was_not_used_for_long_is_deleted(tmp_path):
    folder, now = private_folder(tmp_path, "torch-1"), time.time()
    caches = [made(folder, f"pass-{days}", now - 86_400 * days) for days in (31, 29)]
    private_folder(tmp_path, "torch-1")
    assert [is_whole(each) for each in caches] == [False, True]
    os.utime(folder, (0, 0))
    private_folder(tmp_path, "torch-2")
    assert [each.name for each in tmp_path.iterdir()] == ["torch-2"]


def test_half_a_cache_is_not_used(tmp_path):
    cache = made(tmp_path, "pass", time.time())
    cache.with_suffix(".whole").unlink()
    assert not is_whole(cache)
    forget(cache)
    assert list(tmp_path.iterdir()) == []


def test_reasons_name_the_signal_or_the_last_line():
    assert reason(-signal.SIGKILL, b"x") == "signal SIGKILL ended the compiler; the memory may be too small"
    assert reason(1, b"warning\nit broke\n\n") == "it broke"
    assert reason(2, b"") == "the compiler ended with status 2"


# --- with a compiler --------------------------------------------------------------------------------------------------


@pytest.mark.lab
def test_a_task_trains_alike_while_its_pass_is_compiled_compared_and_used(tiny_run, tmp_path, monkeypatch):
    """Also check that the task compiles from the cache: the C++ compiler fails as soon as the child has ended."""
    broken = tmp_path / "broken"
    program = tmp_path / "c++"
    program.write_text(f'#!/bin/sh\n[ -e {broken} ] && case "$*" in *-o*) exit 1;; esac\nexec g++ "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    tiny = tiny_run()
    task, log = tiny.task(), MemoryLog()
    tokens = tiny.manifest.training.tokens_per_step
    offer = task.offer
    task.offer = lambda *given: (broken.touch(), offer(*given))
    with BackgroundCompiler(task, tiny.manifest.model, "on", tmp_path / "compiled", log) as compiler:
        until(lambda: task.inner_step(0.0) and compiler.is_final, 600.0)
        for _ in range(20):
            task.inner_step(task.step * tokens)
    assert log.kinds() == ["compiling", "compiled"], log.notes
    assert compiler.state == "compiled code"
    (folder,) = (tmp_path / "compiled").iterdir()
    assert sorted(each.suffix for each in folder.iterdir()) == ["", ".lock", ".whole"]
    eager, steps = tiny.task(), task.step - 20
    for step in range(task.step):
        eager.inner_step(0.0 if step < steps else step * tokens)
    assert torch.allclose(task.theta, eager.theta, atol=1e-4)


@pytest.mark.lab
def test_a_compiler_ends_with_its_parent_and_all_that_it_started(tmp_path):
    """Hold the C++ compiler and kill the parent."""
    held = tmp_path / "c++"
    held.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    held.chmod(0o755)
    program = "import subprocess, sys, time; from p2ptrain.base.launcher import launched; "
    program += (
        f"command = launched(sys.executable, '-P', '-m', 'p2ptrain.train.pass_compiler', {str(tmp_path)!r}, '0'); "
    )
    program += "child = subprocess.Popen(command, stdin=subprocess.PIPE); child.stdin.write(sys.argv[1].encode()); "
    program += "child.stdin.flush(); print(child.pid, flush=True); time.sleep(600)"
    shape = asdict(PassShape.of(preset("demo", "ab" * 32).model, 1, 8, 8))
    asked = json.dumps({**shape, "in_graphs": False}) + "\n"
    environment = {**os.environ, "CXX": str(held)}
    command = [sys.executable, "-P", "-c", program, asked]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        try:
            compiler = psutil.Process(int(parent.stdout.readline()))
            text = until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 280.0)
            cxx = psutil.Process(int(text))
        finally:
            parent.kill()
    for each in (compiler, cxx):
        until(lambda each=each: not each.is_running() or each.status() == psutil.STATUS_ZOMBIE)
