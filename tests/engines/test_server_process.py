"""A server's processes: none is left, however the server or the process that started it ends. FAULTS 28, 59."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from support.vllm_stub import completion

from bapo.engines import client as server_client
from bapo.engines import vllm_server
from bapo.engines.auth import MAX_BODY_BYTES, KeyOnEveryRoute
from bapo.engines.server_process import ServerProcess
from bapo.engines.vllm_server import VLLMServerRollouts
from bapo.engines.watchdog import is_alive, kill_session, members
from bapo.protocols import EngineError
from bapo.types import Request, SamplingParams

KEY = "sentinel-key-of-the-tests"
STUB = Path(__file__).parents[1] / "support" / "vllm_stub.py"
SAMPLING = SamplingParams(temperature=0.6, max_tokens=3)
WEIGHTS = {"w": torch.ones(2)}

# A process with a child that takes no notice of SIGTERM.
FAMILY = """
import subprocess, time
subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 60; sleep 60"])
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def no_server_around(monkeypatch):
    for name in ("BAPO_VLLM_KEY", "BAPO_VLLM_URLS", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(server_client, "BACKOFF_S", (0.02, 0.1))
    monkeypatch.setattr("bapo.engines.server_process.GRACE_S", 0.5)


@pytest.fixture
def family(tmp_path):
    server = ServerProcess([sys.executable, "-c", FAMILY], os.environ, tmp_path / "log")
    server.start()
    server.wait_until(lambda: len(members(server.pid)) == 3, 20)  # python, sh, sleep
    yield server
    server.stop()


def gone(session: int, seconds: float = 10.0) -> bool:
    """Is no process of the session left, or will there be none within `seconds`?"""
    deadline = time.monotonic() + seconds
    while members(session) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not members(session)


# Processes.


def test_a_server_has_a_session_of_its_own_which_ctrl_c_does_not_reach(family):
    assert os.getsid(family.pid) == family.pid != os.getsid(0)
    assert os.getpgid(family.pid) != os.getpgid(0)
    assert not family.died()


def test_stop_ends_those_too_that_ignore_sigterm(family):
    session, guard = family.pid, family._guard
    family.stop()
    assert members(session) == []
    assert guard.returncode == 0
    family.stop()
    family.start()
    assert family.pid != session


def test_stop_needs_no_guard(family):
    session = family.pid
    family._guard.kill()
    family.stop()
    assert members(session) == []


def test_kill_9_of_the_main_process_takes_the_others_along(family):
    os.kill(family.pid, signal.SIGKILL)
    assert gone(family.pid)
    assert family.died()


def test_a_worker_that_ends_is_noticed(family, monkeypatch):
    (worker,) = [p for p in members(family.pid) if p.name() == "sleep"]
    family._workers = [worker]
    assert not family.died()
    worker.kill()
    worker.wait(5)
    assert family.died()


def test_kill_9_of_the_process_that_started_it_takes_all_along(tmp_path):
    script = f"""
import os, sys, time
from pathlib import Path
from bapo.engines.server_process import ServerProcess
server = ServerProcess([sys.executable, "-c", {FAMILY!r}], os.environ, Path({str(tmp_path / "log")!r}))
server.start()
print(server.pid, server._guard.pid, flush=True)
time.sleep(60)
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    session, guard = map(int, owner.stdout.readline().split())
    deadline = time.monotonic() + 10
    while len(members(session)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(members(session)) == 3
    owner.kill()
    owner.wait()
    assert gone(session)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(guard) and is_alive(psutil.Process(guard)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not (psutil.pid_exists(guard) and is_alive(psutil.Process(guard)))


def test_a_session_is_killed_with_what_it_still_starts():
    forks = subprocess.Popen(["sh", "-c", "while true; do sleep 30 & done"], start_new_session=True, stderr=subprocess.DEVNULL)
    time.sleep(0.1)
    assert kill_session(forks.pid) == []
    forks.wait()
    assert members(forks.pid) == []


def test_shared_memory_of_a_killed_server_is_taken_away(tmp_path):
    script = """
import time
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=9)
print(segment.name, flush=True)
time.sleep(60)
"""
    server = ServerProcess([sys.executable, "-c", script], os.environ, tmp_path / "log")
    server.start()
    server.wait_until(lambda: server.log.read_text().endswith("\n"), 20)
    segment = Path("/dev/shm") / server.log.read_text().strip()
    assert segment.exists()
    server._guard.kill()
    assert kill_session(server.pid) == []
    assert not segment.exists()
    server.stop()


def test_a_server_that_does_not_come_up_says_why(tmp_path):
    command = [sys.executable, "-c", f"print('no such model', '{KEY}'); raise SystemExit(7)"]
    server = ServerProcess(command, os.environ, tmp_path / "log", secret=KEY)
    server.start()
    with pytest.raises(EngineError, match=r"ended with exit code 7 before it was ready\. .*\nno such model \*\*\*"):
        server.wait_until(lambda: False, 20)
    server.stop()
    slow = ServerProcess([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, tmp_path / "other")
    slow.start()
    with pytest.raises(EngineError, match=r"start_timeout_s is 0\.5, .* Its log is empty"):
        slow.wait_until(lambda: False, 0.5)
    slow.stop()


# The run's own server.


@pytest.fixture
def start(model_folder, monkeypatch, tmp_path):
    """Starts engines whose server is the stub, as a process of its own."""
    made = []
    monkeypatch.setattr(VLLMServerRollouts, "require_vllm", lambda self: None)

    def make(*stub_arguments: str, **options):
        def command(arguments, host, port, python=sys.executable):
            assert host == "127.0.0.1"
            return [python, str(STUB), str(port), *stub_arguments]

        monkeypatch.setattr(vllm_server, "server_command", command)
        fixed = {"sync_dir": str(tmp_path), "start_timeout_s": 20.0, "request_timeout_s": 5.0}
        made.append(VLLMServerRollouts(**fixed, **options)(model_folder))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def requests(n: int) -> list[Request]:
    return [Request(f"p{i}", 0, 100 + i, (3, 4)) for i in range(n)]


def right(rollouts) -> bool:
    answers = [completion({"prompt": [3, 4], "seed": 100 + i, "max_tokens": 3}) for i in range(len(rollouts))]
    return [list(r.response_ids) for r in rollouts] == [answer["choices"][0]["token_ids"] for answer in answers]


def test_a_server_of_the_run_has_a_random_key_that_only_its_environment_holds(start, tmp_path):
    engine = start()
    key = engine.client.key
    assert len(key) >= 32
    assert start().client.key != key
    process = psutil.Process(engine.server.pid)
    assert process.environ()["BAPO_VLLM_KEY"] == key
    shown = [*process.cmdline(), *psutil.Process(engine.server._guard.pid).cmdline()]
    shown += [repr(value) for value in (engine, engine.client, engine.server, engine.options)]
    assert not [text for text in shown if key in text]
    assert key not in engine.server.tail()
    assert engine.weights.folder.stat().st_mode & 0o077 == 0
    assert "started with ***" in engine.server.tail()


def test_the_ranks_that_this_process_starts_find_the_server_until_it_is_closed(start, monkeypatch):
    monkeypatch.setenv("MY_KEY", "before")
    engine = start(api_key_env="MY_KEY")
    assert os.environ["BAPO_VLLM_URLS"] == engine.client.urls[0]
    assert os.environ["MY_KEY"] == engine.client.key
    session = engine.server.pid
    engine.close()
    assert "BAPO_VLLM_URLS" not in os.environ
    assert os.environ["MY_KEY"] == "before"
    assert members(session) == []
    assert not engine.weights.folder.exists()


def test_a_server_that_cannot_serve_is_ended_at_once(start, tmp_path, monkeypatch):
    sessions = []
    begin = ServerProcess.start
    monkeypatch.setattr(ServerProcess, "start", lambda self: (begin(self), sessions.append(self.pid)))
    with pytest.raises(ValueError, match="has max_model_len=64; it must be 32"):
        start(max_model_len=32)
    assert members(sessions[0]) == []
    assert list(tmp_path.iterdir()) == []
    assert "BAPO_VLLM_URLS" not in os.environ


def test_a_server_that_dies_while_it_draws_is_started_again_and_nothing_else_changes(start, tmp_path, caplog):
    engine = start("5", str(tmp_path / "has died"), concurrency=1)
    engine.load_weights(WEIGHTS.items(), 3)
    session, url = engine.server.pid, os.environ["BAPO_VLLM_URLS"]
    drawn = engine.generate(requests(20), SAMPLING)
    assert (tmp_path / "has died").exists()
    assert right(drawn)
    assert len(drawn) == 20
    assert engine.counters["rollout/engine_restarts"] == 1
    assert engine.server.pid != session
    assert engine.client.urls == (url,)  # where the other ranks look
    assert engine.server.log.read_text().count("drew") == 20  # nothing twice
    assert "the vLLM server is gone" in caplog.text
    assert "restart 1 of at most 2. The end of its log:" in caplog.text
    assert engine.client.key not in caplog.text
    engine.generate(requests(2), SAMPLING)
    assert engine.counters == {"rollout/retries": 0.0, "rollout/engine_restarts": 0.0}


def test_between_two_calls_too_until_there_were_enough_restarts(start):
    engine = start(max_restarts=2, lora_sync="native")
    engine.load_weights(WEIGHTS.items(), 3)
    os.kill(engine.server.pid, signal.SIGKILL)
    assert right(engine.generate(requests(3), SAMPLING))
    os.kill(engine.server.pid, signal.SIGKILL)
    engine.load_weights(WEIGHTS.items(), 4)
    assert engine.generate(requests(1), SAMPLING)[0].policy_version == 4
    session = engine.server.pid
    os.kill(session, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"rollout\.engine\.max_restarts is 2, and that many there were"):
        engine.generate(requests(1), SAMPLING)
    assert gone(session)


# The key on every route.


def ask(path: str, headers: dict[str, str], kind: str = "http") -> list[dict]:
    """What the middleware sends for a request, [] if it lets the application answer."""
    sent: list[dict] = []
    through: list[str] = []

    async def app(scope, receive, send) -> None:
        through.append(scope["path"])

    async def send(message) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": [(k.encode(), v.encode()) for k, v in headers.items()]}
    coroutine = KeyOnEveryRoute(app)(scope, None, send)
    with pytest.raises(StopIteration):
        coroutine.send(None)
    assert bool(through) != bool(sent)
    return sent


JSON = {"content-type": "application/json; charset=utf-8", "content-length": "12"}
BEARER = {"authorization": f"Bearer {KEY}"}
ROUTES = [
    "/v1/completions",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/sleep",
    "/health",
    "/docs",
    "/openapi.json",
    "/nothing",
]


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_refuses_who_comes_without_the_key(path, monkeypatch):
    monkeypatch.setenv("BAPO_VLLM_KEY", KEY)
    wrong = [
        {},
        {"authorization": KEY},
        {"authorization": f"bearer {KEY}"},
        {"authorization": f"Bearer {KEY}x"},
        {"x-api-key": KEY},
    ]
    for headers in wrong:
        assert ask(path, JSON | headers)[0]["status"] == 401
    assert ask(path, JSON | BEARER) == []
    assert ask(path, BEARER) == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-length": str(MAX_BODY_BYTES + 1)}, 413),
        ({"content-length": "many"}, 400),
        ({"content-length": "-1"}, 400),
        ({"transfer-encoding": "chunked"}, 411),
        ({"content-type": "application/octet-stream"}, 400),
        ({"content-type": "application/x-pickle"}, 400),
        ({"content-type": ""}, 400),
    ],
    ids=str,
)
def test_bodies_that_are_too_large_or_no_json_are_refused(headers, status, monkeypatch):
    monkeypatch.setenv("BAPO_VLLM_KEY", KEY)
    assert ask("/collective_rpc", JSON | BEARER | headers)[0]["status"] == status


def test_without_a_key_of_its_own_it_refuses_everything():
    for headers in ({}, {"authorization": "Bearer "}, {"authorization": "Bearer"}):
        assert ask("/health", headers)[0]["status"] == 401


def test_web_sockets_are_closed_and_the_start_of_the_application_is_let_through(monkeypatch):
    monkeypatch.setenv("BAPO_VLLM_KEY", KEY)
    assert ask("/v1/realtime", BEARER, kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert ask("", {}, kind="lifespan") == []
