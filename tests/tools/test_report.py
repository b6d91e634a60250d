"""Tables and figures from made-up results; committed tables match committed results."""

import base64
import itertools
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from helpers import python, refused
from matplotlib.text import Text

from benchmark import editions
from benchmark.report import figures, pages, tables
from benchmark.speed import rounds
from common import ROOT, machine
from common.algorithms import ALGORITHMS, MEASURED, named

CPU = {
    "cpu": "AMD EPYC",
    "cores": 2,
    "memory_gib": 24,
    "gpu": None,
    "driver": None,
    "packages": {"torch": "2.13.0+cpu"},
}
CARD = CPU | {"cores": 16, "gpu": "NVIDIA H200", "driver": "580.1"}
PLAIN = {21: (100.0, 2.0), 31: (80.0, 1.0)}  # steps per second and warm-up seconds by seed


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A copy of the pages and curves in tmp_path, and a function that adds a result beside them."""
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "doc" / "artifacts").mkdir(parents=True)
    documents = [ROOT / "README.md", *(ROOT / "doc").glob("*.*")]
    for path in [*documents, *(ROOT / "doc").glob("artifacts/*.csv"), *(ROOT / "doc").glob("artifacts/*.png")]:
        shutil.copy(path, tmp_path / path.relative_to(ROOT))

    def add(algo, mode, seed, kind="speed", where=CPU, **parts):
        env_id = ALGORITHMS[algo].env_id
        plain = dict(zip(("steady_sps", "warmup_seconds"), PLAIN[seed], strict=True))
        result = {"algo": algo, "env_id": env_id, "mode": mode, "seed": seed, "machine": where, "plain": plain}
        result |= {"editions": {}, "date": "2026-01-02"}
        folder = tmp_path / "results" / machine.slug(where) / kind / algo / env_id / mode
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{seed}.json").write_text(json.dumps(result | parts))

    return add


def load():
    """All results."""
    return pages.load(pages.ROOT / "results")


def speed_table():
    (table,) = pages.speed_tables(load())
    return table


def checked(**flags):
    """The exit code of the command line."""
    with pytest.raises(SystemExit) as ended:
        pages.main(pages.Args(**flags))
    return ended.value.code


def summary(sps, warmup, **more):
    return {"summary": {"steady_sps": sps, "warmup_seconds": warmup, "matmul_precision": "highest"} | more}


def add_speeds(add):
    for seed, (sps, warmup) in PLAIN.items():
        add("sac_continuous_action", "plain", seed, **summary(sps, warmup))
        add("sac_continuous_action", "eager", seed, **summary(0.9 * sps, 1.0))
        add("sac_continuous_action", "compile", seed, **summary(2 * sps, 12.0))
        add("sac_continuous_action", "sbx", seed, **summary(1.1 * sps if seed == 21 else 0.5 * sps, 13.0))
    add("dqn", "plain", 21, **summary(100.0, 2.0))
    add("dqn", "eager", 21, failed="runs/eager/21/log.txt", exit_code=3)
    add("td3_continuous_action", "plain", 21, **summary(None, None))


def test_speed_table(results):
    """Twice plain's 100 steps/s saves 5 ms a step: 10 s of warm-up more than plain's are back after 2000 steps."""
    add_speeds(results)
    lines = speed_table().markdown().splitlines()
    empty = [f"| {named(script)} | all | not measured | | | |" for script in MEASURED]
    assert [line for line in lines if line not in empty] == [
        "2-core AMD EPYC, 24 GiB; torch 2.13.0; precision of float32 matmuls: highest; seeds 21, 31; 2026-01-02. "
        "Where warm-up does not say cold, the cache of compiled code was empty, and torch's precompiled headers may "
        "have been left by an earlier run.",
        "",
        "| | mode | steps/s | ratio to plain | warm-up, s | pays off after, steps |",
        "|---|---|---|---|---|---|",
        "| SAC, HalfCheetah-v5 | plain | 90 (80 to 100) | 1.00 | 1.5 (1.0 to 2.0) | |",
        "| | eager | 81 (72 to 90) | 0.90 | 1.0 | - |",
        "| | compile | 180 (160 to 200) | 2.00 | 12.0 | 1880 (1760 to 2000) |",
        "| | sbx | 75 (40 to 110) | 0.80 (0.50 to 1.10) | 13.0 | - (12100 to -) |",
        "| TD3, HalfCheetah-v5 | plain | too short to measure | | | |",
        "| | eager | not measured | | | |",
        "| | compile | not measured | | | |",
        "| DQN, CartPole-v1 | plain | 100 | 1.00 | 2.0 | |",
        "| | eager | seed 21 failed: runs/eager/21/log.txt | | | |",
        "| | compile | not measured | | | |",
    ]
    assert sum(line in empty for line in lines) == len(MEASURED) - 3


def test_warm_up_says_whether_the_cache_was_cold(results):
    for seed, cache in ((21, "cold"), (31, "cold")):
        results("dqn", "compile", seed, cache=cache, **summary(100.0, 12.0))
    table = speed_table()
    (row,) = (row for row in table.rows if row[1] == "compile")
    assert row[4] == "12.0, cold" and "cold" not in table.caption
    results("dqn", "compile", 31, **summary(100.0, 12.0))
    assert "Where warm-up does not say cold" in speed_table().caption


def test_ratios_with_mkl_are_to_plain_with_mkl(results):
    """Of the same round: seed 31's plain+mkl is of another one, so that its compile+mkl has no ratio."""
    for seed, (sps, warmup) in PLAIN.items():
        results("dqn", "plain", seed, **summary(sps, warmup))
        results("dqn", "compile+mkl", seed, **summary(6 * sps, 12.0))
        other = {"plain": {"steady_sps": 77.0, "warmup_seconds": 1.0}} if seed == 31 else {}
        results("dqn", "plain+mkl", seed, **summary(2 * sps, warmup) | other)
    rows = {row[1]: row[3:] for row in speed_table().rows if row[0] == "DQN, CartPole-v1"}
    assert rows["plain+mkl"][0] == "1.00" and rows["plain+mkl"][2] == ""
    assert rows["compile+mkl"][0] == "3.00" and rows["compile+mkl"][2] == "3000"  # 10 s at 3.33 ms a step


def test_readme_has_a_row_for_each_algorithm_of_cleanrl(results):
    """LeanRL is 2 and 3 times as fast as CleanRL in two rounds; a third one has no CleanRL."""
    for seed, (sps, warmup) in PLAIN.items():
        results("sac_continuous_action", "plain", seed, **summary(sps, warmup))
        results("sac_continuous_action", "compile", seed, **summary(1000 * seed, 9.0) | {"editions": {"gone": "0"}})
        theirs = summary(
            1000 * seed / (seed // 10), None, versions={"torch": "2.4.1", "gymnasium": "0.29.1", "numpy": "1"}
        )
        results("sac_continuous_action", "cleanrl", seed, **theirs)
    results("td3_continuous_action", "compile", 21, **summary(50.0, 9.0))
    results("td3_continuous_action", "compile+mkl", 21, **summary(70.0, 9.0))
    results("td3_continuous_action", "cleanrl", 21, failed="log.txt", exit_code=1)
    results("td3_continuous_action", "sb3", 31, **summary(40.0, 9.0))
    results("dqn", "cudagraphs", 21, where=CARD, **summary(9.0, 9.0))
    results("dqn", "compile+cudagraphs", 21, where=CARD, **summary(10.0, 9.0))
    results("sac_atari", "compile", 21, **summary(5.0, 9.0))
    pages.write(load())
    text = (pages.ROOT / "README.md").read_text()
    *_, shown = text.split("<!-- end of speed -->")[0].strip().split("\n\nEnvironment steps", 1)
    empty = [f"| {named(script)} | - | - | - | - | - | - |" for script, e in MEASURED.items() if "cleanrl" in e.peers]
    lines = f"Environment steps{shown}".splitlines()
    assert sum(line in empty for line in lines) == len(empty) - 3
    assert [line for line in lines if line not in empty] == [
        "Environment steps per second on a 2-core AMD EPYC, 24 GiB, medians over 1 to 2 seeds. LeanRL is the turbo "
        "script with `--compile`. CleanRL's scripts run with torch 2.4.1, gymnasium 0.29.1, and with MuJoCo's v4 "
        "tasks. All programs of a row took turns on the same cores with the same hyper-parameters and precision. The "
        "machine is shared: compare within a row. [All results](doc/speed.md), [all tricks](doc/tricks.md).",
        "",
        "| | CleanRL | SB3 | SBX | plain | LeanRL | LeanRL / CleanRL |",
        "|---|---|---|---|---|---|---|",
        "| SAC, HalfCheetah-v5 | 10,417 | - | - | 90 | 26,000 † | 2.5 |",
        "| TD3, HalfCheetah-v5 | failed | 40 | - | - | 50 | - |",
        "| DQN, CartPole-v1 ‡ | - | - | - | - | 10 | - |",
        "",
        f"† {tables.BEFORE} ‡ On a NVIDIA H200 (driver 580.1), 16-core AMD EPYC, 24 GiB.",
    ]


def test_speeds_of_different_rounds_have_no_ratio(results):
    results("dqn", "compile", 21, **summary(200.0, 9.0))
    results("dqn", "cleanrl", 21, **summary(100.0, 9.0) | {"plain": {"steady_sps": 99.0, "warmup_seconds": 2.0}})
    (row,) = (row for row in tables.short_table(load()).splitlines() if "DQN, Cart" in row)
    assert row == "| DQN, CartPole-v1 | 100 | - | - | - | 200 | - |"


def test_a_result_that_a_crash_has_cut_is_named(results, capsys):
    add_speeds(results)
    path = next((pages.ROOT / "results").rglob("sbx/31.json"))
    path.write_text(path.read_text()[:50])
    for flags in ({}, {"check": True}, {"stale": True}):
        assert refused(capsys, pages.main, pages.Args(**flags)).startswith(f"{path}: it cannot be read (JSONDecode")


def test_each_machine_has_its_table(results):
    results("dqn", "plain", 21, **summary(100.0, 2.0))
    results("dqn", "cudagraphs", 21, where=CARD, **summary(1000.0, 1.0))
    cpu, card = pages.speed_tables(load())
    assert [row[1] for row in cpu.rows if "DQN, CartPole" in row[0]] == ["plain", "eager", "compile"]
    assert [row[1] for row in card.rows if "DQN, CartPole" in row[0]] == list(rounds.MODES)
    assert card.caption.startswith("NVIDIA H200 (driver 580.1), 16-core AMD EPYC, 24 GiB; torch 2.13.0")
    (row,) = (row for row in card.rows if row[1] == "cudagraphs")
    assert row[2:] == ["1000", "10.00", "1.0", "0"]  # it is warm before plain is
    results("sac_continuous_action", "plain", 21, where=CARD, **summary(100.0, 2.0))
    cpu, card = pages.speed_tables(load())
    assert not any("SAC, HalfCheetah" in row[0] for row in cpu.rows)  # since the other machine has it
    assert any("TD3" in row[0] and row[2] == "not measured" for row in cpu.rows)


def test_every_mode_has_a_row_and_a_color(results):
    modes = rounds.modes_of("sac_continuous_action")
    for mode in modes:
        results("sac_continuous_action", mode, 21, **summary(100.0, 2.0))
    assert {row[1] for row in speed_table().rows if row[0] == "SAC, HalfCheetah-v5"} == set(modes)
    assert set(modes) <= figures.COLORS.keys()


def test_without_results_nothing_is_measured(results):
    assert [row[1:3] for row in speed_table().rows] == [["all", "not measured"]] * len(MEASURED)
    pages.write(load())
    assert not pages.stale(load())


def test_committed_tables_are_those_of_the_committed_results():
    done = python("-m", "benchmark.report", "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["doc/speed.md", "doc/report.html"])
def test_check_names_page_and_table_in_which_a_digit_differs(page, results, capsys):
    add_speeds(results)
    pages.write(load())
    assert checked(check=True) == 0
    path = pages.ROOT / page
    text = path.read_text()
    assert text.count("180 (160 to 200)") == 1
    path.write_text(text.replace("180 (160 to 200)", "180 (160 to 201)"))
    assert checked(check=True) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {page}: table speed is not what its data gives")


@pytest.mark.parametrize("page", ["sac", "td3", "ppo", "dqn", "tricks", "counted_costs"])
def test_each_digit_of_a_table_matters(page, results):
    """A digit is changed in the last row of each table of a page."""
    pages.write({"speed": {}, "learning": {}})
    path = pages.ROOT / "doc" / f"{page}.md"
    whole = path.read_text()
    ends = [match.start() for match in re.finditer("\\n\\n<!-- end of ", whole)]
    for end in ends:
        *_, digit = (match for match in re.finditer(r"\d|not measured", whole[:end]))
        other = "8" if digit[0] == "7" else "7"
        path.write_text(whole[: digit.start()] + other + whole[digit.end() :])
        (line,) = pages.stale({"speed": {}, "learning": {}})
        assert line.startswith(f"error: doc/{page}.md: table ")
    assert ends


def test_quick_rounds_count_where_an_algorithm_has_no_full_ones(results):
    for where in (CPU, CARD):
        results("dqn", "plain", 21, kind="quick", where=where, **summary(50.0, 2.0))
    results("dqn", "plain", 21, where=CARD, **summary(100.0, 2.0))
    results("td3_continuous_action", "plain", 21, kind="quick", where=CARD, **summary(70.0, 2.0))
    quick, mixed = pages.speed_tables(load())
    speeds = [[row[2] for row in table.rows if row[1] == "plain"] for table in (quick, mixed)]
    assert speeds == [["50"], ["70", "100"]]
    assert "(--quick): all rows." in quick.caption and "(--quick): TD3, HalfCheetah-v5." in mixed.caption


def test_rows_of_an_earlier_edition_are_marked_and_named(results, monkeypatch, capsys):
    script = ROOT / "leanrl" / "dqn.py"
    today = editions.today(script)
    results("dqn", "plain", 21, **summary(100.0, 2.0) | today)
    results("dqn", "eager", 21, **summary(100.0, 2.0) | {"editions": {"dqn": "0" * 12}})
    results("dqn", "compile", 21, **summary(100.0, 2.0) | {"editions": {"gone": today["editions"]["dqn"]}})
    modes = [row[1] for row in speed_table().rows if "DQN, CartPole" in row[0]]
    assert modes == ["plain", "eager (earlier edition)", "compile (earlier edition)"]
    monkeypatch.setattr(pages, "PAGES", {"doc/dqn.md": ("curve dqn_cartpole", "curve dqn_breakout")})
    (pages.ROOT / "doc" / "artifacts" / "dqn_cartpole.json").write_text(json.dumps(today))
    assert checked(stale=True) == 1
    folder = "amd-epyc-2-cores/speed/dqn/CartPole-v1"
    assert capsys.readouterr().err.splitlines() == [
        f"{folder}/compile/21.json: gone changed after 2026-01-02",
        f"{folder}/eager/21.json: dqn changed after 2026-01-02",
        "doc/artifacts/dqn_breakout.csv: does not say what it measured",
    ]


def test_results_that_are_all_of_today(results, monkeypatch):
    monkeypatch.setattr(pages, "PAGES", {})
    results("dqn", "plain", 21, **summary(100.0, 2.0) | editions.today(ROOT / "leanrl" / "dqn.py"))
    assert checked(stale=True) == 0


def add_learning(add, algo="dqn", seeds=tuple(PLAIN), **modes):
    """Runs of 2000 steps and 10 minutes times the mode's pace; the first seed is twice as fast."""
    for mode, pace in (modes or {"plain": 4, "compile": 2}).items():
        for seed in seeds:
            steps = np.arange(100, 2001, 100)
            seconds = 600 * pace / (2 if seed == 21 else 1)
            curve = np.stack((steps, seconds * steps / 2000, seed + steps / 100), 1).tolist()
            parts = summary(100, 2, wall_seconds=seconds, global_step=2000)
            parts |= {"cache": "cold"} if mode == "compile" else {}
            add(algo, mode, seed, "learning", **parts, curve=curve)
    add(algo, "eager", 21, "learning", failed="runs/log.txt", exit_code=1)


def test_learning_table(results):
    """The last tenth of the steps are those at 1900 and 2000: one would be no tenth, and 1800 is none of it."""
    add_learning(results)
    (table,) = pages.learning_tables(load())
    ends = ["45.5 ± 7.1", "21: 40.5; 31: 50.5", "2000"]
    assert table.rows == [
        ["DQN, CartPole-v1", "plain", *ends, "30.0 (20.0 to 40.0)", "488.69 ± 16.11"],
        ["DQN, CartPole-v1", "eager", "seed 21 failed: runs/log.txt", "", "", "", ""],
        ["DQN, CartPole-v1", "compile", *ends, "15.0 (10.0 to 20.0), cold", "488.69 ± 16.11"],
    ]
    assert "cache" not in table.caption
    results("dqn", "compile+mkl", 21, "learning", **summary(1, 1, wall_seconds=60, global_step=9), curve=[[9, 1, 1]])
    (table,) = pages.learning_tables(load())
    assert table.caption.endswith("the state of the compiler's cache was not recorded.")


def test_a_seed_that_has_ended_no_episode_is_named(results):
    add_learning(results, seeds=(21,), plain=4)
    for mode in ("plain", "compile"):
        results("dqn", mode, 31, "learning", **summary(1, 1, wall_seconds=60, global_step=9), curve=[])
    (table,) = pages.learning_tables(load())
    assert [row[2:4] for row in table.rows if row[1] != "eager"] == [
        ["40.5", "21: 40.5; seed 31 has ended no episode"],
        ["seed 31 has ended no episode", ""],
    ]


def test_headline_is_the_median_of_like_for_like(results):
    """Another machine, with fewer modes, and MKL's code are no part of it."""
    add_learning(
        results, "ppo_continuous_action", **{"plain": 4, "compile": 2, "compile+mkl": 1, "cleanrl": 6, "sbx": 1}
    )
    results("ppo_continuous_action", "compile", 21, "learning", CARD, failed="log.txt", exit_code=1)
    measured = load()
    assert tables.sentence(measured) == (
        "PPO, 2,000 steps of HalfCheetah-v5 on a 2-core AMD EPYC, 24 GiB. "
        "LeanRL: 15.0 (10.0 to 20.0) minutes, cold compiler cache, to a return of 46 (40 to 50). "
        "Plain: 30.0 (20.0 to 40.0) minutes to a return of 46 (40 to 50). "
        "SBX: 7.5 (5.0 to 10.0) minutes to a return of 46 (40 to 50). "
        "CleanRL: 45.0 (30.0 to 60.0) minutes to a return of 46 (40 to 50). "
        "All are medians with their range over 2 seeds. CleanRL runs HalfCheetah-v4."
    )
    title, panels = tables.panels(measured)
    assert title == "2-core AMD EPYC, 24 GiB" and [*panels] == ["PPO, HalfCheetah-v5"]
    assert [*panels["PPO, HalfCheetah-v5"]] == ["CleanRL", "SBX", "plain", "LeanRL"]
    pages.write(measured)
    assert "](doc/artifacts/return_against_minutes.svg)" in (pages.ROOT / "README.md").read_text()
    assert (pages.ROOT / "doc" / "artifacts" / "return_against_minutes.svg").stat().st_size < 300_000


def test_a_headline_says_how_many_seeds_there_are(results):
    add_learning(results, "ppo_continuous_action", seeds=(31,), compile=1)
    said = tables.sentence(load())
    assert "LeanRL: 10.0 minutes, cold compiler cache, to a" in said and said.endswith(" One seed.")
    add_learning(results, "ppo_continuous_action", compile=2)
    add_learning(results, "ppo_continuous_action", seeds=(21,), sb3=1)
    assert tables.sentence(load()).endswith("over 1 to 2 seeds.")


def test_without_like_for_like_there_is_no_headline(results):
    add_learning(results, "ppo_continuous_action", **{"compile+mkl": 1})
    measured = load()
    assert tables.panels(measured) is None and tables.sentence(measured).endswith("not measured.")
    pages.write(measured)
    assert "return_against_minutes" not in (pages.ROOT / "README.md").read_text()


def test_return_against_minutes(results):
    """Thin lines are seeds; the thick one has means over seeds of minutes and returns at equal steps, and a name."""
    add_learning(results, "ppo_continuous_action", plain=4, compile=2, sb3=4)
    add_learning(results, "sac_continuous_action", plain=40)
    picture = figures.minutes_figure(*tables.panels(load()))
    left, right = picture.axes
    assert [axes.get_title() for axes in picture.axes] == ["PPO, HalfCheetah-v5", "SAC, HalfCheetah-v5"]
    assert sorted(text.get_text() for text in left.texts) == ["LeanRL", "SB3", "plain"]
    assert [text.get_text() for text in right.texts] == ["plain"]
    thin, other, thick = right.lines
    assert thin.get_linewidth() == other.get_linewidth() < thick.get_linewidth()
    assert [line.get_xdata()[-1] for line in (thin, other, thick)] == [200, 400, 300]
    assert [line.get_ydata()[-1] for line in (thin, other, thick)] == [41, 51, 46]
    boxes = [Text.get_window_extent(text) for text in left.texts]  # without the leaders
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_figures(results):
    """Small, the same each time, and with the names of what they show."""
    add_speeds(results)
    add_learning(results)
    pages.write(load())
    page = (pages.ROOT / "doc" / "report.html").read_text()
    svgs = dict(re.findall(r'<img alt="(\w[^"]*)" src="data:image/svg\+xml;base64,([^"]*)"', page))
    names = ["DQN, CartPole-v1; 2-core AMD EPYC, 24 GiB", "Steps per second, 2-core AMD EPYC, 24 GiB"]
    assert sorted(svgs) == names
    learning, speed = (base64.b64decode(svgs[name]).decode() for name in names)
    artifacts = pages.ROOT / "doc" / "artifacts"
    assert (artifacts / "speed_amd-epyc-2-cores.svg").read_text() == speed
    assert "](artifacts/speed_amd-epyc-2-cores.svg)" in (pages.ROOT / "doc" / "speed.md").read_text()
    assert (artifacts / "learning_amd-epyc-2-cores_dqn_CartPole-v1.svg").read_text() == learning
    shown = "](artifacts/learning_amd-epyc-2-cores_dqn_CartPole-v1.svg)"
    assert shown in (pages.ROOT / "doc" / "results.md").read_text()
    assert all(text in learning for text in ("plain, 2 seeds", "compile, 2 seeds", "2-core AMD EPYC, 24 GiB"))
    assert all(f">{text}<" in speed for text in ("plain", "LeanRL", "SBX", "90", "180", "75"))
    assert "eager" not in speed and max(map(len, svgs.values())) < 133_000
    pages.write(load())
    assert (pages.ROOT / "doc" / "report.html").read_text() == page


def test_machines_have_the_packages_of_all_results(results):
    """Of all peers, and those that a peer of its own environment has."""
    later = CPU | {"packages": {"torch": "2.14.0", "jax": "0.10"}}
    results("dqn", "plain", 21, **summary(100.0, 2.0))
    results(
        "dqn", "cleanrl", 21, where=later, **summary(100.0, 2.0, versions={"torch": "2.4.1", "gymnasium": "0.29.1"})
    )
    table = tables.machine_table(load())
    packages = "torch 2.13.0+cpu and 2.14.0, jax 0.10"
    assert table.rows == [["2-core AMD EPYC, 24 GiB", "", packages, "CleanRL: torch 2.4.1, gymnasium 0.29.1"]]


def in_browser(page, width, script):
    """What a browser makes of a page in a frame of `width` pixels, after a script in it."""
    text = page.read_text()
    page.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    frame = page.with_name("frame.html")  # a window has 500 pixels or more
    copy = "document.body.append(frames[0].document.documentElement.cloneNode(true))"
    frame.write_text(f"<iframe onload='{copy}' style='width:{width}px;height:9in;border:0' src={page.name}></iframe>")
    command = ["chromium", "--headless", "--no-sandbox", "--allow-file-access-from-files", "--window-size=1600,900"]
    command += ["--dump-dom", frame.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    page.write_text(text)
    return shown


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_page_in_a_browser(results):
    """A browser shows table and figures; a click sorts the rows by their numbers, those without any last."""
    add_speeds(results)
    pages.write(load())
    path = pages.ROOT / "doc" / "report.html"
    assert not re.search(r"(src|href)=.(?!data:)", path.read_text())  # it needs no other file
    click = 'document.querySelectorAll("table")[1].querySelectorAll("th")[2].click()'
    shown = in_browser(path, 1400, click)
    _, rows, *_ = re.findall(r"<tbody>(.*?)</tbody>", shown, re.DOTALL)  # the first table is that of learning
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in rows.split("</tr>")][:-1]
    assert [row[2].split()[0] for row in rows[:5]] == ["75", "81", "90", "100", "180"]
    assert rows[4][:3] == ["SAC, HalfCheetah-v5", "compile", "180 (160 to 200)"]
    assert rows[5][2] in ("not measured", "seed 21 failed: runs/eager/21/log.txt")
    assert "2-core AMD EPYC, 24 GiB" in shown and shown.count("<img ") == 1 + len(pages.CAPTIONS)


CUT = """
for (const part of document.querySelectorAll("details")) part.open = true;
const fits = (inner, outer) => inner.left >= outer.left - 1 && inner.right <= outer.right + 1;
const words = [...document.images].map((image) => {
  const box = image.getBoundingClientRect();
  let whole = image.naturalWidth > 0 && box.width > 300 && box.left >= 0 && box.right <= innerWidth;
  for (let outer = image.parentElement; outer; outer = outer.parentElement)
    whole &&= fits(box, outer.getBoundingClientRect());
  return whole ? "whole" : "cut";
});
document.title = `${innerWidth} ${document.documentElement.scrollWidth} ${words.join(" ")}`;
"""


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_no_figure_is_cut(width, results):
    """With all that unfolds open figures have their whole width on the screen; the page is as wide as the window."""
    add_speeds(results)
    add_learning(results, "ppo_continuous_action")
    add_learning(results, "sac_continuous_action")
    pages.write(load())
    shown = in_browser(pages.ROOT / "doc" / "report.html", width, f"addEventListener('load', () => {{{CUT}}});")
    (title,) = re.findall(r"<title>(\d.*?)</title>", shown)
    window, page, *words = title.split()
    assert int(page) <= int(window) <= width
    assert words == ["whole"] * (4 + len(pages.CAPTIONS))


@pytest.mark.parametrize(
    "name, shown",
    [
        ("AMD EPYC 9R14 96-Core Processor", "AMD EPYC 9R14"),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "Intel Xeon Platinum 8481C"),
    ],
)
def test_processor(name, shown, tmp_path):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: {name}\ncache size\t: 1 KB\n")
    assert machine.processor(tmp_path / "cpuinfo") == shown


def test_machine():
    here = machine.machine()
    assert json.loads(json.dumps(here)) == here and here["cores"] >= 1 and here["packages"]["torch"]
    assert machine.slug(CPU) == "amd-epyc-2-cores" and machine.slug(CARD) == "nvidia-h200-16-cores"
