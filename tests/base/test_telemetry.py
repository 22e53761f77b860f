"""The event log and the process's output on full disks and on pipes without a reader."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from p2ptrain.base.errors import OutputError
from p2ptrain.base.telemetry import EventLog, LossyStream, StrictStream, lossy_output, strict_output


class Broken(io.StringIO):
    """Stream on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_what_cannot_be_written_is_lost_and_nothing_else() -> None:
    stream = LossyStream(Broken())
    assert stream.write("words") == 5
    stream.flush()
    assert stream.isatty() is False
    whole = io.StringIO()
    LossyStream(whole).write("words")
    assert whole.getvalue() == "words"


def test_only_the_outside_is_endured() -> None:
    with pytest.raises(TypeError):
        LossyStream(io.StringIO()).write(b"bytes")  # type: ignore[arg-type]  # on purpose


def test_streams_are_as_before_afterwards() -> None:
    before = sys.stdout, sys.stderr
    with lossy_output():
        assert isinstance(sys.stdout, LossyStream)
    assert (sys.stdout, sys.stderr) == before


def test_what_is_minded_is_an_error_and_may_be_endured() -> None:
    stream = StrictStream(Broken())
    for attempt in (lambda: stream.write("words"), stream.flush):
        with pytest.raises(OutputError, match=r"The output cannot be written: No space left on device\."):
            attempt()
    assert stream.isatty() is False
    LossyStream(stream).write("words")  # type: ignore[arg-type]  # it is one in all that counts
    LossyStream(stream).flush()  # type: ignore[arg-type]
    whole = io.StringIO()
    assert StrictStream(whole).write("words") == 5
    assert whole.getvalue() == "words"


def test_the_stream_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.stdout
    with strict_output():
        assert isinstance(sys.stdout, StrictStream)
        with lossy_output():
            sys.stdout.write("words")
    assert sys.stdout is before
    monkeypatch.setattr(sys, "stdout", None)
    with strict_output():
        assert sys.stdout is None


LIVING_ON = """
import sys
from p2ptrain.base.telemetry import lossy_output, strict_output
with strict_output(), lossy_output():
    for number in range(1000):
        print("a line that nobody takes" * 10, flush=number % 2 == 0)
sys.exit(7)
"""


def test_a_process_outlives_a_full_disk_and_a_closed_pipe() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", LIVING_ON], stdout=full, stderr=full, check=False)
    assert done.returncode == 7
    with subprocess.Popen([sys.executable, "-c", LIVING_ON], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait() == 7


FULL_FOR_A_WHILE = """
import resource, sys
from pathlib import Path
from p2ptrain.base.telemetry import EventLog
path = Path(sys.argv[1])
log = EventLog(path, wall=lambda: 12.0)
log.note("first")
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 15, hard))
log.note("torn")
log.note("left out")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.note("second")
log.note("third")
log.close()
"""


def test_after_a_full_disk_the_log_goes_on_in_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    subprocess.run([sys.executable, "-c", FULL_FOR_A_WHILE, str(path)], check=True)
    lines = path.read_text().splitlines()
    assert [json.loads(line)["kind"] for line in (lines[0], *lines[2:])] == ["first", "second", "third"]
    assert len(lines[1]) == 15


def test_a_line_that_an_earlier_process_left_torn_takes_none_with_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for torn in ("", '{"time": 1', '{"ti'):
        with path.open("a") as file:
            file.write(torn)
        log = EventLog(path, wall=lambda: 12.0)
        log.note("saved")
        log.close()
    whole = '{"time": 12.0, "kind": "saved"}'
    assert path.read_text().splitlines() == [whole, '{"time": 1', whole, '{"ti', whole]


def test_a_log_on_a_full_disk_still_tells_its_listeners(tmp_path: Path) -> None:
    log = EventLog(Path("/dev/full"))
    heard: list[str] = []
    log.listen(lambda kind, fields: heard.append(kind))
    log.note("saved", path="here")
    assert heard == ["saved"]
    log.close()
    whole = EventLog(tmp_path / "events.jsonl", wall=lambda: 12.0)
    whole.note("saved", path="here")
    whole.close()
    assert json.loads((tmp_path / "events.jsonl").read_text()) == {"time": 12.0, "kind": "saved", "path": "here"}
