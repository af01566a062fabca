"""Jobs on a Ray cluster of two nodes on this machine: workers and nodes die, and nothing is missing or different.

Run by `make test-ray`, in an environment that has Ray.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from triops.data import engine_ray, records
from triops.data.engine_local import LocalEngine
from triops.data.engine_ray import RayEngine
from triops.data.frames import Frame, FrameRef
from triops.data.gtdb import GtDatabase
from triops.data.job import Job, Result, Tally, run
from triops.data.kitti import KittiFolder
from triops.data.synthetic import write_kitti

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
FRAMES = 48


@dataclass(frozen=True)
class Slow:
    """KITTI's folders, slowly, so that there is a half-way at which something can die.

    fatal: at this frame the worker process is killed, the first time that it comes to it.
    """

    root: str
    marks: str
    fatal: str = ""

    dataset, split = "kitti", "train"

    def classes(self) -> list[str]:
        return KittiFolder(self.root).classes()

    def refs(self, number: int) -> list[FrameRef]:
        return KittiFolder(self.root).refs(number)

    def load(self, ref: FrameRef) -> Frame:
        time.sleep(0.15)
        mark = Path(self.marks) / "killed"
        if ref.key == self.fatal and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return KittiFolder(self.root).load(ref)


@pytest.fixture(scope="module")
def kitti(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kitti(tmp_path_factory.mktemp("kitti"), FRAMES, points=3000, boxes=6, seed=1)


@pytest.fixture(scope="module")
def expected(kitti: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("expected")
    run(GtDatabase((KittiFolder(str(kitti)),), str(out)), LocalEngine(1))
    return tree(out)


def tree(out: Path) -> dict[str, bytes]:
    """Everything but the settings of the job, which name the source."""
    found = {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}
    return {name: data for name, data in found.items() if not name.endswith("job.json")}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(engine_ray, "FRAMES_PER_TASK", 4)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    yield made
    ray.shutdown()
    made.shutdown()


def build(kitti: Path, out: Path, cluster: Cluster, fatal: str, watch: Callable[[Tally, int], None]) -> Result:
    source = Slow(str(kitti), str(out.parent), fatal)
    job: Job = GtDatabase((source,), str(out))
    ray.init(address=cluster.address, log_to_driver=False)
    return run(job, RayEngine(cluster.address), watch=watch)


def test_a_worker_and_then_a_node_die_and_nothing_is_missing(
    kitti: Path, tmp_path: Path, expected: dict[str, bytes], cluster: Cluster
) -> None:
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    left = []

    def watch(tally: Tally, total: int) -> None:
        if tally.frames >= FRAMES // 2 and not left:
            left.append(tally.frames)
            cluster.remove_node(node, allow_graceful=False)

    result = build(kitti, tmp_path / "out", cluster, "000009", watch)
    assert (tmp_path / "killed").exists(), "the worker has died"
    assert left, "the node has died"
    assert (result.good, result.missing, result.tally.frames) == (True, 0, FRAMES)
    assert tree(tmp_path / "out") == expected


DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_ray
from triops.data import engine_ray
engine_ray.FRAMES_PER_TASK = 4
job = test_ray.GtDatabase((test_ray.Slow(sys.argv[2], sys.argv[3]),), sys.argv[3])
result = test_ray.run(job, test_ray.RayEngine(workers=2))
print(result.before, result.tally.frames, result.good)
"""


def test_killed_as_a_whole_it_goes_on_where_it_was(kitti: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    call = [sys.executable, "-c", DRIVER, str(Path(__file__).parent), str(kitti), str(tmp_path)]
    first = subprocess.Popen(call, start_new_session=True)
    folder = str(tmp_path / ".kitti_dbinfos_train")
    deadline = time.monotonic() + 300  # a machine may be busy
    while len(records.read(folder)) < FRAMES // 3:
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    time.sleep(3)  # what Ray started dies with its driver
    done = len(records.read(folder))
    assert done < FRAMES
    assert not (tmp_path / "kitti_dbinfos_train.pkl").exists()
    second = subprocess.run(call, capture_output=True, text=True, timeout=200)
    before, now, good = second.stdout.split()[-3:]
    assert (int(before), int(now), good) == (done, FRAMES - done, "True"), second.stderr[-2000:]
    assert tree(tmp_path) == expected


def test_a_bad_frame_is_reported_from_the_cluster(kitti: Path, tmp_path: Path, cluster: Cluster) -> None:
    (tmp_path / "kitti").symlink_to(kitti)
    source = KittiFolder(str(tmp_path / "kitti"), points="nowhere")
    ray.init(address=cluster.address, log_to_driver=False)
    result = run(GtDatabase((source,), str(tmp_path / "out")), RayEngine())
    assert len(result.bad) == FRAMES
    assert result.bad["000000"].endswith("nowhere/000000.bin: no such file")
