"""An engine's processes: none is left, however the engine or the process that started it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from support.engines import asked
from support.vllm_stub import completion

from bapo.engines import client as server_client
from bapo.engines import vllm_server
from bapo.engines.auth import MAX_BODY_BYTES, KeyOnEveryRoute
from bapo.engines.process import ServerProcess
from bapo.engines.vllm_server import VLLMServerRollouts
from bapo.engines.watchdog import is_alive
from bapo.protocols import EngineError
from bapo.types import SamplingParams

KEY = "sentinel-key-of-the-tests"
STUB = Path(__file__).parents[1] / "support" / "vllm_stub.py"
SAMPLING = SamplingParams(temperature=0.6, max_tokens=3)
WEIGHTS = {"w": torch.ones(2)}

# A process with a child that ignores SIGTERM and a grandchild in a session of its own. Like vLLM's they overwrite their names.
FAMILY = """
import subprocess, time
subprocess.Popen(["env", "-i", "sh", "-c", "trap '' TERM; setsid sleep 60; sleep 60"])
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def no_server_around(monkeypatch):
    for name in ("BAPO_VLLM_KEY", "BAPO_VLLM_SOCKET", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(server_client, "BACKOFF_S", (0.02, 0.1))
    monkeypatch.setattr("bapo.engines.process.GRACE_S", 0.5)


def until(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    """True as soon as the condition holds, False if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


def tree(pid: int, size: int = 1) -> list[psutil.Process]:
    """A process and those below it, as soon as they are `size`."""
    root = psutil.Process(pid)
    assert until(lambda: len(root.children(recursive=True)) + 1 >= size)
    return [root, *root.children(recursive=True)]


def gone(processes: list[psutil.Process]) -> bool:
    return not any(map(is_alive, processes))


@pytest.fixture
def family(tmp_path):
    server = ServerProcess([sys.executable, "-c", FAMILY], os.environ, tmp_path / "log")
    tree(server.process.pid, 3)
    time.sleep(0.6)  # the watchdog has seen them
    yield server
    server.stop()


# Processes.


def test_ctrl_c_does_not_reach_a_server_or_its_watchdog(family):
    for process in (family.process, family.watchdog.process):
        assert os.getpgid(process.pid) != os.getpgid(0)
        assert process.poll() is None


def test_stop_ends_processes_that_ignore_sigterm_too(family):
    processes = tree(family.process.pid, 3)
    family.stop()
    assert gone(processes)
    assert family.watchdog.process.returncode == 0
    family.stop()


def test_stop_ends_the_orphans_of_a_server_that_was_killed(family):
    processes = tree(family.process.pid, 3)
    os.kill(family.process.pid, signal.SIGKILL)
    family.process.wait()
    assert not gone(processes)
    family.stop()
    assert gone(processes)


def test_a_watchdog_that_was_killed_is_no_secret(family):
    processes = tree(family.process.pid, 3)
    family.watchdog.process.kill()
    with pytest.raises(EngineError, match="processes of the rollout engine may be left"):
        family.stop()
    for process in processes[1:]:
        process.kill()
    family.watchdog.kill = lambda: None


@pytest.mark.parametrize("delay", [0.0, 1.0])
def test_kill_9_of_the_process_that_started_it_takes_all_along(tmp_path, delay):
    script = f"""
import os, sys, time
from pathlib import Path
from bapo.engines.process import ServerProcess
server = ServerProcess([sys.executable, "-c", {FAMILY!r}], os.environ, Path({str(tmp_path / "log")!r}))
print(server.process.pid, server.watchdog.process.pid, flush=True)
time.sleep(60)
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid, watchdog = map(int, owner.stdout.readline().split())
    processes = [psutil.Process(watchdog), *tree(pid, 3 if delay else 1)]
    time.sleep(delay)
    owner.kill()
    owner.wait()
    assert until(lambda: gone(processes), 10)


def test_processes_that_start_while_others_are_killed_are_killed_too(tmp_path):
    command = ["sh", "-c", "while true; do sleep 30.25 & done"]
    server = ServerProcess(command, os.environ, tmp_path / "log")
    time.sleep(0.1)
    server.stop()
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "30.25"] and is_alive(p)]


def test_shared_memory_of_a_killed_server_is_removed(tmp_path):
    script = """
import time
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=9)
print(segment.name, flush=True)
time.sleep(60)
"""
    server = ServerProcess([sys.executable, "-c", script], os.environ, tmp_path / "log")
    server.wait_until(lambda: server.log.read_text().endswith("\n"), 20)
    segment = Path("/dev/shm") / server.log.read_text().strip()
    assert segment.exists()
    server.process.kill()
    server.stop()
    assert until(lambda: not segment.exists(), 5)


def test_a_server_that_does_not_come_up_says_why(tmp_path):
    server = ServerProcess([sys.executable, "-c", "print('no such model'); raise SystemExit(7)"], os.environ, tmp_path / "log")
    with pytest.raises(EngineError, match=r"ended with exit code 7 before it was ready\. .*\nno such model"):
        server.wait_until(lambda: False, 20)
    server.stop()
    slow = ServerProcess([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, tmp_path / "other")
    with pytest.raises(EngineError, match=r"start_timeout_s is 0\.5, .* Its log is empty"):
        slow.wait_until(lambda: False, 0.5)
    slow.stop()


# The run's own server.


@pytest.fixture
def start(model_folder, monkeypatch, tmp_path):
    """Starts engines whose server is the stub, as a process of its own."""
    made = []

    def make(*stub_arguments: str, **options):
        command = lambda arguments, flag, path: [sys.executable, str(STUB), path, *stub_arguments]  # noqa: E731
        monkeypatch.setattr(vllm_server, "server_command", command)
        fixed = {"sync_dir": str(tmp_path), "start_timeout_s": 20.0, "request_timeout_s": 5.0}
        made.append(VLLMServerRollouts(**fixed, **options)(model_folder))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def samples(n: int) -> list:
    return [asked(f"p{i}", 0, 100 + i, (3, 4)) for i in range(n)]


def test_only_this_user_reaches_the_server_of_a_run(start):
    engine = start()
    engine.load_weights(WEIGHTS.items(), 3)
    answer = completion({"prompt": [3, 4], "seed": 100, "max_tokens": 3})["choices"][0]["token_ids"]
    assert engine.generate(samples(1), SAMPLING)[0].response_ids == tuple(answer)
    socket = Path(engine.client.socket)
    assert socket.is_socket()
    assert socket.parent.stat().st_mode & 0o077 == engine.folder.stat().st_mode & 0o077 == 0
    assert not [c for c in psutil.Process(engine.server.process.pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]


def test_the_ranks_that_this_process_starts_find_the_server_until_it_is_closed(start):
    engine = start()
    assert os.environ["BAPO_VLLM_SOCKET"] == engine.client.socket
    processes = tree(engine.server.process.pid)
    engine.close()
    engine.close()
    assert "BAPO_VLLM_SOCKET" not in os.environ
    assert gone(processes)
    assert not engine.folder.exists()
    assert not Path(engine.client.socket).parent.exists()


def test_a_server_that_cannot_serve_is_ended_at_once(start, tmp_path, monkeypatch):
    servers = []
    begin = ServerProcess.__init__
    monkeypatch.setattr(ServerProcess, "__init__", lambda self, *a: (begin(self, *a), servers.append(self))[0])
    with pytest.raises(ValueError, match="has max_model_len=64; it must be 32"):
        start(max_model_len=32)
    assert servers[0].process.returncode is not None
    assert list(tmp_path.iterdir()) == []
    assert "BAPO_VLLM_SOCKET" not in os.environ


def test_a_server_that_dies_while_it_generates_ends_the_run_with_the_end_of_its_log(start):
    engine = start("5", concurrency=1, max_retries=1)
    engine.load_weights(WEIGHTS.items(), 3)
    with pytest.raises(
        EngineError, match=r"could not generate: .*server\.sock(?s:.*)The end of its log:\nstarted\nout of memory"
    ):
        engine.generate(samples(20), SAMPLING)


def test_a_server_that_dies_between_two_rounds_ends_the_run_at_the_next_sync(start):
    engine = start(max_retries=1)
    engine.load_weights(WEIGHTS.items(), 3)
    os.kill(engine.server.process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"could not take the weights: .*ConnectError(?s:.*)The end of its log:\nstarted"):
        engine.load_weights(WEIGHTS.items(), 4)


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
