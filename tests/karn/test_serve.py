"""`esper serve` on the wire: what it answers, to whom, and that it answers nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from urllib.parse import quote

import pytest

pytest.importorskip("starlette", reason="esper serve needs the extra `serve`")
pytest.importorskip("uvicorn", reason="esper serve needs the extra `serve`")

from esper.karn.history import read_history
from esper.karn.replay import replay
from esper.karn.serve import catalogue, channels
from esper.karn.serve.app import make_app
from esper.karn.serve.catalogue import Catalogue
from esper.leyline import Severity
from esper.nissa.heartbeat import HeartbeatWriter
from tests.karn.logs import (
    LogWriter,
    T,
    anomaly,
    coalition,
    ended,
    epoch_completed,
    round_completed,
    slot,
    started,
    write_round,
    write_run,
)
from tests.karn.serving import Served, serving
from tests.karn.test_monitor import as_written

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence_data" / "digits_blind"
TOKEN = "a-token-of-24-characters"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of them several levels down, and an evaluation."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "mine", rounds=6)
    log = write_run(root / "studies" / "demo" / "policy-0", rounds=4, run="policy-0", finish=False)
    here = {"round": 4, "episode": 4, "env": 0, "epoch": 0}
    log.emit(T.EPOCH_COMPLETED, epoch_completed(slots={"r0c0": slot()}), **here)
    log.emit(T.COALITION_MEASURED, coalition(), **here)
    log.emit(T.ANOMALY_DETECTED, anomaly(value=float("inf")), Severity.WARNING, round=4)
    as_written(root / "mine")
    as_written(root / "studies" / "demo" / "policy-0")
    (root / "studies" / "demo" / "evaluation").mkdir()
    for name in ("summary.json", "results.csv"):
        shutil.copy(EVIDENCE / name, root / "studies" / "demo" / "evaluation" / name)
    for name in ("frontier.png", "compute.png"):
        (root / "studies" / "demo" / "evaluation" / name).write_bytes(b"\x89PNG not really")
    (root / "secret.txt").write_text("nobody asked for this")
    return root


@pytest.fixture(scope="module")
def served(folder: Path):  # type: ignore[no-untyped-def]
    with serving(folder) as found:
        yield found


def test_the_list_names_every_run_and_evaluation_with_its_facts(served: Served) -> None:
    found = served.json("/api/runs")
    assert [run["id"] for run in found["runs"]] == ["mine", "studies/demo/policy-0"]
    mine, other = found["runs"]
    assert (mine["state"], mine["num_rounds_done"], mine["num_rounds"]) == ("completed", 6, 20)
    assert (mine["task"], mine["group"], mine["accuracy_pct"], mine["best_accuracy_pct"]) == (
        "digits_mlp",
        "main",
        78.0,
        91.5,
    )
    assert (other["state"], other["num_rounds_done"]) == ("died", 4)
    (evaluation,) = found["evaluations"]
    assert (evaluation["id"], evaluation["best_arm"]) == ("studies/demo/evaluation", "static_1300")
    assert "growing pays: WORSE" in evaluation["outcome"]


def test_a_run_is_shown_as_its_log_tells_it(served: Served, folder: Path) -> None:
    shown = served.json(f"/api/run?run={quote('studies/demo/policy-0', safe='')}")
    history = read_history(replay(folder / "studies" / "demo" / "policy-0"))
    assert shown["overview"]["verdict"]["state"] == "died"
    assert shown["overview"]["rounds_done"] == 4
    rounds = shown["curves"]["rounds"]
    assert rounds["round"] == [0, 1, 2, 3]
    assert rounds["accuracy_mean_pct"] == [data.accuracy_mean_pct for _, data in history.rounds]
    assert rounds["loss_mean"] == [0.4] * 4
    assert [row["env"] for row in shown["hosts"]["rows"]] == [0, 1]
    assert shown["hosts"]["rows"][0]["slots"] == {"r0c0": {"stage": "TRAINING"}}
    assert shown["policy"]["update"]["heads"]["op"]["grad_state"] == "ok"
    assert len(shown["seeds"]["seeds"]) == len(history.seeds)
    assert shown["seeds"]["seeds"][0]["spans"] == [["GERMINATED", 0, 0], ["TRAINING", 0, 2], ["FOSSILIZED", 2, 3]]
    assert shown["events"]["warnings"][0]["text"].startswith("entered: clip_fraction inf")
    assert {event["type"] for event in shown["events"]["steps"]} == {
        "EPOCH_COMPLETED",
        "ACTION_TAKEN",
        "COALITION_MEASURED",
    }
    host = served.json(f"/api/host?run={quote('studies/demo/policy-0', safe='')}&env=0")
    assert host["coalition"]["rows"][0]["accuracy_pct"] == 78.0
    assert host["slots"]["r0c0"]["contribution_pp"] == 0.5


def test_runs_are_compared_by_round_as_they_finally_happened(tmp_path: Path) -> None:
    log = write_run(tmp_path / "a", rounds=3, finish=False)
    del log
    again = LogWriter(tmp_path / "a", attempt=1, first_seq=30)
    again.emit(T.RUN_STARTED, started(resumed_from="ckpt-00000001"))
    again.emit(T.ROUND_COMPLETED, round_completed(accuracy_mean_pct=11.0), round=1)
    as_written(tmp_path / "a")
    write_run(tmp_path / "b", rounds=2, run="b")
    as_written(tmp_path / "b")
    with serving(tmp_path) as server:
        a, b = server.json("/api/compare?run=a&run=b&run=none")
        assert (a["round"], a["accuracy_pct"]) == ([0, 1], [72.0, 11.0])
        assert (b["task"], b["round"]) == ("digits_mlp", [0, 1])
        assert server.ask("/api/compare")[0] == 400
        assert server.ask("/api/compare?" + "&".join(f"run={i}" for i in range(25)))[0] == 400


def test_an_evaluation_has_its_summary_and_pictures(served: Served) -> None:
    name = quote("studies/demo/evaluation", safe="")
    found = served.json(f"/api/evaluation?id={name}")
    assert found["summary"]["subject"] == "ppo_greedy"
    assert found["pictures"] == ["frontier.png", "compute.png"]
    status, headers, content = served.ask(f"/api/picture?id={name}&name=frontier.png")
    assert (status, headers["content-type"]) == (200, "image/png")
    assert content.startswith(b"\x89PNG")
    assert served.ask(f"/api/picture?id={name}&name=paired.png")[0] == 404


@pytest.mark.parametrize(
    "path",
    [
        "/api/run?run=",
        "/api/run?run=..",
        "/api/run?run=/etc",
        "/api/run?run=mine/../mine",
        "/api/run?run=secret.txt",
        "/api/run?run=%00",
        "/api/host?run=mine&env=-1",
        "/api/host?run=mine&env=99",
        "/api/host?run=mine&env=%EF%BC%91",
        "/api/evaluation?id=mine",
        "/api/picture?id=studies%2Fdemo%2Fevaluation&name=../../../secret.txt",
        "/api/picture?id=studies%2Fdemo%2Fevaluation&name=results.csv",
        "/secret.txt",
        "/..%2f..%2fsecret.txt",
        "/static/app.js",
        "/__init__.py",
    ],
)
def test_no_request_reaches_anything_that_is_not_listed(path: str, served: Served) -> None:
    status, _, content = served.ask(path)
    assert status == 404
    assert b"nobody asked" not in content


@pytest.mark.parametrize("path", ["/", "/app.js", "/style.css", "/api/runs", "/api/run?run=none", "/nothing"])
def test_every_answer_tells_browsers_what_a_page_may_do(path: str, served: Served) -> None:
    _, headers, _ = served.ask(path)
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in headers


def test_pages_load_nothing_from_elsewhere() -> None:
    folder = Path(catalogue.__file__).parent / "static"
    for file in folder.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text, file
        assert "https:" not in text, file
        assert "innerHTML" not in text, file


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE"])
def test_nothing_can_be_written(method: str, served: Served) -> None:
    for path in ("/", "/api/runs", "/api/run?run=mine"):
        assert served.ask(path, method=method)[0] == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:1234", 200),  # an ssh tunnel has another port
        ("LOCALHOST", 200),
        ("[::1]:8050", 200),
        ("evil.example", 421),
        ("evil.example:8050", 421),
        ("localhost.evil.example", 421),
        ("10.0.0.7", 421),
        ("", 421),
        ("[", 421),
    ],
)
def test_a_name_that_points_here_from_elsewhere_is_refused(host: str, status: int, served: Served) -> None:
    assert served.ask("/api/runs", host=host)[0] == status


def test_pages_of_other_sites_cannot_use_it(served: Served) -> None:
    assert served.ask("/api/stream", Sec_Fetch_Site="cross-site")[0] == 403
    assert served.ask("/", Sec_Fetch_Site="cross-site")[0] == 200  # somebody followed a link


def test_another_address_is_refused_without_the_token(folder: Path) -> None:
    with serving(folder, token=TOKEN, address="0.0.0.0") as server:
        for path in ("/", "/app.js", "/api/runs", "/api/stream", "/nothing"):
            status, _, content = server.ask(path)
            assert status == 401
            assert b"Authorization: Bearer" in content
        assert server.ask("/?token=wrong")[0] == 401
        assert server.ask("/", Authorization="Bearer " + TOKEN[:-1])[0] == 401
        assert server.ask(f"/api/runs?token={TOKEN}")[0] == 401, "a token in a link must not stay there"
        assert server.ask("/api/runs", Authorization=f"Bearer {TOKEN}")[0] == 200
        status, headers, _ = server.ask(f"/?token={TOKEN}")
        assert (status, headers["location"]) == (303, "/")
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert server.ask("/api/runs", Cookie=cookie.split(";")[0])[0] == 200
        assert server.ask("/api/runs", Cookie=cookie.split("=")[0] + "=x")[0] == 401
        assert server.ask("/api/runs", host="10.0.0.7:80", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert server.ask("/api/runs", host="evil.example", Authorization=f"Bearer {TOKEN}")[0] == 421


def test_a_stream_brings_everything_and_then_what_changes(tmp_path: Path) -> None:
    log = write_run(tmp_path / "live", rounds=2, finish=False)
    with serving(tmp_path) as server, server.stream("?run=live") as messages:
        seen: dict[str, object] = {}
        while {"catalogue", "overview", "curves", "hosts", "policy", "seeds", "events"} - set(seen):
            message = next(messages)
            seen[message["section"]] = message["data"]
            assert message["run"] == ("" if message["section"] == "catalogue" else "live")
        assert seen["curves"]["rounds"]["round"] == [0, 1]  # type: ignore[index]
        write_round(log, 2)
        log.emit(T.RUN_ENDED, ended(num_rounds_total=3))
        while True:
            message = next(messages)
            seen[message["section"]] = message["data"]
            done = seen["overview"]["rounds_done"], len(seen["curves"]["rounds"]["round"])  # type: ignore[index]
            if done == (3, 3) and seen["catalogue"]["runs"][0]["state"] == "completed":  # type: ignore[index]
                break


def test_a_run_that_becomes_unreadable_is_reported_and_the_server_goes_on(tmp_path: Path) -> None:
    write_run(tmp_path / "a", rounds=1)
    with serving(tmp_path) as server:
        assert server.json("/api/run?run=a")["overview"]["rounds_done"] == 1
        (tmp_path / "a" / "events.jsonl").touch()
        with server.stream("?run=a") as messages:
            while (message := next(messages))["section"] != "error":
                pass
        assert "format 1" in message["data"]["error"]
        (run,) = server.json("/api/runs")["runs"]
        assert (run["state"], "format 1" in run["note"]) == ("unreadable", True)


def test_a_long_log_is_shown_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "long", rounds=40)
    as_written(tmp_path / "long")
    monkeypatch.setattr(channels, "READ_S", 0.0)
    monkeypatch.setattr("esper.karn.monitor.STEP_BYTES", 200_000)
    monkeypatch.setattr("esper.karn.serve.channels.FOLLOW_S", 0.05)
    with serving(tmp_path) as server, server.stream("?run=long") as messages:
        reported = []
        while not reported or reported[-1] is not None:
            message = next(messages)
            if message["section"] == "overview":
                reported.append(message["data"]["reading"])
                assert (message["data"]["verdict"] is None) == (reported[-1] is not None)
    assert len(reported) > 2
    assert reported[0].startswith("reading the log: ")


def test_what_a_run_does_is_known_from_the_ends_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "TAIL_BYTES", 64)
    log = write_run(tmp_path / "a", rounds=3, finish=False)
    for epoch in range(50):
        log.emit(T.EPOCH_COMPLETED, epoch_completed(), round=3, episode=3, env=0, epoch=epoch)
    log.write(b'{"type":"EPOCH')
    found = catalogue.summarise_run("a", tmp_path / "a", None)
    assert (found.state, found.num_rounds_done, found.last_wall) == ("died", 3, 1_767_225_600.0 + log.seq - 1)
    HeartbeatWriter(tmp_path / "a", run_id="a", attempt=0, every_s=0.0).beat(
        last_seq=0, dropped={}, num_held=0, error=None
    )
    (listed,) = Catalogue(tmp_path).look().runs
    assert listed.state == "running"
    resumed = LogWriter(tmp_path / "a", attempt=1, first_seq=60)
    resumed.emit(T.RUN_STARTED, started(resumed_from="ckpt"))
    found = catalogue.summarise_run("a", tmp_path / "a", None)
    assert found.num_rounds_done is None, "rounds that are played again are not done"


def test_a_damaged_or_foreign_folder_does_not_hide_the_others(tmp_path: Path) -> None:
    write_run(tmp_path / "good", rounds=1)
    (tmp_path / "empty" / "events").mkdir(parents=True)
    write_run(tmp_path / "noise", rounds=1)
    (path,) = (tmp_path / "noise" / "events").glob("*.jsonl")
    path.write_bytes(b"\xff\xfe noise\n" * 9)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "events").symlink_to(tmp_path / "good" / "events")
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "summary.json").write_text("[1, 2")
    (tmp_path / "evaluation" / "results.csv").write_text("")
    found = Catalogue(tmp_path).look()
    states = {run.id: run.state for run in found.runs}
    assert states == {"good": "completed", "empty": "empty", "noise": "unreadable", "linked": "unreadable"}
    facts = b'{"task": "a", "subject": "b", "arms": {}, "num_seeds": '
    for text in (b"[1, 2", facts + b"[" * 100_000, facts + b'1, "x": ' + b"[" * 100_000, facts + b"%d}" % 10**30):
        (tmp_path / "evaluation" / "summary.json").write_bytes(text)
        (evaluation,) = Catalogue(tmp_path).look().evaluations
        assert evaluation.outcome is not None
        assert evaluation.outcome.startswith("cannot be read")


def test_one_run_can_be_served_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "mine", rounds=1)
    assert [run.id for run in Catalogue(tmp_path / "mine").look().runs] == ["mine"]
    with pytest.raises(ValueError, match="not a folder"):
        make_app(tmp_path / "none", address="127.0.0.1", token=None)


def test_json_is_json_whatever_was_measured(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "a")
    log.emit(T.RUN_STARTED, started())
    log.emit(T.ROUND_COMPLETED, round_completed(return_mean=float("nan")), round=0)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    with serving(tmp_path) as server:
        for path in ("/api/runs", "/api/run?run=a", "/api/compare?run=a"):
            json.loads(server.ask(path)[2], parse_constant=refuse)
