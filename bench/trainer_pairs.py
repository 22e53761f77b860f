"""Pairs of short testnets of two checkouts in turn: PRESET SECONDS PAIRS NAME=FOLDER NAME=FOLDER."""

import json, os, subprocess, sys, time, statistics, psutil

preset, seconds, pairs = sys.argv[1], sys.argv[2], int(sys.argv[3])
arms = dict(each.split("=", 1) for each in sys.argv[4:])


def pss(pid):
    total = 0
    try:
        procs = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return 0
    for p in procs:
        try:
            if "p2pd" in p.name():
                continue
            for l in open(f"/proc/{p.pid}/smaps_rollup"):
                if l.startswith("Pss:"):
                    total += int(l.split()[1])
        except (OSError, psutil.Error):
            pass
    return total / 1024


out = {}
for n in range(pairs):
    for arm, place in list(arms.items()) if n % 2 == 0 else list(arms.items())[::-1]:
        where = f"out/pairs/{preset}-{arm}-{n}"
        env = {**os.environ, "P2PTRAIN_COMPILE": "off"}
        p = subprocess.Popen(
            [
                f"{place}/.venv/bin/p2ptrain",
                "testnet",
                "--preset",
                preset,
                "--peers",
                "2",
                "--seconds",
                seconds,
                "--no-solo",
                "--out",
                where,
            ],
            cwd=place,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        peaks, starts = {}, {}
        while p.poll() is None:
            try:
                for c in psutil.Process(p.pid).children(recursive=True):
                    try:
                        a = c.cmdline()
                    except psutil.Error:
                        continue
                    if "peer" in a and "-m" in a and "--home" in a and any(x.endswith("peer-1") for x in a):
                        starts.setdefault("peer-1", c.create_time())
                        peaks["peer-1"] = max(peaks.get("peer-1", 0), pss(c.pid))
            except psutil.Error:
                pass
            time.sleep(1)
        s = json.load(open(where + "/summary.json"))
        notes = [json.loads(l) for l in open(where + "/peer-1/events.jsonl")]
        ex = [x["seconds"] for x in notes if x["kind"] == "exchanged"]
        first = next(x for x in notes if x["kind"] == "first inner step")
        row = dict(
            arm=arm,
            tokens_per_s=round(sum(x["tokens_per_s"] for x in s["peers"])),
            blocked=round(statistics.mean(x["blocked_fraction"] for x in s["peers"]), 4),
            pss_mb=round(peaks.get("peer-1", 0)),
            first_step_s=round(first["time"] - starts["peer-1"], 2),
            exchange_ms=round(1e3 * statistics.median(ex), 1) if ex else None,
            exchange_p90=round(1e3 * sorted(ex)[int(0.9 * len(ex))], 1) if ex else None,
            exchanges=sum(x["exchanges_ok"] for x in s["peers"]),
            loss=[round(x["val_loss_last"], 4) for x in s["peers"]],
        )
        print(json.dumps(row), flush=True)
