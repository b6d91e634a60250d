"""The runs that a command requests: a script with every combination of environments, settings and seeds."""

import contextlib
import dataclasses
import difflib
import hashlib
import io
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import tyro

from common.arguments import refuse, stop
from common.scripts import load_given, refuse_population
from launch.worker import ORDER, read, write

OURS = {"env-id": "--env-ids sets it", "seed": "--seeds sets it", "run-dir": "--out sets it"}
OURS |= {"resume": "launch resumes"}
CHECKPOINTS = 20  # per run without --checkpoint-interval: a machine that dies costs at most a twentieth of a run
SWITCH = {"True": True, "true": True, "False": False, "false": False}
ONLY = "base"  # the name of the setting if there is only one


@dataclass
class Script:
    """A script to run, and its flags."""

    path: Path

    def __post_init__(self):
        script = load_given("launch", str(self.path))
        refuse_population(f"launch {self.path}", script)
        self.Args = script.Args
        self.prepare = getattr(script, "prepare", lambda args: None)
        self.text = self.path.read_text(encoding="utf-8")
        self.parsed = {}
        self.fields = {field.name.replace("_", "-"): field for field in dataclasses.fields(self.Args)}

    def value(self, args, name):
        """The value of a flag in `args`."""
        return getattr(args, self.fields[name].name)

    def check(self, name, given):
        """The name of a flag, with dashes; refuses flags that the script lacks. `given` is the user's argument."""
        name = name.replace("_", "-")
        if name not in self.fields:
            close = difflib.get_close_matches(name, self.fields, n=1)
            remedy = f"give {close[0]}" if close else f"see python {self.path} --help"
            stop(f"{given}: {self.path.name} has no such flag; {remedy}")
        return name

    def flag(self, name, value):
        """A flag with its value as one word of the command line; `value` of a switch is True or False."""
        if self.fields[name].type is bool and value in SWITCH:
            return f"--{name}" if SWITCH[value] else f"--no-{name}"
        return f"--{name}={value}"

    def parse(self, flags):
        """Parse `flags` with the script; print one line and exit with code 2 if it does not accept them."""
        flags = tuple(flags)
        if flags in self.parsed:
            return self.parsed[flags]
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                self.parsed[flags] = tyro.cli(self.Args, args=flags)
                return self.parsed[flags]
        except SystemExit:
            words = " ".join(flags)
            stop(f"{self.path.name} does not accept {words}; see python {self.path} --help")

    def ask(self, flags):
        """Have the script check the arguments `flags` as it does at startup."""
        args = self.parse(flags)
        if "threads" in self.fields:
            args = dataclasses.replace(args, threads=min(args.threads, 0))  # another machine may have more cores
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                self.prepare(args)
        except SystemExit as ended:
            line = said.getvalue().strip() or str(ended.code)
            stop(line.removeprefix("error: "))


@dataclass
class Order:
    """A run of `script` with `flags` in its own `folder`, up to step `until` if given, else to its end."""

    script: Script
    env_id: str
    label: str  # distinguishes this run from others with its environment and seed
    seed: int
    flags: list[str]
    total: int  # environment steps to the end of the run's schedules
    folder: Path
    until: int | None = None

    @property
    def steps(self):
        return self.until or self.total

    @property
    def name(self):
        return f"{self.env_id} {self.label} seed {self.seed}"

    def message(self, session, environment, stop):
        """The message for the worker. The run ends as soon as the file `stop` has content."""
        return {
            "folder": str(self.folder),
            "script": self.script.path.name,
            "text": self.script.text,
            "flags": self.flags,
            "steps": self.steps,
            "total": self.total,
            "until": self.until if self.until != self.total else None,
            "session": session,
            "stop": str(stop),
            "environment": environment,
            "path": [str(self.script.path.resolve().parent), os.getcwd()],
        }

    def place(self):
        """Create the run's folder or reuse it for the same run; refuse the folder of another run."""
        own = [word for word in self.flags if not word.startswith(("--run-dir=", "--threads="))]
        identity = {"flags": own, "script": hashlib.sha256(self.script.text.encode()).hexdigest()[:12]}
        path = self.folder / ORDER
        if path.exists() and read(path) != identity:
            remedy = "another edition of the script or other flags ran there; give another folder, or delete this one"
            stop(f"{self.folder}: {remedy}")
        self.folder.mkdir(parents=True, exist_ok=True)
        write(path, identity)


def setting_name(setting):
    """The name of a setting, a dictionary of flags, in tables."""
    return ", ".join(f"{name}={value}" for name, value in setting.items()) or ONLY


def folder_name(text):
    """`text` as the name of a folder; beyond 255 bytes, the limit of file systems, cut and with a hash."""
    name = text.replace("/", "-").replace(", ", ",")
    if len(name.encode()) <= 255:
        return name
    return f"{name.encode()[:180].decode(errors='ignore')}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def refuse_ours(name, given, ours):
    """Refuse a flag of the script that the command itself sets; `ours` maps it to the remedy."""
    if name in ours:
        stop(f"{given}: leave it out; {ours[name]}")


def refuse_empty(name, env_ids):
    """Refuse an empty environment, which would be the script's default."""
    if "" in env_ids:
        refuse(name, "''", "name an environment, or leave this out")


def check_flags(script, flags, taken, ours):
    """Refuse flags after the two dashes that the script does not have or that are also given before the dashes.

    `taken` are the names of flags that differ between runs, `ours` of flags that the command sets.
    """
    for word in flags:
        if not word.startswith("--"):
            continue
        name = named(word)
        refuse_ours(name, word, ours)
        plain = name.removeprefix("no-")
        name = script.check(plain if plain in script.fields else name, word)
        if name in taken:
            stop(f"{word}: leave it out here; its values are given before the two dashes")


def named(word):
    """The name of a flag on a command line, with dashes."""
    return word[2:].split("=")[0].replace("_", "-")


def once(argument, lists):
    """Refuse a flag that `argument` gives twice; each of `lists` starts with the name of a flag."""
    names = [words[0].replace("_", "-") for words in lists if words]
    for name in names:
        if names.count(name) > 1:
            refuse(argument, name, "give it once, with all of its values")


def order(script, env_id, setting, seed, flags, out, threads, label=None, until=None):
    """A run with the flags in the dictionary `setting` and in `flags`, in out/<script>/<env_id>/<label>/<seed>."""
    words = words_of(script, setting, flags)
    given = {named(word) for word in words if word.startswith("--")}
    args = script.parse(words)
    env_id = env_id or args.env_id
    label = label or setting_name(setting)
    if "threads" in script.fields and "threads" not in given:
        words.append(f"--threads={threads}")
    if "checkpoint-interval" not in given:
        words.append(f"--checkpoint-interval={max(1, args.total_timesteps // CHECKPOINTS)}")
    folder = (out / script.path.stem / folder_name(env_id) / folder_name(label) / str(seed)).resolve()
    words = [f"--env-id={env_id}", f"--seed={seed}", *words, f"--run-dir={folder}"]
    return Order(script, env_id, label, seed, words, args.total_timesteps, folder, until)


def settings_of(script, grid):
    """Every combination of the values in `grid`; an entry is the name of a flag and its values."""
    choices = {}
    once("grid", grid)
    for words in grid:
        name, *values = words or [""]
        name = script.check(name, f"--grid {name}")
        refuse_ours(name, f"--grid {name}", OURS)
        if not values:
            refuse("grid", name, "give its values after it")
        choices[name] = dict.fromkeys(values)
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def ask(script, settings, seeds, flags):
    """Have the script check the arguments of all runs before any of them starts."""
    for setting in settings:
        script.ask(words_of(script, setting, flags))
    for seed in seeds:
        script.ask([f"--seed={seed}", *flags])


def words_of(script, setting, flags):
    """The flags of a setting, a dictionary, and the common `flags`, as words of a command line."""
    return [script.flag(name, value) for name, value in setting.items()] + flags


def orders(script, env_ids, grid, seeds, flags, out, threads):
    """All runs, ordered by seed, so that the first results of every setting arrive early."""
    settings = settings_of(script, grid)
    check_flags(script, flags, settings[0], OURS)
    ask(script, settings, seeds, flags)
    names = {}  # by folder
    for seed in seeds:
        for env_id in dict.fromkeys(env_ids or (None,)):
            for setting in settings:
                own = order(script, env_id, setting, seed, flags, out, threads)
                other = names.setdefault(own.folder, own.name)
                if other != own.name:
                    stop(f"{own.name}: its folder would be that of {other}, {own.folder}; run it with another --out")
                yield own
