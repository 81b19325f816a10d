"""Random damage of checkpoints whose hashes all fit: refused, or loaded as it is written and trained on; never a crash.

Whoever signs a checkpoint anew can put other possible values into it. What must not happen: a traceback, a hang, memory
without bound, parts that differ from what the files say, or a file outside the run folder.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from esper.leyline import CheckpointError
from esper.leyline.rundir import CHECKPOINTS_DIR, MANIFEST_FILE
from esper.scripts.cli import main
from esper.simic.run.run_state import load_policy
from esper.simic.run.session import RunStart, start_again

NUM_CASES = int(os.environ.get("ESPER_DAMAGED_CHECKPOINTS", "500"))
FIRST_SEED = int(os.environ.get("ESPER_DAMAGE_SEED", "0"))
"""Case n is drawn with this plus n, so that a case of a failed run can be repeated alone."""
MAX_S = 300
MAX_EXTRA_KB = 1_500_000
ROUNDS = 2
FLAGS = (
    "--task", "digits_mlp", "--envs", "2", "--minibatches", "2", "--episode-length", "3", "--seed", "1",
    "--worker-kind", "inline", "--workers", "1", "--checkpoint-s", "0", "--calibration-runs", "0",
)  # fmt: skip
STATE, AGENT, POLICY, OPTIMIZER = "state.json", "agent.json", "policy.safetensors", "optimizer.safetensors"


class Checkpoint:
    """The files of one checkpoint in memory, to be changed and signed anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST_FILE}
        self.manifest: dict[str, Any] = json.loads((folder / MANIFEST_FILE).read_text())
        self.entries: dict[str, dict[str, Any]] = {}
        """Entries of the manifest that are to lie about their file."""

    def write(self) -> None:
        """Puts it in place of what was there, with sizes and hashes that fit."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        for name, content in self.files.items():
            (self.folder / name).write_bytes(content)
        files = {
            name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in self.files.items()
        }
        rest = {key: value for key, value in self.manifest.items() if key != "sha256"}
        if isinstance(rest.get("files"), dict):
            rest["files"] = files | self.entries
        signed = {**rest, "sha256": hashlib.sha256(canonical(rest)).hexdigest()}
        (self.folder / MANIFEST_FILE).write_bytes(canonical(signed))


def canonical(values: object) -> bytes:
    return json.dumps(values, indent=1, sort_keys=True).encode()


# ---- damage of JSON

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 7, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e-320, 1e308, -1e308,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
WORDS: tuple[Any, ...] = ("", "a", "1", "nan", "ppo", "../../x", "\x00", "\ud800", "x" * 100_000, "digits_blind")
SHAPES: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"a": 1}, [None], [1.0, "a"], [0] * 1_000)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside a JSON value."""
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def change_json(content: Any, rng: random.Random) -> Any:
    """One to three changes at random places, as often near the root as in a long list."""
    content = copy.deepcopy(content)
    for _ in range(rng.randint(1, 3)):
        paths = list(places(content))
        if not paths:
            return rng.choice(SHAPES)
        depth = rng.choice(sorted({len(path) for path in paths}))
        *way, last = rng.choice([path for path in paths if len(path) == depth])
        parent = content
        for key in way:
            parent = parent[key]
        match rng.randrange(8):
            case 0 | 1 | 2:
                parent[last] = rng.choice(NUMBERS)
            case 3:
                parent[last] = rng.choice(WORDS + SHAPES)
            case 4:
                del parent[last]
            case 5 if isinstance(parent, dict):
                parent[rng.choice(("extra", "", "mean", "next_round"))] = rng.choice(NUMBERS + SHAPES)
            case 5:
                parent.append(copy.deepcopy(parent[last]))
            case 6 if isinstance(parent[last], int | float):
                parent[last] = rng.choice((parent[last] + 1, parent[last] - 1, parent[last] * 1.5, str(parent[last])))
            case 6 if isinstance(parent[last], list):
                rng.shuffle(parent[last])
            case _:
                other = rng.choice(paths)
                place = content
                for key in other[:-1]:
                    place = place[key]
                parent[last] = copy.deepcopy(place[other[-1]])
    return content


def damage_json(name: str) -> Callable[[Checkpoint, Checkpoint, random.Random], None]:
    def damage(newest: Checkpoint, older: Checkpoint, rng: random.Random) -> None:
        newest.files[name] = json.dumps(change_json(json.loads(newest.files[name]), rng)).encode()

    return damage


def damage_manifest(newest: Checkpoint, older: Checkpoint, rng: random.Random) -> None:
    entries = {key: value for key, value in newest.manifest.items() if key != "sha256"}
    changed = change_json(entries, rng)
    if not isinstance(changed, dict):
        changed = {}
    if isinstance(changed.get("files"), dict):
        newest.entries = {k: v for k, v in changed["files"].items() if v != entries["files"].get(k)}
    newest.manifest = changed


def damage_json_text(newest: Checkpoint, older: Checkpoint, rng: random.Random) -> None:
    """What no encoder writes: nesting, doubled keys, other encodings, bytes that are no text."""
    name = rng.choice((STATE, AGENT))
    text = newest.files[name]
    depth = rng.choice((100, 2_000, 100_000))
    newest.files[name] = rng.choice(
        (
            b"[" * depth + b"]" * depth,
            text.replace(b": 2,", b": " + b'{"a":' * depth + b"1" + b"}" * depth + b",", 1),
            b'{"config": {}, ' + text[1:],
            text.rstrip()[:-1] + b', "counters": {}}',
            text.decode().encode("utf-16"),
            b"\xef\xbb\xbf" + text,
            text.replace(b'"', b"\xff", 1),
            text + text,
            b"",
            b"null",
            text[: rng.randrange(len(text))],
        )
    )


# ---- damage of tensors


def change_tensor(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    tensor = tensor.clone()
    if tensor.numel() and rng.random() < 0.5:
        flat = tensor.view(-1)
        value = rng.choice((float("nan"), float("inf"), 3e38, -3e38, 1e30, 1e-40, -1.0, 0.0))
        flat[rng.randrange(flat.numel())] = value
        return tensor
    return rng.choice(
        (
            lambda: tensor.t().contiguous() if tensor.dim() == 2 else tensor.unsqueeze(0),
            lambda: tensor.flatten(),
            lambda: tensor[:0] if tensor.dim() else tensor.reshape(1, 1),
            lambda: torch.cat([tensor, tensor]) if tensor.dim() else tensor.repeat(2),
            lambda: tensor.double() if tensor.dtype != torch.float64 else tensor.float(),
            lambda: tensor.half(),
            lambda: tensor.to(torch.int64),
            lambda: tensor.bool(),
            lambda: -tensor,
            lambda: tensor * 1e12,
        )
    )()


def damage_tensors(name: str) -> Callable[[Checkpoint, Checkpoint, random.Random], None]:
    def damage(newest: Checkpoint, older: Checkpoint, rng: random.Random) -> None:
        tensors = load_tensors(newest.files[name])
        names = sorted(tensors)
        match rng.randrange(8):
            case 0:
                del tensors[rng.choice(names)]
            case 1:
                tensors[rng.choice(("", "extra", "trunk", "trunk.0.weight.x"))] = torch.zeros(3)
            case 2:
                one, other = rng.sample(names, 2)
                tensors[one], tensors[other] = tensors[other], tensors[one]
            case 3:
                tensors = {}
            case _:
                for chosen in rng.sample(names, rng.randint(1, 3)):
                    tensors[chosen] = change_tensor(tensors[chosen], rng)
        metadata = rng.choice((None, {"format": "pt"}, {"x" * 1_000: "y" * 100_000}))
        newest.files[name] = save_tensors(tensors, metadata)

    return damage


def damage_tensor_bytes(newest: Checkpoint, older: Checkpoint, rng: random.Random) -> None:
    """Safetensors files that no library wrote."""
    name = rng.choice((POLICY, OPTIMIZER))
    content = bytearray(newest.files[name])
    (length,) = struct.unpack("<Q", content[:8])
    match rng.randrange(7):
        case 0:
            for _ in range(rng.randint(1, 20)):
                content[rng.randrange(8 + length)] ^= 1 << rng.randrange(8)
        case 1:
            for _ in range(rng.randint(1, 20)):
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        case 2:
            content[:8] = struct.pack("<Q", rng.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1)))
        case 3:
            del content[rng.randrange(len(content)) :]
        case 4:
            content += rng.randbytes(rng.randint(1, 1_000))
        case 5:
            header = change_json(json.loads(content[8 : 8 + length]), rng)
            text = json.dumps(header).encode()
            content = bytearray(struct.pack("<Q", len(text)) + text + content[8 + length :])
        case 6:
            depth = 50_000
            text = b'{"a":' * depth + b"1" + b"}" * depth
            content = bytearray(struct.pack("<Q", len(text)) + text + content[8 + length :])
    newest.files[name] = bytes(content)


def damage_parts(newest: Checkpoint, older: Checkpoint, rng: random.Random) -> None:
    """Whole files of another round, or that are none of a checkpoint's."""
    name = rng.choice((STATE, AGENT, POLICY, OPTIMIZER))
    match rng.randrange(5):
        case 0:
            newest.files[name] = older.files[name]
        case 1:
            del newest.files[name]
        case 2:
            newest.files[rng.choice(("extra.json", "x.pt", ".hidden", "a" * 200))] = b"something"
        case 3:
            newest.files[name] = newest.files[rng.choice((STATE, AGENT, POLICY, OPTIMIZER))]
        case 4:
            newest.entries[rng.choice(("../../outside", "/etc/hostname", "x/y", "", "."))] = {
                "size": 3,
                "sha256": hashlib.sha256(b"abc").hexdigest(),
            }


DAMAGES: tuple[Callable[[Checkpoint, Checkpoint, random.Random], None], ...] = (
    damage_json(STATE),
    damage_json(STATE),
    damage_json(AGENT),
    damage_manifest,
    damage_json_text,
    damage_tensors(POLICY),
    damage_tensors(OPTIMIZER),
    damage_tensor_bytes,
    damage_parts,
)


# ---- the test


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    main(["train", "ppo", *FLAGS, "--rounds", str(ROUNDS), "--runs", str(runs), "--run-id", "a"])
    return runs / "a"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_as_written(start: RunStart, files: dict[str, bytes]) -> None:
    """What is loaded is what the files say, part by part."""
    assert start.saved is not None
    state, agent = json.loads(files[STATE]), start.saved.agent
    assert json.loads(start.saved.config.to_json()) == state["config"]
    assert json.loads(msgspec.json.encode(start.saved.facts)) == state
    assert agent is not None
    again = agent.to_files()
    assert json.loads(again[AGENT]) == json.loads(files[AGENT])
    for name in (POLICY, OPTIMIZER):
        found, written = load_tensors(again[name]), load_tensors(files[name])
        assert found.keys() == written.keys()
        for key, tensor in written.items():
            assert torch.equal(found[key], tensor), key
            assert bool(tensor.isfinite().all()), key


def hang(*_: object) -> None:
    raise AssertionError(f"took more than {MAX_S} s")


@pytest.mark.slow
@pytest.mark.parametrize("case", range(NUM_CASES))
def test_no_damage_of_a_signed_checkpoint_is_a_crash_a_hang_or_a_wrong_load(
    case: int,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(FIRST_SEED + case)
    home, runs = tmp_path / "home", tmp_path / "runs"
    home.mkdir()
    monkeypatch.chdir(home)
    run = Path(shutil.copytree(finished, runs / "a"))
    newest, older = (Checkpoint(run / CHECKPOINTS_DIR / f"ckpt-{index:08d}") for index in (ROUNDS, ROUNDS - 1))
    before = json.loads(newest.files[STATE])["config"]
    damage = DAMAGES[case % len(DAMAGES)]
    damage(newest, older, rng)
    newest.write()
    used_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGALRM, hang)
    signal.alarm(MAX_S)
    try:
        start = start_again(run, {})
        assert start.rounds_done in (ROUNDS, ROUNDS - 1)
        same = True
        if start.rounds_done == ROUNDS:
            assert start.rejected == ()
            check_as_written(start, newest.files)
            same = json.loads(newest.files[STATE])["config"] == before
        else:
            assert [one.name for one in start.rejected] == [newest.folder.name]
        try:
            policy = load_policy(run)
            assert policy.rounds == start.rounds_done
        except CheckpointError:
            assert start.saved is not None
            assert start.saved.agent is None
        code = 0
        if same:  # another configuration may ask for more work than a test has time for
            try:
                main(["train", "--resume", str(run), "--rounds", str(ROUNDS + 1)])
            except SystemExit as stopped:
                code = int(stopped.code or 0)
            reported = capsys.readouterr()
            assert "Traceback" not in reported.err
            # Weights that are possible and absurd may diverge, which has its own code.
            assert code in ((0, 5) if start.rounds_done == ROUNDS else (0,)), reported.err
            if code == 0:
                assert start_again(run, {}).rounds_done == ROUNDS + 1
    finally:
        signal.alarm(0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used_kb < MAX_EXTRA_KB
    assert {path.name for path in tmp_path.iterdir()} == {"home", "runs"}
    assert list(home.iterdir()) == []
    assert [path.name for path in runs.iterdir()] == ["a"]
