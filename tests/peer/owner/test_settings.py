"""settings.toml: the file of a new home, rejected values and their messages, and edits while a peer runs."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from p2ptrain.base.errors import HomeError
from peer.owner.settings import (
    HIGHEST,
    MAX_BYTES,
    MAX_PROGRAMS,
    MAX_THREADS,
    MIN_MBIT,
    MIN_MEMORY_GB,
    WAITING,
    CompileMode,
    Settings,
    SettingsFile,
    compile_mode,
    parse,
    template,
)

JOIN = (Path(__file__).parents[3] / "docs" / "JOIN.md").read_text(encoding="utf-8")


OPTIONS = {name: " ".join(str(field.description).split()) for name, field in Settings.model_fields.items()}
"""Description of each option, and after "Allowed:" its values."""


def allowed(name: str) -> str:
    return OPTIONS[name].partition(" Allowed: ")[2].removesuffix(".")


def test_the_template_is_the_defaults_and_explains_every_option() -> None:
    assert parse(template()) == Settings()
    words = " ".join(line.removeprefix("# ") for line in template().splitlines())
    for name, meaning in OPTIONS.items():
        assert f"{meaning} {name} = " in words
        assert allowed(name)
        assert (name in WAITING) is ("from the next start" in meaning)
    assert max(map(len, template().splitlines())) <= 120


def test_the_bounds_in_the_descriptions_are_those_that_are_checked() -> None:
    caps = f"0 (no cap), or a number from {MIN_MBIT:g} to {HIGHEST:,}"
    assert allowed("upload_mbit") == allowed("download_mbit") == caps
    assert allowed("monthly_gb") == f"0 (no limit), or a number up to {HIGHEST:,}"
    assert allowed("threads") == f"a whole number from 0 to {MAX_THREADS:,}"
    assert allowed("pause_while").startswith(f"a list of at most {MAX_PROGRAMS} names")
    assert allowed("memory_gb") == f"0 (all), or a number from {MIN_MEMORY_GB} to {HIGHEST:,}"


def test_the_page_on_joining_has_every_option_and_what_it_may_be() -> None:
    for name in OPTIONS:
        assert any(
            line.startswith(f"| `{name}` |") and line.endswith(f"| {allowed(name)} |") for line in JOIN.splitlines()
        ), f"docs/JOIN.md lacks {name}: {allowed(name)}"


@pytest.mark.parametrize(
    ("setting", "variable", "mode"),
    [("auto", None, "auto"), ("off", "", "off"), ("off", "on", "on"), ("on", "off", "off")],
)
def test_the_environment_decides_before_the_settings(setting: CompileMode, variable: str | None, mode: str) -> None:
    assert compile_mode(setting, {} if variable is None else {"P2PTRAIN_COMPILE": variable}) == mode


def test_a_wrong_variable_is_an_error() -> None:
    with pytest.raises(HomeError) as caught:
        compile_mode("auto", {"P2PTRAIN_COMPILE": "yes"})
    assert str(caught.value) == (
        "The environment variable P2PTRAIN_COMPILE is 'yes'.\n  Use auto, on or off, or unset it."
    )


def test_what_is_left_out_is_the_default() -> None:
    assert parse("upload_mbit = 2\nmonthly_gb = 0.5") == Settings(upload_mbit=2.0, monthly_gb=0.5)
    assert parse("") == Settings()


def test_units() -> None:
    chosen = parse("upload_mbit = 8\nmonthly_gb = 3")
    assert (chosen.upload_rate, chosen.download_rate, chosen.monthly_bytes) == (1e6, math.inf, 3e9)
    assert Settings().monthly_bytes == math.inf


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("upload_mbit = 0.1", "upload_mbit: found 0.1: a cap is 0 (no cap) or at least 0.25"),
        ("upload_mbit = -1", "upload_mbit: input should be at least 0 and at most 1000000, found -1"),
        ("download_mbit = nan", "download_mbit: input should be a finite number, found nan"),
        ("download_mbit = true", "download_mbit: input should be a valid number, found True"),
        ('monthly_gb = "5 GB"', "monthly_gb: input should be a valid number, found '5 GB'"),
        ("monthly_gb = inf", "monthly_gb: input should be a finite number, found inf"),
        (
            'hours = "22-7"',
            """hours: found '22-7': hours are "" (always) or two different times of the day like "22:00-07:30\"""",
        ),
        ('hours = "24:00-07:30"', "hours: found"),
        ('hours = "07:30-07:30"', "hours: found"),
        ('compile = "yes"', "compile: input should be 'auto', 'on' or 'off', found 'yes'"),
        ("threads = 1.5", "threads: input should be a valid integer, found 1.5"),
        ("threads = false", "threads: input should be a valid integer, found False"),
        ("threads = -1", "threads: input should be at least 0 and at most 1024, found -1"),
        ('pause_while = "steam"', "pause_while: input should be a valid list, found 'steam' (allowed: a list of at"),
        ("pause_while = [5]", "pause_while[0]: input should be a valid string, found 5"),
        ('pause_while = ["a", ""]', "pause_while[1]: found '': a program is named by 1 to 64 printable characters"),
        ('pause_while = ["/usr/bin/steam"]', "without its folder"),
        ('pause_while = ["a\\u001b[2J"]', r"pause_while[0]: found 'a\x1b[2J': a program is"),
        (f'pause_while = ["{"x" * 65}"]', "a program is named by 1 to 64 printable characters"),
        (f"pause_while = {['x'] * 33}", "pause_while: list should have at most 32 items"),
        ("pause_on_battery = 1", "pause_on_battery: input should be a valid boolean, found 1 (allowed: true or false)"),
        ("memory_gb = 0.1", "memory_gb: found 0.1: it is 0 or at least 0.25 GB"),
        ('memory_gb = "4 GB"', "memory_gb: input should be a valid number, found '4 GB'"),
        ("memory_gb = inf", "memory_gb: input should be a finite number, found inf"),
        ("uplaod_mbit = 1", "uplaod_mbit: unknown field; did you mean upload_mbit?"),
        ("zzz = 1", "zzz: unknown field; there are upload_mbit, download_mbit,"),
        ("upload_mbit = ", "it is not valid TOML:"),
        (f"monthly_gb = {10**400}", "monthly_gb: input should be a valid number, found 1000"),
        (f"upload_mbit = -{10**400}", "upload_mbit: input should be a valid number, found -1000"),
        (f"threads = {'9' * 5000}", "it is not valid TOML: a number has thousands of digits"),
        (
            f"threads = 0x{'f' * 5000}",
            "threads: input should be at least 0 and at most 1024, found a value that is too",
        ),
        (f"threads = {'[' * 5000}{']' * 5000}", "it is not valid TOML: it is nested too deeply"),
        ("[upload_mbit]\nx = 1", "upload_mbit: input should be a valid number, found {'x': 1}"),
    ],
)
def test_a_fault_names_the_option_and_what_it_may_be(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_of_thousands_of_parts() -> None:
    """Check it with parsers that limit the parts of a key, as Python 3.14's, and with those that do not."""
    with pytest.raises(ValueError, match=r"nested too deeply|^threads: .* found a value that is too long"):
        parse(f"threads{'.a' * 5000} = 1")


VALUES = some.one_of(
    some.booleans(), some.integers(), some.floats(), some.text(max_size=40).map(repr), some.just("[1]"), some.text()
)


@given(some.sampled_from(list(OPTIONS)), VALUES)
def test_whatever_stands_there_counts_or_is_refused(name: str, value: object) -> None:
    try:
        chosen = parse(f"{name} = {value}")
    except ValueError:
        return
    assert chosen.upload_rate > 0
    assert chosen.monthly_bytes >= 0
    assert chosen.is_hour(0) in (True, False)


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ("", [0, 700, 1439], []),
        ("09:00-17:30", [540, 1049], [0, 539, 1050, 1439]),
        ("22:00-07:30", [1320, 1439, 0, 449], [450, 1319]),
        ("0:00-0:01", [0], [1, 1439]),
    ],
)
def test_hours(hours: str, inside: list[int], outside: list[int]) -> None:
    chosen = Settings(hours=hours)
    assert all(chosen.is_hour(minute) for minute in inside)
    assert not any(chosen.is_hour(minute) for minute in outside)


# --- the file ---------------------------------------------------------------------------------------------------------


def twice(file: SettingsFile) -> Settings | str | None:
    """Read the file twice: an edit takes effect if two reads agree."""
    first = file.changed()
    assert first is None
    return file.changed()


def test_a_new_home_gets_the_file_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    assert SettingsFile(tmp_path).load() == Settings()
    path = tmp_path / "settings.toml"
    assert path.read_text() == template()
    path.write_text("upload_mbit = 3")
    assert SettingsFile(tmp_path).load() == Settings(upload_mbit=3.0)
    assert path.read_text() == "upload_mbit = 3"


def test_a_fault_at_the_start_is_the_owners_to_mend(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("uplaod_mbit = 3")
    with pytest.raises(HomeError, match="did you mean upload_mbit"):
        SettingsFile(tmp_path).load()
    (tmp_path / "settings.toml").unlink()
    (tmp_path / "settings.toml").mkdir()
    with pytest.raises(HomeError, match="cannot be used"):
        SettingsFile(tmp_path).load()


def test_a_pipe_in_its_place_is_told_and_not_waited_for(tmp_path: Path) -> None:
    file = SettingsFile(tmp_path)
    file.load()
    file.path.unlink()
    os.mkfifo(file.path)
    assert file.changed() == "it is not a file"
    with pytest.raises(HomeError, match="cannot be used: it is not a file") as caught:
        SettingsFile(tmp_path).load()
    assert caught.value.remedy.startswith("Move it away")


def test_the_mark_that_some_editors_begin_with_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("upload_mbit = 3", encoding="utf-8-sig")
    assert SettingsFile(tmp_path).load() == Settings(upload_mbit=3.0)


@pytest.mark.parametrize("text", [f"monthly_gb = {10**400}", f"hours = {'[' * 5000}"], ids=["digits", "lists"])
def test_what_breaks_a_reader_is_a_fault_like_others(tmp_path: Path, text: str) -> None:
    file = SettingsFile(tmp_path)
    file.load()
    file.path.write_text(text)
    assert isinstance(twice(file), str)
    with pytest.raises(HomeError, match="is faulty"):
        SettingsFile(tmp_path).load()


def test_edits_are_seen_once(tmp_path: Path) -> None:
    file = SettingsFile(tmp_path)
    file.load()
    assert file.changed() is None
    file.path.write_text("upload_mbit = 3")
    assert twice(file) == Settings(upload_mbit=3.0)
    assert file.changed() is None
    file.path.write_text("upload_mbit = 'much'")
    assert str(twice(file)).startswith("upload_mbit: input should be a valid number")
    assert file.changed() is None
    file.path.write_text("upload_mbit = 4")
    assert twice(file) == Settings(upload_mbit=4.0)


def test_half_an_edit_is_not_read(tmp_path: Path) -> None:
    """Check an editor that empties the file and fills it a moment later: the caps must stay in force."""
    file = SettingsFile(tmp_path)
    file.path.write_text("upload_mbit = 3")
    assert file.load() == Settings(upload_mbit=3.0)
    file.path.write_text("")
    assert file.changed() is None
    file.path.write_text("upload_mbit = 4")
    os.utime(file.path, ns=(1, 1))  # on some kernels, two edits within one tick have equal timestamps
    assert twice(file) == Settings(upload_mbit=4.0)


def test_a_replaced_file_of_the_same_age_and_size_is_seen(tmp_path: Path) -> None:
    file = SettingsFile(tmp_path)
    file.path.write_text("upload_mbit = 3")
    file.load()
    stamp = file.path.stat().st_mtime_ns
    other = tmp_path / "other"
    other.write_text("upload_mbit = 4")
    os.utime(other, ns=(stamp, stamp))
    other.replace(file.path)
    assert twice(file) == Settings(upload_mbit=4.0)


def test_without_the_file_the_defaults_count(tmp_path: Path) -> None:
    file = SettingsFile(tmp_path)
    file.path.write_text("upload_mbit = 3")
    file.load()
    file.path.unlink()
    assert twice(file) == Settings()
    assert file.changed() is None


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    file = SettingsFile(tmp_path)
    file.load()
    file.path.write_bytes(b"#" * (MAX_BYTES + 1))
    assert twice(file) == f"it has more than {MAX_BYTES:,} bytes"


@pytest.mark.parametrize("what", ["open", "stat"])
def test_an_edit_that_could_not_be_read_is_read_once_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fails(path: Path, *arguments: object) -> object:
        raise OSError(errno.EMFILE, "Too many open files")

    file = SettingsFile(tmp_path)
    file.load()
    file.path.write_text("upload_mbit = 3")
    assert file.changed() is None
    with monkeypatch.context() as patch:
        patch.setattr(Path, what, fails)
        assert [file.changed(), file.changed()] == ["Too many open files"] * 2
    assert file.changed() == Settings(upload_mbit=3.0)
    assert file.changed() is None
