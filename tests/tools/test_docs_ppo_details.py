"""doc/ppo_details.md: all 37 details, with the scripts' names and defaults, and games as described."""

import ast
import functools
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import PLAIN

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    ("continuous", "plain"): "ppo_continuous_action",
    ("continuous", "turbo"): "ppo_continuous_action_torchcompile",
    ("Atari", "plain"): "ppo_atari_envpool",
    ("Atari", "turbo"): "ppo_atari_envpool_torchcompile",
    ("LSTM", "plain"): "ppo_lstm",
    ("LSTM", "turbo"): "ppo_lstm_torchcompile",
    ("discrete", "plain"): "ppo",
    ("discrete", "turbo"): "ppo_torchcompile",
    ("several GPUs",): "ppo_atari_multigpu_torchcompile",
}
KINDS = {kind for kinds in SCRIPTS for kind in kinds}
LSTM, DISCRETE = {"LSTM"}, {"discrete"}
FRAME_COUNT = 90  # the byte of Breakout's memory that counts frames


def rows():
    """Cells of the tables' rows: number, detail, here, where, unlike the post."""
    page = (ROOT / "doc" / "ppo_details.md").read_text()
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| A?\d+ \|.*$", page, re.M)]


def section(number):
    """What the scripts of a row's section have in common."""
    if number.isdigit() and 14 <= int(number) <= 22:
        return {"Atari"}
    if number.isdigit() and 23 <= int(number) <= 31:
        return {"continuous"}
    if number.isdigit() and 32 <= int(number) <= 36:
        return LSTM
    return DISCRETE if number == "37" else set()


def scripts(words):
    """The scripts that some of the KINDS leave; those of a section of their own only if they are named."""
    assert words <= KINDS
    common = {"continuous", "Atari"} | words
    return [script for kinds, script in SCRIPTS.items() if words <= {*kinds} and common & {*kinds} - {"plain", "turbo"}]


@functools.cache
def definitions(script):
    """Functions, classes, methods, constants and flags of a script, by name; flags have their defaults, as syntax."""
    found = {}
    for node in ast.parse((ROOT / "leanrl" / f"{script}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = None
        elif isinstance(node, ast.ClassDef):
            found[node.name] = None
            found |= {f"{node.name}.{part.name}": None for part in node.body if isinstance(part, ast.FunctionDef)}
        elif isinstance(node, ast.Assign):
            found |= {name.id: None for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)}
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            found |= {f"--{field.target.id.replace('_', '-')}": field.value for field in fields}
    return found


def check(word, script):
    """A script has the name; a flag has the default that follows it, or is on, but for --target-kl."""
    name, _, default = word.partition(" ")
    assert name in definitions(script)
    if name.startswith("--"):
        expected = ast.literal_eval(default) if default else None if name == "--target-kl" else True
        assert ast.literal_eval(definitions(script)[name]) == expected


def has(word, script):
    """Whether a script has the name in a sentence; a flag may be turned off, or have a value other than its default."""
    return word.partition(" ")[0].replace("--no-", "--") in definitions(script)


def test_all_details_are_there():
    numbers = [row[0] for row in rows()]
    assert numbers == [str(n) for n in range(1, 38)] + ["A1", "A2", "A3", "A4"]
    assert all(len(row) == 5 and row[1] and row[2] for row in rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_scripts_have_what_the_table_names(row):
    number, _, here, where, unlike = row
    for part in filter(None, where.split("; ")):
        words, _, names = part.rpartition(": ")
        named = re.findall("`([^`]+)`", names)
        assert ", ".join(f"`{name}`" for name in named) == names
        chosen = scripts(section(number) | {*filter(None, words.split(", "))})
        assert chosen
        for name in named:
            for script in chosen:
                check(name, script)
    for name in re.findall("`([^`]+)`", here + unlike):
        is_script = (ROOT / "leanrl" / name).is_file()
        assert is_script or any(has(name, script) for script in scripts(section(number)))


@pytest.mark.parametrize(
    "title, kind", [("LSTM: the two scripts with memory", LSTM), ("MultiDiscrete actions: the two scripts", DISCRETE)]
)
def test_scripts_have_what_the_sentences_name(title, kind):
    page = (ROOT / "doc" / "ppo_details.md").read_text()
    text = page.partition(f"## {title}")[2].partition("\n## ")[0]
    sentences = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    (defaults,) = re.findall("Defaults: (.*)$", sentences, re.M)
    for word in re.findall("`([^`]+)`", sentences):
        if (ROOT / "leanrl" / word).is_file():
            continue
        assert any(has(word, script) for script in scripts(kind)), word
    for word in re.findall("`([^`]+)`", defaults):
        for script in scripts(kind):
            check(word, script)


def test_what_is_not_there_is_not():
    for kinds, script in SCRIPTS.items():
        text = (ROOT / "leanrl" / f"{script}.py").read_text()
        assert ("MultiDiscrete" in text) == ("discrete" in kinds)
        assert bool(re.search(r"nn\.(LSTM|GRU|RNN)", text)) == ("LSTM" in kinds)


def test_envpool_has_the_defaults_on_the_page():
    config = pytest.importorskip("envpool").make_spec("Breakout-v5").config
    assert config.noop_max == 30
    assert config.frame_skip == config.stack_num == 4
    assert config.img_height == config.img_width == 84
    assert config.use_fire_reset and config.gray_scale and config.use_inter_area_resize


def test_games_and_lives_start_as_the_page_says():
    """After 1 to 30 frames; with four copies of a frame (games), or three frames of the last life (lives)."""
    pytest.importorskip("envpool")
    script = PLAIN["ppo_atari"]
    pool = script.make_pool(script.Args(env_id="Breakout-v5", num_envs=4), seed=1)
    generator = np.random.default_rng(1)
    obs, infos = pool.reset()
    ended = np.zeros(4, bool)
    starts = {"life": 0, "game": 0}
    for _ in range(400):
        last_obs, last_infos, last_ended = obs.copy(), infos, ended
        obs, rewards, terminated, truncated, infos = pool.step(generator.integers(4, size=4, dtype=np.int32))
        ended = terminated | truncated
        frames = infos["ram"][:, FRAME_COUNT] - last_infos["ram"][:, FRAME_COUNT]  # bytes, modulo 256
        for i in last_ended.nonzero()[0]:
            assert 1 <= frames[i] <= 30
            assert rewards[i] == 0
            if last_infos["terminated"][i]:
                starts["game"] += 1
                assert (obs[i] == obs[i, -1]).all()
            else:
                starts["life"] += 1
                assert (obs[i, :3] == last_obs[i, 1:]).all()
    assert min(starts.values()) > 3
