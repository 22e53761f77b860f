"""The background compiler: what it does without a compiler, with a child that dies or hangs, and in each mode."""

import hashlib
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from p2ptrain.base.telemetry import MemoryLog
from p2ptrain.train import compiling
from p2ptrain.train.compiled_pass import CompiledPassError
from p2ptrain.train.compiling import BackgroundCompiler, reason
from p2ptrain.train.libraries import TRY_LATER
from p2ptrain.train.pass_compiler import NICENESS

PATIENCE_S = 60.0
POLL_S = 0.01


def child(program: str) -> tuple[str, ...]:
    """Return a stand-in for the compiler: ``place`` is the library's path."""
    return sys.executable, "-S", "-c", f"import os, sys, time; place = sys.argv[1]; {program}"


DIGEST = hashlib.sha256(b"library").hexdigest()
WRITES = child(
    f"sys.stdin.read(); open(place, 'w').write('library'); open(place[:-3] + '.digest', 'w').write({DIGEST!r})"
)
HANGS = child("open(place + '.pid', 'w').write(str(os.getpid())); time.sleep(600)")


class Offers:
    """Stands for a task's ``offer``, which only real libraries pass."""

    def __init__(self) -> None:
        self.made = []
        self.came = threading.Event()

    def __call__(self, library, shape, decided, failed) -> None:
        self.made.append((library, decided, failed))
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


def test_a_library_is_made_offered_and_found_again(tiny_run, tmp_path):
    bench = Bench(tiny_run(), tmp_path)
    with bench.compiler as compiler:
        assert bench.offers.came.wait(PATIENCE_S)
        assert compiler.state == "comparing"
        library, decided, _ = bench.offers.made[0]
        assert library.read_text() == "library"
        decided("compiled code", 1.25)
        assert (compiler.state, compiler.is_final) == ("compiled code", True)
    assert bench.log.kinds() == ["compiling", "compiled pass", "compiled"]
    assert bench.log.notes[-1][1] == {"way": "compiled code", "ratio": 1.25}
    again = Bench(tiny_run(), tmp_path, command=child("sys.exit('it was made already')"), mode="auto")
    with again.compiler:
        assert again.offers.came.wait(PATIENCE_S)
        assert again.offers.made[0][0] == library
        again.offers.made[0][1]("compiled code", None)
    assert again.log.kinds() == ["not compiled"]
    assert again.compiler.state == f"off ({again.why})" == "off (it is not 3 % faster here)"


def test_a_library_that_cannot_be_loaded_is_compiled_again_at_the_next_start(tiny_run, tmp_path):
    tiny = tiny_run()
    bench = Bench(tiny, tmp_path)
    bench.task.offer = tiny.task().offer
    with bench.compiler as compiler:
        until(lambda: compiler.is_final)
    assert bench.log.kinds() == ["compiling", "compiled pass", "not compiled"]
    again = Bench(tiny, tmp_path)
    with again.compiler:
        assert again.offers.came.wait(PATIENCE_S)
    assert again.log.kinds() == ["compiling", "compiled pass"]


@pytest.mark.parametrize(
    ("program", "why", "repeats"),
    [
        ("sys.exit('a\\nCppCompileError: no such option')", "CppCompileError: no such option", True),
        ("sys.exit(3)", "the compiler ended with status 3", True),
        (f"sys.stderr.write('no memory'); sys.exit({TRY_LATER})", "no memory", False),
        ("os.kill(os.getpid(), 9)", "signal SIGKILL ended the compiler; the memory may be too small", False),
        ("pass", "the compiler ended with status 0", False),
        ("sys.stderr.write('x' * 10**6 + '\\n' + 'y' * 1000); sys.exit(1)", "y" * 199 + "…", True),
    ],
)
def test_a_child_that_fails_is_one_note_and_runs_again_only_if_that_may_help(tiny_run, tmp_path, program, why, repeats):
    bench = Bench(tiny_run(), tmp_path, child(program))
    with bench.compiler as compiler:
        until(lambda: compiler.is_final)
    assert bench.log.kinds() == ["compiling", "not compiled"]
    if repeats:
        (failed,) = bench.path.glob("*/*.failed")
        why = f"{why}; to try again, delete {failed}"
    assert bench.why == why
    assert compiler.state == f"off ({why})"
    assert bench.task.passes is None
    again = Bench(tiny_run(), tmp_path)
    with again.compiler as compiler:
        until(lambda: compiler.is_final or again.offers.made)
    assert again.log.kinds() == (["not compiled"] if repeats else ["compiling", "compiled pass"])
    assert not repeats or again.why == why


def test_a_child_that_hangs_is_killed_with_what_it_started(tiny_run, tmp_path):
    program = "import subprocess; grand = subprocess.Popen(['sleep', '600']); "
    program += "os.mkdir(place.removesuffix('.so') + '-work'); "
    program += "open(place + '.pid', 'w').write(str(grand.pid)); time.sleep(600)"
    now = [0.0]
    bench = Bench(tiny_run(), tmp_path, child(program), clock=lambda: now[0], deadline_s=100.0)
    with bench.compiler as compiler:
        grandchild = psutil.Process(bench.pid())
        now[0] = 101.0
        until(lambda: compiler.is_final)
    assert bench.why == "the compiler did not end within 100 s"
    assert not list(bench.path.glob("*/*-work"))
    until(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)


def test_a_peer_that_ends_takes_the_child_with_it(tiny_run, tmp_path):
    bench = Bench(tiny_run(), tmp_path, HANGS)
    with bench.compiler:
        pid = bench.pid()
    assert not psutil.pid_exists(pid)
    assert bench.log.kinds() == ["compiling"]


def test_a_pause_suspends_the_child_and_does_not_count(tiny_run, tmp_path):
    now, trains = [0.0], [True]
    bench = Bench(tiny_run(), tmp_path, HANGS, clock=lambda: now[0], deadline_s=100.0, is_training=lambda: trains[0])
    with bench.compiler as compiler:
        process = psutil.Process(bench.pid())
        trains[0] = False
        until(lambda: process.status() == psutil.STATUS_STOPPED)
        now[0] = 1000.0
        trains[0] = True
        until(lambda: process.status() == psutil.STATUS_SLEEPING)
        assert compiler.state == "compiling"
        trains[0] = False
        until(lambda: process.status() == psutil.STATUS_STOPPED)
    assert not process.is_running()  # also while suspended


def test_without_a_compiler_there_is_one_note(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    bench = Bench(tiny_run(), tmp_path)
    with bench.compiler as compiler:
        until(lambda: compiler.is_final)
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


def test_off_starts_nothing(tiny_run, tmp_path):
    bench = Bench(tiny_run(), tmp_path, mode="off")
    with bench.compiler as compiler:
        assert compiler.state == "off (compile is off)"
        assert compiler.is_final
    assert not bench.path.exists()
    assert bench.log.kinds() == []


def test_a_run_that_ends_ends_the_child(tiny_run, tmp_path):
    over = threading.Event()
    bench = Bench(tiny_run(), tmp_path, HANGS, is_over=over.is_set)
    with bench.compiler:
        pid = bench.pid()
        over.set()
        until(lambda: not psutil.pid_exists(pid))
        assert bench.log.kinds() == ["compiling"]


class GraphOffers(Offers):
    """Stands for a card's ``offer_graph``."""

    def __call__(self, decided, failed) -> None:
        super().__call__("graph", None, decided, failed)


@pytest.mark.parametrize(
    ("ratio", "kinds", "state"),
    [
        (1.5, ["compiled"], "a CUDA graph (no Triton)"),
        (None, ["not compiled"], "off (no Triton)"),
    ],
)
def test_a_card_without_a_library_compares_a_graph_and_there_is_one_note(tiny_run, tmp_path, ratio, kinds, state):
    bench = Bench(tiny_run(), tmp_path, obstacle=lambda: "no Triton")
    bench.task.offer_graph = GraphOffers()
    with bench.compiler as compiler:
        assert bench.task.offer_graph.came.wait(PATIENCE_S)
        assert (compiler.state, bench.log.kinds()) == ("comparing", [])
        bench.task.offer_graph.made[0][1]("a CUDA graph", ratio)
    assert (bench.log.kinds(), compiler.state) == (kinds, state)


def test_a_graph_that_fails_leaves_both_reasons(tiny_run, tmp_path):
    bench = Bench(tiny_run(), tmp_path, obstacle=lambda: "no Triton")
    bench.task.offer_graph = GraphOffers()
    with bench.compiler:
        assert bench.task.offer_graph.came.wait(PATIENCE_S)
        bench.task.offer_graph.made[0][2]("stream is capturing")
    assert bench.log.kinds() == ["not compiled"]
    assert bench.why == "no Triton; the CUDA graph failed: stream is capturing"


def test_a_card_that_triton_does_not_support_starts_no_child(tiny_run, tmp_path, monkeypatch):
    bench = Bench(tiny_run(), tmp_path, child("sys.exit('started')"))
    monkeypatch.setattr(type(bench.task), "theta", SimpleNamespace(device=torch.device("cuda:0")))
    monkeypatch.setattr(compiling.accelerator, "triton_fault", lambda device: f"Triton does not support {device}")
    bench.task.offer_graph = refuse
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


def test_only_one_of_two_peers_compiles(tiny_run, tmp_path):
    waits = child("open(place + '.pid', 'w').write(str(os.getpid()))\nwhile not os.path.exists(place): time.sleep(.01)")
    first = Bench(tiny_run(), tmp_path, waits)
    second = Bench(tiny_run(), tmp_path, child("sys.exit('the second one compiled')"))
    with first.compiler:
        first.pid()
        with second.compiler:
            until(lambda: second.compiler.state == "compiling")
            library = next(first.path.glob("*/*.lock")).with_suffix(".so")
            library.with_suffix(".digest").write_text(DIGEST)
            library.write_text("library")
            assert first.offers.came.wait(PATIENCE_S)
            assert second.offers.came.wait(PATIENCE_S)
    assert second.log.kinds() == []
    assert first.log.kinds() == ["compiling", "compiled pass"]


def test_a_peer_with_little_left_takes_what_another_process_compiles(tiny_run, tmp_path):
    waits = child("open(place + '.pid', 'w').write(str(os.getpid()))\nwhile not os.path.exists(place): time.sleep(.01)")
    first = Bench(tiny_run(), tmp_path, waits)
    never = child("sys.exit('the second one compiled')")
    second = Bench(tiny_run(), tmp_path, never, mode="auto", remaining_s=lambda: 1.0)
    with first.compiler:
        first.pid()
        with second.compiler:
            until(lambda: second.compiler.state == "compiling")
            library = next(first.path.glob("*/*.lock")).with_suffix(".so")
            library.with_suffix(".digest").write_text(DIGEST)
            library.write_text("library")
            assert second.offers.came.wait(PATIENCE_S)
    assert second.log.kinds() == []


def test_half_a_library_is_made_again(tiny_run, tmp_path):
    first = Bench(tiny_run(), tmp_path)
    with first.compiler:
        assert first.offers.came.wait(PATIENCE_S)
    (library,) = first.path.glob("*/*.so")
    library.write_text("lib")
    second = Bench(tiny_run(), tmp_path)
    with second.compiler:
        assert second.offers.came.wait(PATIENCE_S)
    assert second.log.kinds() == ["compiling", "compiled pass"]
    assert library.read_text() == "library"


def test_reasons_name_the_signal_or_the_last_line():
    assert reason(-signal.SIGKILL, b"x") == "signal SIGKILL ended the compiler; the memory may be too small"
    assert reason(1, b"warning\nError: it broke\n\n") == "it broke"
    assert reason(2, b"") == "the compiler ended with status 2"


# --- with a compiler --------------------------------------------------------------------------------------------------


@pytest.mark.lab
def test_a_task_trains_alike_while_its_pass_is_compiled_compared_and_used(tiny_run, tmp_path):
    tiny = tiny_run()
    task, log = tiny.task(), MemoryLog()
    tokens = tiny.manifest.training.tokens_per_step
    with BackgroundCompiler(task, tiny.manifest.model, "on", tmp_path / "compiled", log) as compiler:
        until(lambda: task.inner_step(0.0) and compiler.is_final, 600.0)
        for _ in range(20):
            task.inner_step(task.step * tokens)
    assert log.kinds()[:2] == ["compiling", "compiled pass"], log.notes
    assert log.kinds()[2:] in (["compiled"], ["not compiled"])
    assert compiler.state in ("compiled code", "off (it is not 3 % faster here)")
    (folder,) = (tmp_path / "compiled").iterdir()
    assert {each.suffix for each in folder.iterdir()} == {".so", ".digest", ".lock"}
    eager, steps = tiny.task(), task.step - 20
    for step in range(task.step):
        eager.inner_step(0.0 if step < steps else step * tokens)
    assert torch.allclose(task.theta, eager.theta, atol=1e-4)


@pytest.mark.lab
def test_a_suspended_compiler_ends_with_its_parent(tmp_path):
    program = "import subprocess, sys, time; from p2ptrain.base.launcher import launched; "
    program += "child = subprocess.Popen(launched(sys.executable, '-P', '-m', 'p2ptrain.train.pass_compiler', "
    program += f"{str(tmp_path / 'a.so')!r}), stdin=subprocess.PIPE); print(child.pid, flush=True); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True)
    compiler = psutil.Process(int(parent.stdout.readline()))
    until(lambda: compiler.nice() == NICENESS)  # it has given way, and waits for its request
    compiler.suspend()
    until(lambda: compiler.status() == psutil.STATUS_STOPPED)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not compiler.is_running() or compiler.status() == psutil.STATUS_ZOMBIE)
