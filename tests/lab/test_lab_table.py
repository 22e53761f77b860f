"""Table of the lab's reports in docs/results."""

import json

from bench.lab import LabRun, lines


def report(scenario, *, passed=True, **limits):
    return {
        "scenario": scenario,
        "passed": passed,
        "machine": "an abacus",
        "date": "noon",
        "limits": limits,
    }


def limit(found, kept=True, **bounds):
    return {"found": found, "kept": kept, **bounds}


def test_each_limit_is_a_row_with_what_each_run_found():
    first = LabRun("aaa", [report("kill", stayed=limit(3.0, at_least=3.0), stall=limit(0.31234, at_most=1.0))])
    second = LabRun("bbb", [report("kill", stayed=limit(4.0, at_least=3.0), stall=limit(0.5, at_most=1.0))])

    assert lines([first, second]) == [
        "- run 1: 1 of 1 scenarios passed; an abacus; noon to noon; commit aaa",
        "- run 2: 1 of 1 scenarios passed; an abacus; noon to noon; commit bbb",
        "",
        "| scenario | figure | asked for | run 1 | run 2 |",
        "|---|---|---|---|---|",
        "| kill | passed |  | yes | yes |",
        "|  | stayed | >= 3 | 3 | 4 |",
        "|  | stall | <= 1 | 0.3123 | 0.5 |",
    ]


def test_missed_limits_stand_out_and_missing_figures_are_marked():
    shown = lines(
        [
            LabRun(
                "aaa",
                [report("late", passed=False, donors=limit(1.0, kept=False, at_least=2.0), loss=limit(None, False))],
            )
        ]
    )
    assert shown[0].startswith("- run 1: 0 of 1 scenarios passed")
    assert "| late | passed |  | NO |" in shown
    assert "|  | donors | >= 2 | **1, MISSED** |" in shown
    assert "|  | loss |  | **none, MISSED** |" in shown


def test_both_bounds_are_shown_and_equal_bounds_once():
    shown = lines([LabRun("aaa", [report("x", a=limit(2, at_least=1, at_most=3), b=limit(1, at_least=1, at_most=1))])])
    assert "|  | a | >= 1, <= 3 | 2 |" in shown
    assert "|  | b | 1 | 1 |" in shown


def test_default_limits_are_shown_only_when_missed():
    kept, left = limit(0.0, at_most=0.0), limit(2.0, kept=False, at_most=0.0)
    shown = lines([LabRun("aaa", [report("x", passed=False, left_sockets=kept, left_processes=left)])])
    assert "|  | left_processes | <= 0 | **2, MISSED** |" in shown
    assert not any("left_sockets" in line for line in shown)


def test_a_scenario_that_one_run_lacks_leaves_its_cell_empty():
    shown = lines(
        [LabRun("aaa", [report("x", a=limit(1, at_most=3))]), LabRun("bbb", [report("y", b=limit(2, at_most=3))])]
    )
    assert shown[-4:] == [
        "| x | passed |  | yes |  |",
        "|  | a | <= 3 | 1 |  |",
        "| y | passed |  |  | yes |",
        "|  | b | <= 3 |  | 2 |",
    ]


def test_a_report_has_machine_and_date(tmp_path):
    from lab.command import _dated
    from lab.report import not_run

    kept = json.loads(json.dumps(_dated(not_run("kill", "local", "no such file"))))
    assert kept["machine"]
    assert kept["date"].endswith("+00:00")
    assert kept["faults"] == ["no such file"]
