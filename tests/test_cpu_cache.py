"""The folder of compiled CPU kernels: whose it must be, what it is keyed by, and what happens when it fails."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_op import python

import triops
from triops._cpu import cache
from triops._cpu.sort import drop_repeated

PACKAGE = Path(triops.__file__).parent
CALL = """
    import os, shutil, warnings
    import numba.core.caching, numpy as np
    from triops._cpu.cache import cache_directory
    from triops._cpu.sort import drop_repeated
    def call(dtype):
        print(drop_repeated(np.array([5, 5, 7], dtype), np.arange(3)), end=" ")
"""


@pytest.fixture
def find_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str | None]:
    """`cache_directory`, unremembered, for a user whose home cannot be written and whose temporary folder is new."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull + "/nowhere")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(cache, "_warned", False)
    return cache.cache_directory.__wrapped__


class TestTemporaryFolder:
    """Its name can be guessed, and whoever makes it first could put code there."""

    def test_it_is_made_for_its_user_alone(self, find_directory: Callable[[], str], tmp_path: Path) -> None:
        directory = Path(find_directory())
        assert directory.parent == tmp_path / f"triops-{os.getuid()}"
        for folder in (directory, directory.parent):
            assert folder.stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
    def test_one_that_others_can_write_to_is_refused(
        self, mode: int, find_directory: Callable[[], None], tmp_path: Path
    ) -> None:
        folder = tmp_path / f"triops-{os.getuid()}"
        folder.mkdir()
        folder.chmod(mode)
        with pytest.warns(RuntimeWarning, match="belongs to another user or can be written by others"):
            assert find_directory() is None

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of another user")
    def test_one_of_another_user_is_refused(self, find_directory: Callable[[], None], tmp_path: Path) -> None:
        folder = tmp_path / f"triops-{os.getuid()}"
        folder.mkdir(mode=0o700)
        os.chown(folder, 12345, 12345)
        with pytest.warns(RuntimeWarning, match="belongs to another user"):
            assert find_directory() is None

    def test_a_link_is_refused(self, find_directory: Callable[[], None], tmp_path: Path) -> None:
        target = tmp_path / "elsewhere"
        target.mkdir(mode=0o700)
        (tmp_path / f"triops-{os.getuid()}").symlink_to(target)
        with pytest.warns(RuntimeWarning, match="is not a folder"):
            assert find_directory() is None


def test_a_folder_for_this_source_that_somebody_else_can_write_to_is_refused_anywhere(
    find_directory: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "mine"))
    found = Path(find_directory())
    assert found.parent == tmp_path / "mine"
    found.chmod(0o777)
    assert Path(find_directory()).parent == tmp_path / f"triops-{os.getuid()}"


def test_a_user_without_a_home_does_not_write_into_the_working_directory(
    find_directory: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert find_directory().startswith(str(tmp_path))


class TestKey:
    def test_a_constant_in_another_file_than_the_kernel_s_is_part_of_it(self, tmp_path: Path) -> None:
        """nms/cpu.py takes EXP_TERMS from nms/reference.py, and they are compiled into its kernels."""
        copy = shutil.copytree(PACKAGE, tmp_path / "triops", ignore=shutil.ignore_patterns("__pycache__"))
        assert cache.source_key(copy) == cache.source_key(PACKAGE)
        source = copy / "ops" / "nms" / "reference.py"
        changed = source.read_text().replace("range(13, -1, -1)", "range(12, -1, -1)")
        assert changed != source.read_text()
        source.write_text(changed)
        assert cache.source_key(copy) != cache.source_key(PACKAGE)

    def test_so_is_the_name_of_a_file_and_nothing_but_source_is(self, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_text("x = 1")
        key = cache.source_key(tmp_path)
        (tmp_path / "py.typed").write_text("")
        assert cache.source_key(tmp_path) == key
        (tmp_path / "a.py").rename(tmp_path / "b.py")
        assert cache.source_key(tmp_path) != key

    def test_what_no_cpu_kernel_imports_is_not(self, tmp_path: Path) -> None:
        key = cache.source_key(tmp_path)
        for name in ("acceptance/soak.py", "nn/sparse.py", "ops/nms/gpu.py", "ops/nms/samples.py"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("x = 1")
        assert cache.source_key(tmp_path) == key
        (tmp_path / "ops" / "nms" / "cpu.py").write_text("x = 1")
        assert cache.source_key(tmp_path) != key

    def test_it_takes_a_few_milliseconds(self) -> None:
        def milliseconds() -> float:
            begin = time.thread_time()
            cache.source_key(PACKAGE)
            return (time.thread_time() - begin) * 1e3

        assert min(milliseconds() for _ in range(9)) < 20


FAILURES = {
    # Every write to a file fails, as it does on a full disk.
    "full": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
    "gone": "shutil.rmtree(cache_directory())",
    "read-only": "numba.core.caching.open = lambda path, mode: open(os.devnull + path if 'w' in mode else path, mode)",
    "open to others": "os.chmod(cache_directory(), 0o777)",
}


@pytest.mark.parametrize("failure", [f if f == "full" else pytest.param(f, marks=pytest.mark.full) for f in FAILURES])
def test_a_cache_that_cannot_be_written_is_one_warning_and_the_kernel_runs(failure: str, tmp_path: Path) -> None:
    code = f"""{CALL}
    {FAILURES[failure]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(np.int32)
        call(np.int64)
    print(*(w.message for w in caught))
    """
    elsewhere = tmp_path / "temporary"  # where the second process keeps kernels, if not in the folder that it is given
    elsewhere.mkdir()
    for _ in range(2):  # later processes, too
        done = python(code, NUMBA_CACHE_DIR=str(tmp_path / "cache"), TMPDIR=str(elsewhere))
        assert done.stdout.startswith("2 2 triops: compiled CPU kernels cannot be kept"), done.stdout + done.stderr
        assert done.stdout.count("cannot be kept") == 1, done.stdout


def test_a_cache_that_cannot_even_be_made_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cache, "cache_directory", lambda: str(tmp_path / "file" / "kernels"))
    monkeypatch.setattr(cache, "_warned", False)
    with pytest.warns(RuntimeWarning, match="compiled CPU kernels cannot be kept"):
        cache.keep_compiled(drop_repeated)


def test_a_cache_file_that_is_no_cache_file_is_compiled_anew(tmp_path: Path) -> None:
    for content in (None, b"", b"not a pickle"):
        for path in tmp_path.rglob("*.nb[ic]"):
            if content is not None:
                path.write_bytes(content)
        done = python(f"{CALL}\n    call(np.int32)", NUMBA_CACHE_DIR=str(tmp_path))
        assert done.stdout.strip() == "2", done.stderr
    assert list(tmp_path.rglob("*.nbi"))


def test_threads_that_load_kernels_at_once_leave_numbas_own_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one setting of the process: what a second thread saw meanwhile, it would put back for good."""
    import numba

    real, inside, most = cache.FunctionCache.__init__, [], []

    def slow(self: object, function: object) -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        real(self, function)
        inside.pop()

    monkeypatch.setattr(cache.FunctionCache, "__init__", slow)
    before = numba.config.CACHE_DIR
    functions = [drop_repeated.py_func] * 4
    threads = [threading.Thread(target=cache._KernelCache, args=(f, str(tmp_path))) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert before == numba.config.CACHE_DIR
    assert most == [1, 1, 1, 1]
