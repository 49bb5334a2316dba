"""What only a process of its own shows: exit codes, silence, forks and many cycles."""

from __future__ import annotations

import subprocess  # noqa: TID251 - exit and fork are only seen from outside
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from engine_core.testing.scripted import Scripted, write_scripted_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

PREAMBLE = """
import sys, threading
from engine_core import Client, Session
from engine_core.plugins import Plugins
from engine_core.testing import scripted
plugins = Plugins.load(extra=[scripted])
path = sys.argv[1]
hello = [{"role": "user", "content": "hello"}]
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script = Scripted()
    script.say("\n", "hello world")
    script.say("!", "0123456789", loops=True)
    return write_scripted_checkpoint(tmp_path_factory.mktemp("scripted"), script)


def run(path: Path, source: str) -> tuple[int, str, str]:
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(source), str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_hundred_cycles_of_load_generate_close_end_silently(path: Path) -> None:
    source = """
        for cycle in range(100):
            with Client.load(path, plugins=plugins) as client:
                assert client.generate(hello).text == "hello world"
        assert threading.active_count() == 1
    """
    assert run(path, source) == (0, "", "")


FORGOTTEN = {
    "idle": "client.generate(hello)",
    "stream half consumed": "stream = client.stream_complete('!', max_tokens=1900); next(stream)",
    "queued": "streams = [client.stream_complete('!', max_tokens=1900) for _ in range(5)]",
    "thread still generating": (
        "threading.Thread(target=client.complete, args=('!',), kwargs={'max_tokens': 60}).start()"
    ),
    "daemon thread generating": (
        "import contextlib\n"
        "def work():\n"
        "    with contextlib.suppress(Exception):\n"
        "        list(client.stream_complete('!', max_tokens=1900))\n"
        "threading.Thread(target=work, daemon=True).start()"
    ),
    "asyncio": (
        "import asyncio\n"
        "async def main():\n"
        "    stream = client.astream_complete('!', max_tokens=1900)\n"
        "    await anext(stream)\n"
        "    globals()['kept'] = stream\n"
        "asyncio.run(main())"
    ),
    "session": "client.close(); session = Session.load(path, plugins=plugins);"
    " session.generate(hello)",
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_client_forgotten_at_exit_ends_with_status_0_and_silence(path: Path, what: str) -> None:
    source = "client = Client.load(path, plugins=plugins)\n" + FORGOTTEN[what]
    assert run(path, source) == (0, "", "")


def test_client_in_a_forked_child_is_refused_and_the_parent_goes_on(path: Path) -> None:
    source = """
        import os, warnings
        from engine_core import AffinityError, ClientClosed
        warnings.simplefilter("ignore")
        client = Client.load(path, plugins=plugins)
        stream = client.stream(hello)
        child = os.fork()
        if child == 0:
            calls = (
                lambda: client.generate(hello), lambda: client.complete("!"),
                lambda: client.score([1]), lambda: client.stream(hello), client.clone,
                client.close, client.cancel, stream.cancel_and_wait, lambda: next(stream),
            )
            refused = 0
            for call in calls:
                try:
                    call()
                except (ClientClosed, AffinityError):
                    refused += 1
            stream.close()
            sys.exit(0 if refused == len(calls) else 9)
        status = os.waitpid(child, 0)[1]
        assert client.generate(hello).text == "hello world"
        assert list(stream)[-1].reply.text == "hello world"
        sys.exit(os.waitstatus_to_exitcode(status))
    """
    assert run(path, source) == (0, "", "")


def test_interrupt_while_waiting_cancels_and_leaves_the_client_usable(path: Path) -> None:
    source = """
        import os, signal, time
        # A parent that ignores interrupts (a shell's background job) hands that on.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        client = Client.load(path, plugins=plugins)
        running = threading.Event()
        def interrupt():
            running.wait(20)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            client.complete(
                "!", max_tokens=1900,
                on_token=lambda _: running.set() or time.sleep(0.002) or True,
            )
        except KeyboardInterrupt:
            assert client.generate(hello).text == "hello world"
            client.close()
            sys.exit(130)
    """
    assert run(path, source) == (130, "", "")


def test_allocator_limit_binds_living_clients_only(path: Path) -> None:
    source = """
        from engine_core import BackendError, CheckpointError
        try:
            Client.load("none", plugins=plugins, allocator_cache_bytes=1 << 20)
        except CheckpointError:
            first = Client.load(path, plugins=plugins, allocator_cache_bytes=2 << 20)
        try:
            Client.load(path, plugins=plugins, allocator_cache_bytes=3 << 20)
        except BackendError as error:
            assert error.code == "backend.allocator_conflict"
        else:
            sys.exit(8)
        first.close()
        with Client.load(path, plugins=plugins, allocator_cache_bytes=3 << 20) as second:
            assert second.info.memory.limit == 3 << 20
            Session.load(path, plugins=plugins, allocator_cache_bytes=3 << 20).close()
            assert second.generate(hello).text == "hello world"
            assert second.info.memory.limit == 3 << 20
    """
    assert run(path, source) == (0, "", "")
