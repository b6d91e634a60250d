"""Environments with known answers: every script finds them, and a planted bug fails the probes that indicate it."""

from pathlib import Path

import pytest
from conftest import AGENTS, GAMES, PLAIN, TURBO, load_copy, script_params, stem
from helpers import by_hand, refused
from test_edits import edited

from instruments import __main__ as command
from instruments import probe

LEFT_OUT = AGENTS | GAMES | {"fast_td3": "its critics give distributions"}
ALL = {one.name for one in probe.PROBES}
VALUES = ALL - {"action", "both"}
thorough = pytest.mark.thorough


def copy(script, folder, old, new):
    """The module of a copy of a script, with one text replaced."""
    source = Path(script.__file__).read_text()
    assert source.count(old) == 1, f"not there once: {old}"
    return load_copy(stem(script), source.replace(old, new), folder)


def failed(names, script, words, capsys, monkeypatch):
    """Which of the probes of these names a script with the flags `words` fails."""
    probes = [one for one in probe.PROBES if one.name in names]
    monkeypatch.setattr(probe, "PROBES", probes)
    with pytest.raises(SystemExit) as stop:
        probe.main(script.__file__, script, words)
    lines = capsys.readouterr().out.splitlines()
    bad = {one.name for one, said in zip(probes, lines, strict=True) if said.endswith(one.failure)}
    good = {one.name for one, said in zip(probes, lines, strict=True) if said.endswith(" ok")}
    assert bad | good == names and not bad & good
    assert stop.value.code == bool(bad)
    return bad


@pytest.mark.parametrize("script", script_params(left_out=LEFT_OUT))
def test_a_healthy_script_passes(script, capsys, monkeypatch):
    assert not failed(ALL, script, [], capsys, monkeypatch)


@pytest.mark.parametrize("script", by_hand(script_params(TURBO.values(), LEFT_OUT)))
def test_a_compiled_script_passes(script, capsys, monkeypatch):
    names = {"observation", "action", "truncation"}
    assert not failed(names, script, ["--compile"], capsys, monkeypatch)


@thorough
@pytest.mark.parametrize("edit", ["five critics", "auxiliary head", "n-step returns"])
def test_an_edited_copy_passes(edit, tmp_path, capsys, monkeypatch):
    assert not failed(ALL, edited(edit, "turbo", tmp_path), [], capsys, monkeypatch)


STORED = ("rewards=rewards, terminated=terminated)", "rewards=rewards, terminated=terminated | truncated)")
STEP = 'self.optimizers["critics"].step('
SAC_SIGN = ("(alpha * log_prob - q)", "(alpha * log_prob + q)")
TD3_SIGN = ("actor_loss = -functional_call", "actor_loss = functional_call")
PPO_SIGN = ("policy_loss = -torch.min", "policy_loss = torch.min")
DQN_STEP = ('self.optimizers["q"].step(td_loss)', "pass")
BROADCAST = ('errors = (values - batch["returns"])', 'errors = (values - batch["returns"].squeeze(-1))')
PQN_STEP = ('self.optimizers["q"].step(gradient)', "gradient.norm()")
ENDED = ("**transition, terminated=terminated", "**transition, terminated=ended")
NO_GAMMA = ('self.args.gamma * (1 - rollout["terminated"])', '(1 - rollout["terminated"])')
BUGS = {  # by what is wrong: script, what is replaced by what, which probes fail, and which do not
    "sign": [
        (PLAIN["sac"], *SAC_SIGN, {"action", "both"}, {"constant"}),
        (TURBO["td3"], *TD3_SIGN, {"action", "both"}, {"constant"}),
        (PLAIN["ppo"], *PPO_SIGN, {"action", "both"}, {"constant"}),
        (TURBO["ppo"], *PPO_SIGN, {"action", "both"}, {"constant"}),
    ],
    "truncation is terminal": [
        (PLAIN["dqn"], *STORED, {"truncation"}, {"delay"}),
        (PLAIN["pqn"], *ENDED, {"truncation"}, {"delay"}),
        (
            TURBO["sac"],
            "rewards, terminated, act_on)\n            obs",
            "rewards, ended, act_on)\n            obs",
            {"truncation"},
            {"delay"},
        ),
    ],
    "no gamma": [
        (PLAIN["dqn"], "self.args.gamma * next_q", "next_q", {"delay", "truncation"}, {"constant"}),
        (TURBO["td3"], "self.args.gamma * next_q", "next_q", {"delay", "truncation"}, {"constant"}),
        (TURBO["pqn"], "self.args.gamma * (1 - weights)", "(1 - weights)", {"delay", "truncation"}, {"constant"}),
        (PLAIN["ppo_lstm"], *NO_GAMMA, {"delay", "truncation"}, {"constant"}),
    ],
    "values do not learn": [
        (TURBO["dqn"], *DQN_STEP, VALUES, set()),
        (TURBO["pqn"], *PQN_STEP, VALUES, set()),
        (PLAIN["sac"], f"{STEP})", "pass", VALUES, set()),
        (TURBO["td3"], f"{STEP}qf_loss)", "pass", VALUES, set()),
    ],
    "(N, 1) less (N,)": [
        (TURBO["ppo"], *BROADCAST, {"observation"}, {"constant"}),
    ],
    "actions of others": [
        (PLAIN["dqn"], 'batch["actions"].long()', '(1 - batch["actions"].long())', {"action", "both"}, {"constant"}),
    ],
}
PARAMETERS = [
    pytest.param(*bug, id=f"{what}, {stem(bug[0])}", marks=[thorough] * (bug[0] is not PLAIN["dqn"]))
    for what, bugs in BUGS.items()
    for bug in bugs
]


@pytest.mark.parametrize(("script", "old", "new", "fail", "pass_"), PARAMETERS)
def test_a_planted_bug_fails_its_probes(script, old, new, fail, pass_, tmp_path, capsys, monkeypatch):
    assert failed(fail | pass_, copy(script, tmp_path, old, new), [], capsys, monkeypatch) == fail


@thorough
@pytest.mark.parametrize("script", [TURBO["ppo"], TURBO["ppo_lstm"]], ids=stem)
@pytest.mark.parametrize(
    ("flags", "fail", "pass_"),
    [(["--no-bootstrap-truncation"], {"truncation"}, {"delay"}), (["--vf-coef", "0"], VALUES, set())],
)
def test_flags_are_the_scripts(script, flags, fail, pass_, capsys, monkeypatch):
    assert failed(fail | pass_, script, flags, capsys, monkeypatch) == fail


def test_a_run_that_diverges_has_failed(capsys, monkeypatch):
    words = ["--learning-rate", "1e12"]
    assert failed({"constant"}, PLAIN["dqn"], words, capsys, monkeypatch) == {"constant"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "probe: give a script"),
        ("leanrl/nothing.py", "probe leanrl/nothing.py: this is no Python file"),
        ("tests/algorithms/catch.py", "probe tests/algorithms/catch.py: it has no `train`"),
        ("leanrl/dqn_atari.py", "probe leanrl/dqn_atari.py: it plays Atari games"),
        ("leanrl/sac_atari_torchcompile.py", "probe leanrl/sac_atari_torchcompile.py: it plays Atari games"),
        (
            "leanrl/sac_population_torchcompile.py",
            "probe leanrl/sac_population_torchcompile.py: this script trains a population",
        ),
        ("leanrl/fast_td3.py", "probe leanrl/fast_td3.py: its critics give distributions"),
        ("leanrl/dqn.py --batch-size 0", "--batch-size 0: give a number from 1"),
    ],
)
def test_bad_input_gets_one_line(words, message, capsys):
    assert refused(capsys, command.main, ["probe", *words.split()]).startswith(message)
