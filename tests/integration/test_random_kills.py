"""SIGKILL at random moments of every command that writes: what is there is whole, and the same command, or a resume,
ends where an undisturbed one does.

One case is one kill. Its moment is drawn with the seed plus the case's number; ESPER_KILL_SEED and ESPER_KILLS choose
seed and number of cases, and `-k "[17]"` repeats one of them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import pytest

from esper.evidence.results import CURVES, RESULTS, ResultStore, read_curves
from esper.leyline.rundir import REPORT_FILE, event_files
from esper.scripts.cli import COMMANDS as CLI_COMMANDS
from esper.simic.rewards import Calibration
from esper.simic.run.run_dir import open_run
from esper.simic.run.run_state import load_policy
from tests.integration.kills import FLAGS, check_prefix, checkpoints, final_bits, lines, training_facts

NUM_CASES = int(os.environ.get("ESPER_KILLS", "100"))
SEED = int(os.environ.get("ESPER_KILL_SEED", "0"))
MAX_S = 900
GONE_S = 20.0
"""Workers leave when their parent is gone."""
TIMES = ["run_s", "controller_s", "wall_s"]
STUDY = """
import sys
from esper.evidence import studies
from esper.scripts.cli import main
studies.STUDIES["tiny"] = studies.Study(
    description="for tests", preset="smoke", policies=1, seeds=1, tune_episodes=4, changes={"task": "digits_mlp"})
main(sys.argv[1:])
"""
MINE = """
from torch import nn
from esper.runtime.datasets import load_dataset

def make_model():
    return nn.Sequential(nn.Conv2d(1, 6, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, 10))

def make_data():
    digits = load_dataset("digits")
    return (digits.train.inputs[:320], digits.train.targets[:320]), (digits.val.inputs, digits.val.targets)
"""
ROWS = ["bench", "blueprints", "--tasks", "digits_conv", "--seeds", "1", "--epochs", "2", "--rows", "64",
        "--slots", "r0c1", "--blueprints", "cnn.se", "cnn.conv"]  # fmt: skip
SMALL = ["--preset", "smoke", "--task", "digits_mlp", "--checkpoint-s", "0", "--seed", "5"]


class Place:
    """The folders of one case; the command is run in one that has to stay empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs, self.out, self.state = folder / "runs", folder / "out", folder / "state"
        self.here, self.temporary = folder / "here", folder / "temporary"
        for made in (self.here, self.temporary):
            made.mkdir(parents=True)

    def start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        """The command in a session of its own, by whose number its workers are found."""
        program = ["-c", STUDY] if arguments[0] == "study" else ["-m", "esper.scripts.cli"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary), "XDG_STATE_HOME": str(self.state)}
        with (self.folder / "told").open("wb") as reported:
            return subprocess.Popen(
                [sys.executable, *program, *arguments],
                cwd=self.here,
                env=env,
                stdout=reported,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, arguments: list[str]) -> float:
        """Runs a command to its end and returns how long it took."""
        started = time.monotonic()
        process = self.start(arguments)
        assert process.wait(MAX_S) == 0, self.reported()
        return time.monotonic() - started

    def reported(self) -> str:
        return (self.folder / "told").read_text(errors="replace")


def session_members(session: int) -> list[int]:
    """Processes of a session that live."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


# ---- what is killed


class Command:
    """One command: how it is called, what must hold after a kill, how it is brought to its end, what comes out."""

    def __init__(self, name: str) -> None:
        self.name = name

    def prepare(self, place: Place, template: Path) -> None:
        """What is there before the command."""

    def arguments(self, place: Place) -> list[str]:
        raise NotImplementedError

    def check(self, place: Place) -> None:
        """What must hold right after a kill."""

    def again(self, place: Place) -> None:
        """What a user does next: by default, the same again."""
        place.run(self.arguments(place))

    def outcome(self, place: Place) -> Any:
        """What has to be the same as without a kill."""
        return None


class Train(Command):
    """A training, from the beginning or from a checkpoint."""

    def __init__(self, name: str, *flags: object, rounds: int = 5, resume: bool = False) -> None:
        super().__init__(name)
        self.flags, self.rounds, self.resume = [str(flag) for flag in flags], rounds, resume

    def prepare(self, place: Place, template: Path) -> None:
        if self.resume:
            shutil.copytree(template, place.runs / "template")

    def run_of(self, place: Place) -> Path:
        return place.runs / ("template" if self.resume else "a")

    def arguments(self, place: Place) -> list[str]:
        if self.resume:
            return ["train", "--resume", str(self.run_of(place)), "--rounds", str(self.rounds), *self.flags]
        return ["train", "ppo", *self.flags, "--runs", str(place.runs), "--run-id", "a"]

    def check(self, place: Place) -> None:
        check_killed_run(self.run_of(place))
        for path in (place.runs / "calibrations").glob("[!.]*"):
            msgspec.json.decode(path.read_bytes(), type=Calibration)

    def again(self, place: Place) -> None:
        go_on(place, self.run_of(place), self.rounds, self.arguments(place))

    def outcome(self, place: Place) -> Any:
        run = self.run_of(place)
        scales = {path.name: path.read_bytes() for path in (place.runs / "calibrations").glob("[!.]*")}
        return final_bits(run, self.rounds), training_facts(run), scales


def check_killed_run(run: Path) -> None:
    """A run folder is there as a run or not at all; its log is a prefix, and every checkpoint in it is valid."""
    if run.exists():
        open_run(run)
        if event_files(run):
            check_prefix(run, may_be_empty=True)
        if checkpoints(run):
            newest = sorted(path.parent.name for path in checkpoints(run))[-1]
            assert load_policy(run).checkpoint.name == newest


def go_on(place: Place, run: Path, rounds: int, anew: list[str]) -> None:
    """Resumes a run; one without a checkpoint has to be refused by a resume, and begins anew."""
    resume = ["train", "--resume", str(run), "--rounds", str(rounds)]
    if run.exists() and checkpoints(run):
        place.run(resume)
    else:
        if run.exists():
            assert place.start(resume).wait(MAX_S) == 4, place.reported()
            shutil.rmtree(run)
        place.run(anew)
    assert not [path for path in run.rglob(".tmp-*") if path.parent != run]


class DualAB(Command):
    def arguments(self, place: Place) -> list[str]:
        return ["train", "--dual-ab", "shaped", "sparse", *SMALL, "--rounds", "3", "--workers", "1", "--runs",
                str(place.runs)]  # fmt: skip

    def sides(self, place: Place) -> dict[str, Path]:
        runs = [path for path in place.runs.glob("[!.]*") if path.name != "calibrations" and event_files(path)]
        return {str(lines(run)[0]["group"]): run for run in runs if lines(run)}

    def check(self, place: Place) -> None:
        for run in place.runs.glob("[!.]*"):
            if run.name != "calibrations":
                check_killed_run(run)

    def again(self, place: Place) -> None:
        sides = self.sides(place)
        if len(sides) < 2 or not all(checkpoints(run) for run in sides.values()):
            shutil.rmtree(place.runs, ignore_errors=True)
            place.run(self.arguments(place))
        for run in self.sides(place).values():
            place.run(["train", "--resume", str(run)])

    def outcome(self, place: Place) -> Any:
        sides = self.sides(place)
        return {group: (final_bits(run, 3), training_facts(run)) for group, run in sides.items()}


class Evaluate(Command):
    def arguments(self, place: Place) -> list[str]:
        return ["evaluate", "--task", "digits_limited", "--epochs", "4", "--arms", "schedule,random", "--seeds", "2",
                "--out", str(place.out)]  # fmt: skip

    def check(self, place: Place) -> None:
        if (place.out / RESULTS).exists():
            copied = shutil.copytree(place.out, place.folder / "copied")  # opening a store mends what was torn
            ResultStore(copied)
            shutil.rmtree(copied)

    def outcome(self, place: Place) -> Any:
        return judged(place.out)


def judged(folder: Path) -> Any:
    """The results of an evaluation but for times, and that there is a report."""
    store = ResultStore(folder)
    rows = pd.DataFrame([msgspec.to_builtins(row) for row in store.results.values()]).drop(columns=TIMES)
    curves = read_curves(folder / CURVES, store.results)
    assert (folder / "report.md").read_text().startswith("# ")
    assert json.loads((folder / "summary.json").read_text())["missing"] == []
    sorted_rows = rows.drop(columns="policy_id").sort_values(["arm", "run_seed"]).to_csv(index=False)
    keys = ["arm", "run_seed", "epoch"]
    return sorted_rows, curves.drop(columns="policy_id").sort_values(keys).to_csv(index=False)


class Tune(Command):
    def arguments(self, place: Place) -> list[str]:
        return ["evaluate", "--task", "digits_limited", "--epochs", "4", "--tune", "--arms", "periodic",
                "--tune-episodes", "4", "--out", str(place.out)]  # fmt: skip

    def check(self, place: Place) -> None:
        if (place.out / "tuned.json").exists():
            json.loads((place.out / "tuned.json").read_bytes())

    def outcome(self, place: Place) -> Any:
        return (place.out / "tuned.json").read_bytes()


class Study(Command):
    def arguments(self, place: Place) -> list[str]:
        return ["study", "tiny", "--out", str(place.out), "--workers", "1"]

    def check(self, place: Place) -> None:
        check_killed_run(place.out / "tiny" / "policy-0")

    def outcome(self, place: Place) -> Any:
        run = place.out / "tiny" / "policy-0"
        return judged(place.out / "tiny" / "evaluation"), final_bits(run, 2), training_facts(run)


class Grow(Command):
    def prepare(self, place: Place, template: Path) -> None:
        place.out.mkdir()
        for name in ("model.safetensors", "network.pt2", "history.csv", "growth.png"):
            (place.out / name).write_bytes(b"an earlier one")

    def arguments(self, place: Place) -> list[str]:
        return ["grow", "--task", "digits_limited", "--epochs", "6", "--out", str(place.out)]

    def check(self, place: Place) -> None:
        for path in place.out.glob("[!.]*"):
            content = path.read_bytes()
            if content != b"an earlier one":
                ends = {".png": b"IEND\xaeB`\x82", ".csv": b"\n"}
                assert content.endswith(ends.get(path.suffix, b"")), path
                assert path.suffix != ".pt2" or zipfile.ZipFile(path).testzip() is None

    def outcome(self, place: Place) -> Any:
        self.check(place)
        content = (place.out / "model.safetensors").read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        # The library writes the entries of its header in any order.
        return json.loads(content[8:begin]), content[begin:], (place.out / "history.csv").read_bytes()


class GrowOwn(Command):
    """A model of the user's own: a killed one goes on with --resume, once its first epoch is kept."""

    def prepare(self, place: Place, template: Path) -> None:
        (place.folder / "mine.py").write_text(MINE)

    def arguments(self, place: Place) -> list[str]:
        mine = place.folder / "mine.py"
        return ["grow", "--model", f"{mine}:make_model", "--data", f"{mine}:make_data", "--epochs", "8", "--out",
                str(place.out)]  # fmt: skip

    def again(self, place: Place) -> None:
        unfinished = (place.out / "checkpoint.pt").exists()
        place.run([*self.arguments(place), "--resume"] if unfinished else self.arguments(place))

    def outcome(self, place: Place) -> Any:
        assert not (place.out / "checkpoint.pt").exists()
        content = (place.out / "model.safetensors").read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        history = pd.read_csv(place.out / "history.csv")
        return json.loads(content[8:begin]), content[begin:], history.drop(columns=["train_s", "validate_s"]).to_csv()


class OneFile(Command):
    """Writes one file at its end: the old one is there until then, and never half of a new one."""

    def __init__(self, name: str, *arguments: str, mark: bytes) -> None:
        super().__init__(name)
        self.rest, self.mark = arguments, mark

    def file(self, place: Place) -> Path:
        return place.folder / "written"

    def prepare(self, place: Place, template: Path) -> None:
        self.file(place).write_text("an earlier one")

    def arguments(self, place: Place) -> list[str]:
        return [*self.rest, "--out", str(self.file(place))]

    def check(self, place: Place) -> None:
        content = self.file(place).read_bytes()
        assert content == b"an earlier one" or content.endswith(self.mark)

    def outcome(self, place: Place) -> Any:
        assert self.file(place).read_bytes().endswith(self.mark)


class Rows(OneFile):
    """A benchmark that adds a row for each run: those that were there are not made again."""

    def prepare(self, place: Place, template: Path) -> None:
        """There is no earlier file."""

    def check(self, place: Place) -> None:
        """A line may be torn."""

    def outcome(self, place: Place) -> Any:
        return self.file(place).read_bytes()


class Report(Command):
    def prepare(self, place: Place, template: Path) -> None:
        shutil.copytree(template, place.runs / "template")
        (place.runs / "template" / REPORT_FILE).write_text("an earlier one")

    def arguments(self, place: Place) -> list[str]:
        return ["report", str(place.runs / "template")]

    def check(self, place: Place) -> None:
        text = (place.runs / "template" / REPORT_FILE).read_text()
        assert text == "an earlier one" or text.rstrip().endswith("</html>")

    def outcome(self, place: Place) -> Any:
        self.check(place)
        assert (place.runs / "template" / REPORT_FILE).read_text() != "an earlier one"


class Export(Command):
    def prepare(self, place: Place, template: Path) -> None:
        shutil.copytree(template, place.runs / "template")

    def arguments(self, place: Place) -> list[str]:
        return ["export", str(place.runs / "template"), self.name, "--out", str(place.out)]

    def outcome(self, place: Place) -> Any:
        names = sorted(path.name for path in place.out.iterdir())
        return names if self.name == "parquet" else len(names)

    def again(self, place: Place) -> None:
        if place.out.exists():  # it was complete when it was killed
            return
        super().again(place)


class Read(Command):
    """Commands that write nothing, killed or not."""

    def __init__(self, name: str, *rest: str) -> None:
        super().__init__(name)
        self.rest = rest

    def prepare(self, place: Place, template: Path) -> None:
        shutil.copytree(template, place.runs / "template")
        self.before = contents(place.runs)

    def arguments(self, place: Place) -> list[str]:
        return [self.name, str(place.runs / "template"), *self.rest]

    def check(self, place: Place) -> None:
        assert contents(place.runs) == self.before

    outcome = check


class Sandbox(Command):
    """Writes nothing, and takes longer than anybody waits here."""

    def arguments(self, place: Place) -> list[str]:
        return ["sandbox", "--seeds", "1", "--only", "coin"]

    def check(self, place: Place) -> None:
        assert {path.name for path in place.folder.iterdir()} <= {"here", "temporary", "told"}

    def again(self, place: Place) -> None:
        """It has no state to go on from."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


COMMANDS: tuple[Command, ...] = (
    Train("train", *FLAGS, "--workers", 1),
    Train("train with workers", *FLAGS, "--workers", 2, "--worker-kind", "process"),
    Train(
        "train while the scale is measured", *SMALL, "--rounds", 1, "--calibration-runs", 5, "--workers", 1, rounds=1
    ),
    Train("train with an exporter", *SMALL, "--rounds", 3, "--workers", 1, "--exporters", "tensorboard", rounds=3),
    Train("resume", "--workers", 1, resume=True),
    DualAB("dual-ab"),
    Evaluate("evaluate"),
    Tune("tune"),
    Study("study"),
    Grow("grow"),
    GrowOwn("grow a model of one's own"),
    OneFile("compare", "compare", "digits_limited", "--epochs", "5", "--seeds", "1", mark=b"\n"),
    OneFile("bench", "bench", "coalitions", "--repeats", "1", mark=b"}\n"),
    Rows("bench rows", *ROWS, mark=b""),
    Report("report"),
    Export("parquet"),
    Export("tensorboard"),
    Read("verify"),
    Read("status"),
    Read("query", "from rounds"),
    Sandbox("sandbox"),
)
WRITING = tuple(command for command in COMMANDS if not isinstance(command, Read | Sandbox))
"""These get most of the kills."""


def command_of(case: int) -> Command:
    """Every fifth kill goes through all commands, the others through those that write."""
    return WRITING[(case - case // 5 - 1) % len(WRITING)] if case % 5 else COMMANDS[-1 - case // 5 % len(COMMANDS)]


def test_every_command_that_writes_is_killed(tmp_path: Path) -> None:
    """A hundred kills, spread evenly; a command that is added later has to be added here."""
    killed = Counter(command_of(case).name for case in range(100))
    assert killed.keys() == {command.name for command in COMMANDS}
    assert min(killed[command.name] for command in WRITING) >= 4
    place = Place(tmp_path / "a")
    names = {command.arguments(place)[0] for command in COMMANDS}
    assert names >= {*CLI_COMMANDS, "bench"} - {"tasks", "watch", "serve"}, "those that only read are left out"


# ---- the test


class Undisturbed:
    """Every command run once without a kill: how long it takes, and what comes out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[float, Any]] = {}
        place = Place(folder / "of the template")
        place.run(["train", "ppo", *SMALL, "--rounds", "2", "--workers", "1", "--runs", str(place.runs), "--run-id",
                   "template"])  # fmt: skip
        self.template = place.runs / "template"

    def __call__(self, command: Command) -> tuple[float, Any]:
        if command.name not in self._known:
            place = Place(self._folder / command.name)
            command.prepare(place, self.template)
            took_s = 20.0 if isinstance(command, Sandbox) else place.run(command.arguments(place))
            self._known[command.name] = took_s, command.outcome(place)
        return self._known[command.name]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    for needed in ("duckdb", "matplotlib", "tensorboardX", "arch"):
        pytest.importorskip(needed, reason="needs the extras of all commands")
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


def kill(place: Place, command: Command, delay_s: float) -> float | None:
    """Starts the command and kills it, and nothing of it may live on. If it was over before: after how long."""
    process, started = place.start(command.arguments(place)), time.monotonic()
    try:
        process.wait(delay_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    killed, took_s = process.wait() == -signal.SIGKILL, time.monotonic() - started
    assert killed or process.returncode == 0, place.reported()
    until = time.monotonic() + GONE_S
    while left := session_members(process.pid):
        assert time.monotonic() < until, f"{left} live on without their parent"
        time.sleep(0.1)
    return None if killed else took_s


@pytest.mark.slow
@pytest.mark.timeout(3 * MAX_S)
@pytest.mark.parametrize("case", range(NUM_CASES))
def test_a_kill_at_any_moment_of_any_command_costs_nothing_that_was_done(
    case: int, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    chance = random.Random(SEED + case)
    command = command_of(case)
    took_s, expected = undisturbed(command)
    for number in range(5):
        place = Place(tmp_path / str(number))
        command.prepare(place, undisturbed.template)
        delay_s = chance.uniform(0.0, took_s)
        print(f"{command.name}: killed after {delay_s:.3f} of {took_s:.1f} s, seed {SEED} + {case}")
        over_s = kill(place, command, delay_s)
        if over_s is None:
            break
        took_s = min(took_s, over_s)  # the machine was busier when it was first measured
    else:
        raise AssertionError(f"{command.name} was over before each of five kills")
    command.check(place)
    command.again(place)
    assert command.outcome(place) == expected
    assert list(place.here.iterdir()) == []
    assert not list(place.temporary.glob("esper-*")) or isinstance(command, Sandbox)
