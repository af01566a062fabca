"""CPU launches: any number of threads, forked and spawned workers, no writable cache."""

from __future__ import annotations

import multiprocessing
import threading

import numpy as np
import pytest
import torch
from test_op import python

import triops
from triops import scenes
from triops._cpu.jit import jit
from triops._cpu.memory import minus_ones, zeros
from triops._cpu.threads import run

SCENE = scenes.lidar_scene(60_000, 30)
ARGS = SCENE.points[None], SCENE.boxes[None]


@jit
def _mark(begin, end, out):
    for i in range(begin, end):
        out[i] += i


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 99, 100, 101, 1000, 12_345])
def test_ranges_cover_everything_once(threads: int, count: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = np.zeros(count, np.int64)
        run(_mark, count, 100, out)
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(out, np.arange(count))


def test_an_error_in_a_helper_thread_reaches_the_caller() -> None:
    def kernel(begin: int, end: int) -> None:
        if begin > 0:
            raise IndexError("from a thread")

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(IndexError, match="from a thread"):
            run(kernel, 1000, 100)
    finally:
        torch.set_num_threads(before)


def test_an_interrupt_leaves_no_kernel_running() -> None:
    """The caller frees the memory that kernels were given addresses of."""
    done = python("""
        import os, signal, threading, time, torch
        from triops._cpu.threads import run

        running, most, main = 0, 0, threading.main_thread()

        def kernel(begin, end):
            global running, most
            if threading.current_thread() is main:
                while not running:
                    time.sleep(0.01)
                return
            running += 1
            most = max(most, running)
            time.sleep(0.5)
            running -= 1

        torch.set_num_threads(2)
        run(kernel, 2, 1)  # compiled
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins with it ignored
        for seconds in (0.2, 0.3):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            run(kernel, 2, 1)
        except KeyboardInterrupt:
            print(most, running)
        time.sleep(0.5)
    """)
    assert done.stdout.strip() == "1 0", done.stderr


def test_four_threads_at_once() -> None:
    expected, wrong = triops.points_in_boxes(*ARGS), []

    def work() -> None:
        for _ in range(10):
            if not torch.equal(triops.points_in_boxes(*ARGS), expected):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not wrong
    assert not any(worker.is_alive() for worker in workers)


def _in_child(queue: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    torch.set_num_threads(2)  # parallel in the child, too
    # summed by NumPy: torch's own OpenMP sums hang in a forked child
    queue.put(int(triops.points_in_boxes(*ARGS).numpy().sum()))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_forked_after_use() -> None:
    expected = int(triops.points_in_boxes(*ARGS).numpy().sum())
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == expected
    child.join(60)
    assert child.exitcode == 0


class _Scenes(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return triops.points_in_boxes(*ARGS)[0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers(method: str) -> None:
    expected = triops.points_in_boxes(*ARGS)[0]
    loader = torch.utils.data.DataLoader(_Scenes(), num_workers=2, multiprocessing_context=method)
    assert all(torch.equal(batch[0], expected) for batch in loader)


@pytest.mark.full
@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_numba_threading_layers_do_not_matter(layer: str) -> None:
    """Nothing here uses Numba's layers; a program that chooses one must not notice triops."""
    done = python(
        """
        import threading, os, torch, triops
        torch.set_num_threads(2)
        from triops import scenes
        s = scenes.lidar_scene(60_000, 30)
        call = lambda: triops.points_in_boxes(s.points[None], s.boxes[None]).numpy().sum()
        expected, seen = call(), []
        workers = [threading.Thread(target=lambda: seen.extend(call() for _ in range(5))) for _ in range(4)]
        [w.start() for w in workers]; [w.join() for w in workers]
        pid = os.fork()
        if pid == 0:
            os._exit(0 if call() == expected else 1)
        print(os.waitpid(pid, 0)[1] == 0 and seen == [expected] * 20)
        """,
        NUMBA_THREADING_LAYER=layer,
    )
    assert done.stdout.strip() == "True", done.stderr


def test_no_writable_cache_directory() -> None:
    done = python(
        """
        import tempfile
        def refuse(*a, **k): raise PermissionError("read-only")
        import os; os.makedirs = refuse
        import torch, triops
        print(triops.points_in_boxes(torch.zeros(1, 2, 3), torch.tensor([[[0., 0, 0, 2, 2, 2, 0]]])).tolist())
        from triops._cpu.cache import cache_directory; print(cache_directory())
        """
    )
    assert done.stdout.split("\n")[:2] == ["[[0, 0]]", "None"], done.stderr


@pytest.mark.full
def test_cache_directory_is_used_and_keyed_by_the_source(tmp_path) -> None:  # type: ignore[no-untyped-def]
    code = """
        import torch, triops
        triops.points_in_boxes(torch.zeros(1, 2, 3), torch.zeros(1, 1, 7))
        from triops._cpu.cache import cache_directory; print(cache_directory())
    """
    done = python(code, NUMBA_CACHE_DIR=str(tmp_path))
    directory = done.stdout.strip()
    assert directory.startswith(str(tmp_path)), done.stderr
    assert list(tmp_path.rglob("*_brute_force*.nbi"))


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (1,), (7, 5), (3, 700_001)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_zeros_are_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert torch.equal(zeros(*shape, dtype=dtype), torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_minus_ones_are_minus_one(dtype: torch.dtype) -> None:
    assert torch.equal(minus_ones(3, 700_001, dtype=dtype), torch.full((3, 700_001), -1, dtype=dtype))
