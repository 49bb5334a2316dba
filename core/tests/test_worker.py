"""The worker thread: order, bounds, errors, death, close, fork and interpreter exit."""

from __future__ import annotations

import gc
import os
import subprocess  # noqa: TID251 - exit and fork are only seen from outside
import sys
import textwrap
import threading
import weakref

import pytest

from engine_core.errors import (
    AffinityError,
    Busy,
    Cancelled,
    CheckpointError,
    ClientClosed,
    InvalidRequest,
    ModelError,
    WorkerDied,
)
from engine_core.worker import Job, Worker


class Record:
    """A resource that notes on which thread things happened to it."""

    def __init__(self) -> None:
        self.threads: list[int] = [threading.get_ident()]
        self.events: list[str] = ["open"]

    def note(self, event: str) -> None:
        self.threads.append(threading.get_ident())
        self.events.append(event)


def start(queue_jobs: int = 8) -> tuple[Worker[Record], list[Record], list[int]]:
    made: list[Record] = []
    ended: list[int] = []

    def opened(_: object) -> Record:
        made.append(Record())
        return made[0]

    worker: Worker[Record] = Worker(
        opened,
        lambda record: record.note("close"),
        lambda: ended.append(threading.get_ident()),
        queue_jobs=queue_jobs,
    )
    worker.start()
    return worker, made, ended


def blocked(worker: Worker[Record]) -> tuple[Job[Record, str], threading.Event]:
    """Submit a job that runs until it is cancelled or released; return once it runs."""
    running, release = threading.Event(), threading.Event()

    def wait(_: Record, job: Job[Record, str]) -> str:
        running.set()
        while not release.wait(0.005):
            if job.cancelled.is_set():
                raise Cancelled("request: was cancelled")
        return "released"

    job = worker.submit(Job(wait))
    assert running.wait(10)
    return job, release


def test_worker_lifecycle_runs_everything_on_one_other_thread() -> None:
    worker, made, ended = start()
    worker.submit(Job(lambda record, _: record.note("job"))).future.result(10)
    worker.close()
    worker.close()
    record = made[0]
    assert record.events == ["open", "job", "close"]
    assert len(set(record.threads) | set(ended)) == 1
    assert threading.get_ident() not in record.threads
    assert len(ended) == 1
    assert not worker.is_alive


def test_worker_jobs_run_in_submission_order() -> None:
    worker, _, _ = start(queue_jobs=64)
    seen: list[int] = []
    _, release = blocked(worker)
    jobs = [worker.submit(Job(lambda _, __, n=n: seen.append(n))) for n in range(20)]
    release.set()
    for job in jobs:
        job.future.result(10)
    worker.close()
    assert seen == list(range(20))


def test_worker_full_queue_raises_busy_at_once_and_excludes_the_running_job() -> None:
    worker, _, _ = start(queue_jobs=2)
    first, release = blocked(worker)
    waiting = [worker.submit(Job(lambda _, __: None)) for _ in range(2)]
    with pytest.raises(Busy) as caught:
        worker.submit(Job(lambda _, __: None))
    assert caught.value.code == "client.busy"
    release.set()
    assert first.future.result(10) == "released"
    for job in waiting:
        job.future.result(10)
    worker.submit(Job(lambda _, __: None)).future.result(10)
    worker.close()


@pytest.mark.parametrize("length", [0, 65, -1, True, 2.0, "8"])
def test_worker_queue_length_out_of_range_is_refused(length: object) -> None:
    with pytest.raises(InvalidRequest, match="queue_jobs"):
        Worker(lambda _: None, lambda _: None, lambda: None, queue_jobs=length)


def test_worker_raising_job_passes_the_same_error_and_survives() -> None:
    worker, _, _ = start()
    cause = KeyError("inner")

    def fail(record: Record, _: object) -> None:
        held = record
        try:
            raise cause
        except KeyError as exc:
            raise ModelError("model: must work, got a test", code="model.test") from exc
        finally:
            del held

    job = worker.submit(Job(fail))
    with pytest.raises(ModelError) as caught:
        job.future.result(10)
    assert caught.value.code == "model.test"
    assert caught.value.__cause__ is cause
    names = [entry.name for entry in caught.traceback]
    assert "fail" in names
    assert worker.submit(Job(lambda _, __: 7)).future.result(10) == 7
    worker.close()


def test_worker_error_keeps_no_local_of_the_worker_alive() -> None:
    worker, _, _ = start()

    class Heavy:
        pass

    references: list[weakref.ref[Heavy]] = []

    def fail(_: Record, __: object) -> None:
        heavy = Heavy()
        references.append(weakref.ref(heavy))
        raise ModelError("model: must work, got a test")

    with pytest.raises(ModelError):
        worker.submit(Job(fail)).future.result(10)
    gc.collect()
    assert references[0]() is None
    worker.close()


def test_worker_system_exit_in_a_job_gives_every_waiter_worker_died() -> None:
    worker, _, ended = start()
    entered, go = threading.Event(), threading.Event()

    def leave(_: Record, __: object) -> None:
        entered.set()
        go.wait(10)
        raise SystemExit(3)

    first = worker.submit(Job(leave))
    assert entered.wait(10)
    second = worker.submit(Job(lambda _, __: None))
    go.set()
    for job in (first, second):
        with pytest.raises(WorkerDied) as caught:
            job.future.result(10)
        assert isinstance(caught.value.__cause__, SystemExit)
    with pytest.raises(WorkerDied):
        worker.submit(Job(lambda _, __: None))
    worker.close()
    assert len(ended) == 1


def test_worker_failed_open_raises_that_error_and_ends_the_thread() -> None:
    ended: list[bool] = []
    before = threading.active_count()

    def opened(_: object) -> None:
        raise CheckpointError("config.json: must exist, got nothing")

    worker: Worker[None] = Worker(opened, lambda _: None, lambda: ended.append(True))
    with pytest.raises(CheckpointError):
        worker.start()
    assert ended == [True]
    assert threading.active_count() == before
    with pytest.raises(ClientClosed):
        worker.submit(Job(lambda _, __: None))


def test_worker_close_cancels_the_running_job_and_refuses_the_waiting_ones() -> None:
    worker, _, _ = start()
    running, _ = blocked(worker)
    waiting = worker.submit(Job(lambda _, __: None))
    worker.close()
    with pytest.raises(Cancelled):
        running.future.result(0)
    with pytest.raises(ClientClosed):
        waiting.future.result(0)
    with pytest.raises(ClientClosed):
        worker.submit(Job(lambda _, __: None))


def test_worker_cancelled_waiting_job_leaves_the_queue_at_once() -> None:
    worker, _, _ = start(queue_jobs=1)
    _, release = blocked(worker)
    waiting = worker.submit(Job(lambda _, __: None))
    worker.cancel(waiting)
    with pytest.raises(Cancelled):
        waiting.future.result(0)
    assert worker.waiting == 0
    replacement = worker.submit(Job(lambda _, __: 5))
    release.set()
    assert replacement.future.result(10) == 5
    worker.close()


def test_worker_used_from_its_own_job_raises_reentrant_call() -> None:
    worker, _, _ = start()

    def reenter(_: Record, __: object) -> list[str]:
        codes = []
        for call in (lambda: worker.submit(Job(lambda _, __: None)), worker.close):
            with pytest.raises(AffinityError) as caught:
                call()
            codes.append(caught.value.code)
        return codes

    assert worker.submit(Job(reenter)).future.result(10) == ["reentrant_call"] * 2
    assert worker.submit(Job(lambda _, __: 1)).future.result(10) == 1
    worker.close()


def test_worker_after_fork_refuses_the_child() -> None:
    script = """
        import os, warnings
        from engine_core.errors import ClientClosed
        from engine_core.worker import Job, Worker
        warnings.simplefilter("ignore")
        worker = Worker(lambda job: 1, lambda value: None, lambda: None)
        worker.start()
        child = os.fork()
        if child == 0:
            codes = []
            for call in (lambda: worker.submit(Job(lambda r, j: r)), worker.close):
                try:
                    call()
                except ClientClosed as error:
                    codes.append(error.code)
            os._exit(0 if codes == ["client.closed"] * 2 else 9)
        _, status = os.waitpid(child, 0)
        assert worker.submit(Job(lambda r, j: r)).future.result(10) == 1
        raise SystemExit(os.waitstatus_to_exitcode(status))
    """
    assert run_script(script) == (0, "", "")


def test_worker_forgotten_at_exit_is_joined_silently() -> None:
    script = """
        import threading, time
        from engine_core.errors import Cancelled
        from engine_core.worker import Job, Worker
        def wait(record, job):
            while not job.cancelled.wait(0.01):
                pass
            raise Cancelled("request: was cancelled")
        worker = Worker(lambda job: 1, lambda value: print("closed", flush=True),
                        lambda: print("ended", flush=True))
        worker.start()
        worker.submit(Job(wait))
        late = threading.Thread(target=lambda: (time.sleep(0.2), worker.waiting))
        late.start()
    """
    assert run_script(script) == (0, "closed\nended\n", "")


def run_script(source: str) -> tuple[int, str, str]:
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr
