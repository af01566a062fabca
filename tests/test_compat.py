"""Facts about `triops.compat`: when extension modules are supplied, and what their functions do."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional

import triops
import triops.compat.bevfusion
import triops.compat.mmcv
import triops.compat.pcdet
from triops import _op
from triops.compat import _finder, _mmcv_sparse, _startup

# Libraries in miniature: they load their extension module as mmcv and OpenPCDet do.
FAKE = {
    "mmcv/__init__.py": "",
    "mmcv/ops/__init__.py": "from mmcv.ops.points_in_boxes import points_in_boxes_all, points_in_boxes_part\n",
    "mmcv/ops/points_in_boxes.py": """
import importlib

ext_module = importlib.import_module("mmcv._ext")
assert hasattr(ext_module, "points_in_boxes_part_forward") and hasattr(ext_module, "an_operator_of_the_future")


def points_in_boxes_part(points, boxes):
    "mmcv's own words"
    raise RuntimeError("needs a CUDA device")


def points_in_boxes_all(points, boxes):
    raise RuntimeError("needs a CUDA device")
""",
    "pcdet/__init__.py": "",
    "pcdet/ops/__init__.py": "",
    "pcdet/ops/roiaware_pool3d/__init__.py": "",
    "pcdet/ops/roiaware_pool3d/utils.py": "from . import roiaware_pool3d_cuda\n",
    "pcdet/ops/iou3d_nms/__init__.py": "",
    "pcdet/ops/iou3d_nms/utils.py": "from . import iou3d_nms_cuda\n",
    "pcdet/ops/bev_pool/__init__.py": "from . import bev_pool_ext\n",
    "pcdet/ops/ingroup_inds/op.py": "from . import ingroup_inds_cuda\n",
    "pcdet/ops/pointnet2/utils.py": "from . import pointnet2_stack_cuda as pointnet2\n",
    "projects/ops/bev_pool/__init__.py": "from . import bev_pool_ext\n",
    "projects/ops/voxel/__init__.py": "from .voxel_layer import dynamic_voxelize, hard_voxelize\n",
}
NAMES = ("mmcv", "pcdet", "projects", "pointops")
COMPILED = "def an_operator_of_the_future(): pass\ndef points_in_boxes_part_forward(): pass\n"

BOX = torch.tensor([[0.0, 0.0, 0.0, 4.0, 2.0, 2.0, 0.0]])  # for mmcv it stands on z = 0
POINTS = torch.tensor([[0.0, 0.0, 1.5], [0.0, 0.0, -0.5], [1.5, 0.5, 1.0]])


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """A folder with the libraries in miniature, first on the path, and nothing supplied yet."""
    write(tmp_path, FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    _finder.uninstall()
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in NAMES}
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] in NAMES]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def ext():
    return triops.compat.mmcv.extension("mmcv._ext")


def run(code: str, **options) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# activation


def test_importing_triops_alone_changes_nothing():
    code = """
import sys
import triops, triops.compat
ours = [f for f in sys.meta_path if type(f).__module__.startswith("triops")]
print(ours)
"""
    assert run(code) == "[]"


def test_without_activation_there_is_no_extension_module(libraries):
    with pytest.raises(ModuleNotFoundError, match="_ext"):
        importlib.import_module("mmcv.ops")


def test_activation_supplies_the_extension_module_and_the_two_wrappers(libraries):
    _finder.install("mmcv")
    ops = importlib.import_module("mmcv.ops")
    ext_module = sys.modules["mmcv._ext"]
    assert ext_module.__spec__.loader is not None
    assert importlib.util.find_spec("mmcv._ext") is not None
    assert _finder.is_ours(ext_module)
    assert ops.points_in_boxes_part.__doc__ == "mmcv's own words"
    assert ops.points_in_boxes_part(points=POINTS[None], boxes=BOX[None]).tolist() == [[0, -1, 0]]
    held = ops.points_in_boxes_all(points=POINTS[None], boxes=BOX[None])
    assert held.dtype == torch.int32
    assert held.tolist() == [[[1], [0], [1]]]


def test_sampling_and_nearest_neighbors_of_mmcv_do_without_a_cuda_device(libraries):
    source = """
import importlib

ext_module = importlib.import_module("mmcv._ext")


class Function:
    def apply(*args):
        raise RuntimeError("needs a CUDA device")


furthest_point_sample = knn = Function.apply
"""
    write(libraries, {"mmcv/ops/furthest_point_sample.py": source, "mmcv/ops/knn.py": source})
    _finder.install("mmcv")
    line = torch.tensor([[[0.0, 0, 0], [1, 0, 0], [5, 0, 0], [2, 0, 0]]], requires_grad=True)
    sample = importlib.import_module("mmcv.ops.furthest_point_sample").furthest_point_sample
    assert sample(line, 3).tolist() == [[0, 2, 3]]
    knn = importlib.import_module("mmcv.ops.knn").knn
    nearest = knn(2, line, line[:, 1:].contiguous())
    assert nearest.dtype == torch.int32
    assert nearest.is_contiguous()
    assert nearest.tolist() == [[[1, 2, 3], [0, 3, 1]]]  # of two at one distance the lower index
    assert torch.equal(knn(2, line.mT, line[:, 1:].mT, True), nearest)
    assert torch.equal(knn(2, line)[:, :, 1:], nearest)


def test_the_naive_carafe_of_mmcv_has_gradients_without_a_cuda_device(libraries):
    source = """
import importlib

import torch

ext_module = importlib.import_module("mmcv._ext")


class CARAFENaiveFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features, masks, kernel_size, group_size, scale_factor):
        ctx.kernel_size, ctx.group_size, ctx.scale_factor = kernel_size, group_size, scale_factor
        ctx.save_for_backward(features, masks)
        output = features.new_zeros(1, 1, 2, 2)
        ext_module.carafe_naive_forward(features, masks, output, kernel_size, group_size, scale_factor)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        assert grad_output.is_cuda
"""
    write(libraries, {"mmcv/ops/carafe.py": source})
    _finder.install("mmcv")
    naive = importlib.import_module("mmcv.ops.carafe").CARAFENaiveFunction.apply
    feature, masks = torch.tensor([[[[3.0]]]], requires_grad=True), torch.ones(1, 1, 2, 2, requires_grad=True)
    naive(feature, masks, 1, 1, 2).sum().backward()
    assert feature.grad.tolist() == [[[[4]]]]
    assert masks.grad.tolist() == [[[[3, 3], [3, 3]]]]


def test_activating_twice_is_activating_once(libraries):
    _finder.install("mmcv")
    _finder.install("mmcv", "pcdet")
    finders = [f for f in sys.meta_path if isinstance(f, _finder.ExtensionFinder | _finder.WrapperFinder)]
    assert len(finders) == 2


def test_a_compiled_extension_module_wins_and_keeps_its_wrappers(libraries):
    write(libraries, {"mmcv/_ext.py": COMPILED})
    _finder.install("mmcv")
    ops = importlib.import_module("mmcv.ops")
    assert sys.modules["mmcv._ext"].__file__ == str(libraries / "mmcv/_ext.py")
    with pytest.raises(RuntimeError, match="CUDA"):
        ops.points_in_boxes_part(POINTS[None], BOX[None])


@pytest.mark.parametrize(
    "module",
    ["pcdet.ops.iou3d_nms.iou3d_nms_cuda", "pcdet.ops.bev_pool.bev_pool_ext", "projects.ops.voxel.voxel_layer"],
)
def test_a_compiled_module_of_openpcdet_or_bevfusion_wins(libraries, module):
    compiled = libraries / f"{module.replace('.', '/')}.py"
    write(libraries, {str(compiled): "dynamic_voxelize = hard_voxelize = None"})
    _finder.install(*_finder.LIBRARIES)
    assert importlib.import_module(module).__file__ == str(compiled)


def test_a_finder_that_came_later_wins_too(libraries):
    _finder.install("mmcv")
    spec = importlib.machinery.ModuleSpec("mmcv._ext", _finder.ExtensionLoader(), origin="somebody else")

    class Late:
        def find_spec(self, fullname, path, target=None):
            return spec if fullname == "mmcv._ext" else None

    sys.meta_path.append(Late())
    assert importlib.import_module("mmcv._ext").__spec__.origin == "somebody else"


def test_only_the_libraries_asked_for_are_supplied(libraries):
    _finder.install("pcdet")
    with pytest.raises(ModuleNotFoundError, match="_ext"):
        importlib.import_module("mmcv.ops")


def test_activation_at_start_imports_nothing_until_it_is_needed(libraries):
    site = libraries / "site"
    site.mkdir()
    line = triops.compat.activate(site).read_text()
    assert line.count("\n") == 1
    code = f"""
import site, sys
sys.path.insert(0, {str(libraries)!r})
before = {{*sys.modules}}
site.addsitedir({str(site)!r})
assert {{*sys.modules}} - before == {{"triops.compat._finder"}}
import mmcv.ops, mmcv._ext
from triops.compat import _finder
assert _finder.is_ours(mmcv._ext) and _finder.installed().libraries == {{*_finder.LIBRARIES}}
import triops.compat.mmcv
print(sum(type(f).__name__ == "ExtensionFinder" for f in sys.meta_path), mmcv.ops.points_in_boxes_part.__doc__)
"""
    assert run(code) == "1 mmcv's own words"
    assert triops.compat.deactivate(site)
    assert not triops.compat.deactivate(site)
    assert [*site.iterdir()] == []


def test_a_start_up_file_that_runs_twice_as_in_virtual_environments_supplies_modules_once(tmp_path):
    triops.compat.activate(tmp_path)
    code = f"""
import site, sys
site.addsitedir({str(tmp_path)!r})
site.addsitedir({str(tmp_path)!r})
from triops.compat import _finder
import spconv
ours = [f for f in sys.meta_path if type(f).__module__ == "triops.compat._finder"]
print(len(ours), _finder.is_ours(spconv))
"""
    assert run(code) == "2 True"


def test_activation_compiles_what_every_start_runs_even_where_python_writes_no_bytecode(tmp_path, monkeypatch):
    copy = tmp_path / "_finder.py"
    copy.write_text(Path(_finder.__file__).read_text())
    monkeypatch.setattr(_finder, "__file__", str(copy))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    triops.compat.activate(tmp_path)
    assert Path(importlib.util.cache_from_source(str(copy))).is_file()


def test_a_start_up_file_that_outlives_triops_does_nothing(tmp_path):
    line = _startup.LINE.format(path=str(tmp_path / "gone" / "_finder.py"), name="triops.compat._finder")
    (tmp_path / _startup.FILE).write_text(line)
    assert run(f"import site; site.addsitedir({str(tmp_path)!r}); print('quiet')") == "quiet"


def test_info_says_whose_extension_module_is_in_use(libraries):
    assert "mmcv._ext: none. Remedy: `import triops.compat.mmcv` before it, or `triops activate`" in _startup.status()
    _finder.install("mmcv")
    assert _startup.status()[0] == "supplied in this process: mmcv"
    assert "mmcv._ext: of triops" in _startup.status()
    write(libraries, {"mmcv/_ext.py": COMPILED})
    importlib.invalidate_caches()
    assert f"mmcv._ext: mmcv's own, {libraries / 'mmcv/_ext.py'}" in _startup.status()


def test_info_says_whose_extension_modules_openpcdet_gets(libraries):
    module, file = "pcdet.ops.iou3d_nms.iou3d_nms_cuda", libraries / "pcdet/ops/iou3d_nms/iou3d_nms_cuda.py"
    assert f"{module}: none. Remedy: `import triops.compat.pcdet` before it, or `triops activate`" in _startup.status()
    _finder.install("pcdet")
    assert f"{module}: of triops" in _startup.status()
    write(libraries, {str(file): ""})
    importlib.invalidate_caches()
    assert f"{module}: pcdet's own, {file}" in _startup.status()
    assert "pcdet" not in sys.modules


# the extension module of mmcv


def test_a_name_that_triops_does_not_have_raises_when_it_is_called(ext):
    assert callable(ext.an_operator_of_the_future)
    with pytest.raises(NotImplementedError, match="an_operator_of_the_future"):
        ext.an_operator_of_the_future(torch.zeros(1, 5), iou_threshold=0.5)
    assert not hasattr(ext, "__path__")
    assert not hasattr(ext, "_private")


def test_versions_are_strings(ext):
    assert isinstance(ext.get_compiler_version(), str)
    assert isinstance(ext.get_compiling_cuda_version(), str)


def test_points_in_boxes_counts_z_from_the_bottom_and_fills_what_it_is_given(ext):
    one, part, every = torch.zeros(1, 3).int(), torch.full((1, 3), -1).int(), torch.zeros(1, 3, 1).int()
    ext.points_in_boxes_cpu_forward(BOX, POINTS, one)
    ext.points_in_boxes_part_forward(BOX[None], POINTS[None], part)
    ext.points_in_boxes_all_forward(BOX[None], POINTS[None], every)
    assert one.tolist() == [[1, 0, 1]]
    assert part.tolist() == [[0, -1, 0]]
    assert every.tolist() == [[[1], [0], [1]]]


def test_bbox_overlaps_takes_the_mode_as_a_number(ext):
    first, second = torch.tensor([[0.0, 0, 10, 10]]), torch.tensor([[0.0, 0, 10, 20], [20, 20, 30, 30]])
    iou, iof = torch.zeros(1, 2), torch.zeros(1, 2)
    ext.bbox_overlaps(first, second, iou, mode=0, aligned=False, offset=0)
    ext.bbox_overlaps(first, second, iof, mode=1, aligned=False, offset=0)
    assert iou.tolist() == [[0.5, 0.0]]
    assert iof.tolist() == [[1.0, 0.0]]


def test_no_aligned_boxes_fill_a_column_of_none(ext):
    column = torch.zeros(0, 1)
    ext.bbox_overlaps(torch.zeros(0, 4), torch.zeros(0, 4), column, mode=0, aligned=True, offset=0)
    assert column.shape == (0, 1)


def test_border_align_fills_its_outputs_and_adds_its_gradient(ext):
    ramp = torch.arange(12.0).view(1, 1, 3, 4).repeat(1, 4, 1, 1)
    boxes = torch.tensor([[[0.0, 0.0, 2.0, 1.0]]])
    output, argmax = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4).int()
    ext.border_align_forward(ramp, boxes, output, argmax, pool_size=1)
    assert output.flatten().tolist() == [2, 4, 6, 6]
    assert argmax.flatten().tolist() == [1, 1, 0, 0]
    grad = torch.ones_like(ramp)
    ext.border_align_backward(torch.ones_like(output), boxes, argmax, grad, pool_size=1)
    assert torch.equal(grad, 1 + triops.border_align_backward(torch.ones_like(output), boxes, argmax, ramp.shape, 1))


@pytest.mark.parametrize("mode", ["max", "avg"])
def test_roi_align_fills_its_outputs_and_adds_its_gradient(ext, mode):
    ramp, rois = torch.arange(12.0).view(1, 1, 3, 4), torch.tensor([[0.0, 0, 0, 2, 2]])
    output, grad = torch.zeros(1, 1, 2, 2), torch.ones_like(ramp)
    y, x = (torch.zeros_like(output) if mode == "max" else torch.zeros(0) for _ in range(2))
    rules = {"aligned_height": 2, "aligned_width": 2, "spatial_scale": 1.0, "sampling_ratio": 2,
             "pool_mode": ("max", "avg").index(mode), "aligned": False}  # fmt: skip
    ext.roi_align_forward(ramp, rois, output, y, x, **rules)
    assert output.flatten().tolist() == ([3.75, 4.75, 7.75, 8.75] if mode == "max" else [2.5, 3.5, 6.5, 7.5])
    assert mode == "avg" or y.flatten().tolist() == [0.75, 0.75, 1.75, 1.75]
    ext.roi_align_backward(torch.ones_like(output), rois, y, x, grad, **rules)
    differentiable = ramp.clone().requires_grad_()
    triops.roi_align(differentiable, rois, 2, 1.0, 2, mode=mode).sum().backward()
    assert torch.equal(grad, 1 + differentiable.grad)


def test_roi_align_rotated_fills_its_output_and_adds_its_gradient(ext):
    ramp, rois = torch.arange(12.0).view(1, 1, 3, 4), torch.tensor([[0.0, 2, 1.5, 2, 2, torch.pi / 2]])
    output, grad = torch.ones(1, 1, 2, 2), torch.ones_like(ramp)
    rules = {"pooled_height": 2, "pooled_width": 2, "spatial_scale": 1.0, "sampling_ratio": 1, "aligned": True}
    ext.roi_align_rotated_forward(ramp, rois, output, **rules, clockwise=False)
    assert output.flatten().tolist() == pytest.approx([7, 3, 8, 4])
    ext.roi_align_rotated_forward(ramp, rois, output, **rules, clockwise=True)
    assert output.flatten().tolist() == pytest.approx([4, 8, 3, 7])
    ext.roi_align_rotated_backward(torch.ones_like(output), rois, grad, **rules, clockwise=True)
    differentiable = ramp.clone().requires_grad_()
    triops.roi_align_rotated(differentiable, rois, 2, 1.0, 1, clockwise=True).sum().backward()
    assert torch.equal(grad, 1 + differentiable.grad)


def test_riroi_align_rotated_fills_its_output_and_adds_its_gradient(ext):
    features, rois = torch.rand(1, 8, 3, 4), torch.tensor([[0.0, 2, 1.5, 2, 2, 0.7]])
    output, grad = torch.ones(1, 8, 2, 2), torch.ones_like(features)
    rules = {"pooled_height": 2, "pooled_width": 2, "spatial_scale": 1.0, "num_samples": 2, "num_orientations": 4,
             "clockwise": True}  # fmt: skip
    ext.riroi_align_rotated_forward(features, rois, output, **rules)
    differentiable = features.clone().requires_grad_()
    expected = triops.riroi_align_rotated(differentiable, rois, 2, 1.0, 2, 4, True)
    assert torch.equal(output, expected)
    expected.sum().backward()
    ext.riroi_align_rotated_backward(torch.ones_like(output), rois, grad, **rules)
    assert torch.equal(grad, 1 + differentiable.grad)


def test_prroi_pool_fills_its_output_and_adds_its_gradients(ext):
    features, rois = (
        torch.rand(1, 2, 3, 4, requires_grad=True),
        torch.tensor([[0.0, 0.5, 0.2, 3, 2]], requires_grad=True),
    )
    output, grads = torch.ones(1, 2, 2, 2), [torch.ones(1, 2, 3, 4), torch.ones(1, 5)]
    rules = {"pooled_height": 2, "pooled_width": 2, "spatial_scale": 0.5}
    ext.prroi_pool_forward(features, rois, output, **rules)
    expected = triops.prroi_pool(features, rois, 2, 0.5)
    assert torch.equal(output, expected)
    expected.sum().backward()
    ones = torch.ones_like(output)
    ext.prroi_pool_backward(ones, rois.detach(), grads[0], **rules)
    ext.prroi_pool_coor_backward(output, ones, features.detach(), rois.detach(), grads[1], **rules)
    assert torch.equal(grads[0], 1 + features.grad)
    assert torch.equal(grads[1], 1 + rois.grad)


def test_roi_pool_fills_its_outputs_and_adds_its_gradient(ext):
    ramp, rois = torch.arange(12.0).view(1, 1, 3, 4), torch.tensor([[0.0, 0, 0, 3, 1], [0, 3, 0, 0, 0]])
    output, argmax, grad = torch.ones(2, 1, 2, 2), torch.zeros(2, 1, 2, 2).int(), torch.ones_like(ramp)
    rules = {"pooled_height": 2, "pooled_width": 2, "spatial_scale": 1.0}
    ext.roi_pool_forward(ramp, rois, output, argmax, **rules)
    assert output.flatten().tolist() == [1, 3, 5, 7, 0, 0, 0, 0]
    assert argmax.flatten().tolist() == [1, 3, 5, 7, -1, -1, -1, -1]
    ext.roi_pool_backward(torch.ones_like(output), rois, argmax, grad, **rules)
    assert grad.flatten().tolist() == [1, 2, 1, 2, 1, 2, 1, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("mode", ["max", "avg"])
def test_roiaware_pool3d_fills_its_outputs_and_a_mean_leaves_argmax_alone(ext, mode):
    features = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    pooled, argmax, lists = (
        torch.zeros(1, 2, 1, 1, 1),
        torch.zeros(1, 2, 1, 1, 1).int(),
        torch.zeros(1, 2, 1, 1, 4).int(),
    )
    method = ["max", "avg"].index(mode)
    ext.roiaware_pool3d_forward(BOX, POINTS, features, argmax, lists, pooled, pool_method=method)
    assert not pooled.requires_grad
    # the point at x = 0 is in the second half too
    assert pooled.flatten().tolist() == ([0, 3] if mode == "max" else [0, 2])
    assert argmax.flatten().tolist() == ([-1, 2] if mode == "max" else [0, 0])
    assert lists[0, 1, 0, 0].tolist() == [2, 0, 2, 0]
    grad = torch.zeros(3, 1)
    ext.roiaware_pool3d_backward(lists, argmax, torch.ones(1, 2, 1, 1, 1), grad, pool_method=method)
    assert grad.flatten().tolist() == ([0, 0, 1] if mode == "max" else [0.5, 0, 0.5])


# sparse convolutions: against dense ones, which know nothing of pairs

SHAPE = [5, 6, 7]


def sites(count: int = 40) -> Tensor:
    flat = torch.randperm(2 * 5 * 6 * 7, generator=torch.Generator().manual_seed(1))[:count]
    return torch.stack(torch.unravel_index(flat, (2, *SHAPE)), 1).int()


def dense(features: Tensor, indices: Tensor, shape) -> Tensor:
    """[N, C] at their sites -> [B, C, *shape]."""
    grid = features.new_zeros(2, *shape, features.shape[1])
    return grid.index_put(tuple(indices.long().t()), features).movedim(-1, 1)


def at_sites(grid: Tensor, indices: Tensor) -> Tensor:
    return grid.movedim(1, -1)[tuple(indices.long().t())]


def pairs(ext, indices, out_shape, kernel, stride, padding, subm=0, transpose=0, name="get_indice_pairs_3d_forward"):
    triple = [[n] * 3 for n in (kernel, stride, padding, 1, 0)]
    grid = [torch.empty(0)] if name.endswith("backward") else []
    return getattr(ext, name)(indices, *grid, 2, out_shape, SHAPE, *triple, subm, transpose)


def test_the_batch_size_may_be_a_tensor_as_centerpoint_has_it(ext):
    triples = [[n] * 3 for n in (3, 1, 1, 1, 0)]
    args = SHAPE, SHAPE, *triples, 1, 0
    expected = ext.get_indice_pairs_3d_forward(sites(), 2, *args)
    got = ext.get_indice_pairs_3d_forward(sites(), torch.tensor(2, dtype=torch.int32), *args)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))


CONVOLUTIONS = {  # stride, padding, subm, transpose, output grid
    "submanifold": (1, 1, 1, 0, SHAPE),
    "sparse": (2, 1, 0, 0, [3, 3, 4]),
    "transposed": (2, 1, 0, 1, [9, 11, 13]),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions_and_their_gradients_are_those_of_dense_grids(ext, kind):
    stride, padding, subm, transpose, out_shape = CONVOLUTIONS[kind]
    indices = sites()
    out_indices, indice_pairs, num = pairs(ext, indices, out_shape, 3, stride, padding, subm, transpose)
    features = torch.randn(len(indices), 3, dtype=torch.float64, requires_grad=True)
    filters = torch.randn(3, 3, 3, 3, 4, dtype=torch.float64, requires_grad=True)
    grid = dense(features, indices, SHAPE)
    if transpose:
        image = functional.conv_transpose3d(grid, filters.permute(3, 4, 0, 1, 2), stride=stride, padding=padding)
    else:
        image = functional.conv3d(grid, filters.permute(4, 3, 0, 1, 2), stride=stride, padding=padding)
    expected = at_sites(image, out_indices)
    out = ext.indice_conv_forward(features, filters, indice_pairs, num, len(out_indices), 0, subm)
    assert not out.requires_grad
    torch.testing.assert_close(out, expected)
    bias = torch.randn(4, dtype=torch.float64)
    fused = ext.fused_indice_conv_forward(features, filters, bias, indice_pairs, num, len(out_indices), 0, subm)
    torch.testing.assert_close(fused, expected + bias)

    grad = torch.randn_like(out)
    got = ext.indice_conv_backward(features, filters, grad, indice_pairs, num, 0, subm)
    for mine, theirs in zip(got, torch.autograd.grad(expected, (features, filters), grad), strict=True):
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, theirs)


def test_an_inverse_convolution_swaps_the_rows_of_the_pairs(ext):
    indices = sites()
    out_indices, indice_pairs, num = pairs(ext, indices, [3, 3, 4], 3, 2, 1)
    filters = torch.randn(3, 3, 3, 2, 4)
    features = torch.randn(len(out_indices), 2)
    swapped = indice_pairs.flip(1).contiguous()
    out = ext.indice_conv_forward(features, filters, indice_pairs, num, len(indices), 1, 0)
    assert out.shape == (len(indices), 4)
    torch.testing.assert_close(out, ext.indice_conv_forward(features, filters, swapped, num, len(indices), 0, 0))
    grad = torch.randn_like(out)
    got = ext.indice_conv_backward(features, filters, grad, indice_pairs, num, 1, 0)
    expected = ext.indice_conv_backward(features, filters, grad, swapped, num, 0, 0)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_form_with_a_grid_gives_the_same_pairs(ext):
    plain = pairs(ext, sites(), [3, 3, 4], 3, 2, 1)
    with_grid = pairs(ext, sites(), [3, 3, 4], 3, 2, 1, name="get_indice_pairs_3d_backward")
    for mine, theirs in zip(plain, with_grid, strict=True):
        assert torch.equal(mine, theirs)


def test_an_output_grid_that_does_not_follow_is_refused(ext):
    with pytest.raises(ValueError, match=r"outSpatialShape must be \[3, 3, 4\]"):
        pairs(ext, sites(), [4, 4, 4], 3, 2, 1)


def test_max_pooling_starts_at_0_and_shares_the_gradient_among_equals(ext):
    line = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 5]]).int()
    axes = [[1, 2], [1, 2], [0, 0], [1, 1], [0, 0]]
    out_indices, indice_pairs, num = ext.get_indice_pairs_2d_forward(line, 1, [1, 3], [1, 6], *axes, 0, 0)
    features = torch.tensor([[2.0], [2.0], [-1.0], [3.0], [1.0]])
    out = ext.indice_maxpool_forward(features, indice_pairs, num, len(out_indices))
    assert out.flatten().tolist() == [2, 0, 3]
    grad = ext.indice_maxpool_backward(features, out, torch.tensor([[1.0], [10.0], [100.0]]), indice_pairs, num)
    assert grad.flatten().tolist() == [1, 1, 0, 100, 0]


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_the_tables_that_a_list_carries_are_those_of_the_list(ext, kind):
    stride, padding, subm, transpose, out_shape = CONVOLUTIONS[kind]
    twice = torch.cat([sites(), sites()[:3], torch.full((1, 4), 99).int()])  # duplicates, and a site outside
    out_indices, indice_pairs, num = pairs(ext, twice, out_shape, 3, stride, padding, subm, transpose)
    counts = (len(twice), len(out_indices))
    carried = _mmcv_sparse.tables(indice_pairs, num, *counts, 0)
    read = _mmcv_sparse.tables(indice_pairs.clone(), num, *counts, 0)
    assert torch.equal(carried.gather, read.gather)
    assert torch.equal(carried.gather.flip(0) if carried.mirrored else carried.scatter, read.scatter)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_rulebook_and_its_plans_are_made_once_for_all_layers_that_share_a_list(ext, monkeypatch, kind):
    made = Counter()
    monkeypatch.setattr(_op, "recorder", lambda op, kernel, args: made.update([op.name]) or kernel(*args))
    stride, padding, subm, transpose, out_shape = CONVOLUTIONS[kind]
    out_indices, indice_pairs, num = pairs(ext, sites(), out_shape, 3, stride, padding, subm, transpose)
    neighbors = "submanifold_neighbors" if subm else "sparse_neighbors"
    assert made[neighbors] == 1
    features, filters, grad = torch.randn(40, 2), torch.randn(3, 3, 3, 2, 4), torch.randn(len(out_indices), 4)
    before = made.copy()
    for _ in range(3):
        ext.indice_conv_forward(features, filters, indice_pairs, num, len(out_indices), 0, subm)
        ext.indice_conv_backward(features, filters, grad, indice_pairs, num, 0, subm)
    assert set(made - before) == {"sparse_conv", "sparse_conv_backward_weight"}
    found = _mmcv_sparse.tables(indice_pairs, num, 40, len(out_indices), 0)
    assert found.pairs is not None, "a kernel without a plan makes its own, in every call"
    assert subm or found.transposed_pairs is not None, "as of the gradient, and of an inverse convolution"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_beside_a_cpu_a_list_made_in_training_carries_the_plans_of_gradients(ext, kind, training):
    stride, padding, subm, transpose, out_shape = CONVOLUTIONS[kind]
    with FakeTensorMode(shape_env=ShapeEnv()), torch.set_grad_enabled(training):
        indices = torch.zeros(40, 4, dtype=torch.int32, device="meta")  # as any that is not a CPU
        _, indice_pairs, _ = pairs(ext, indices, out_shape, 3, stride, padding, subm, transpose)
        found = getattr(indice_pairs, _mmcv_sparse.RULEBOOK)[-1]
    assert found.tiles is not None
    assert (found.pairs is not None) == training
    assert (found.transposed_tiles is not None) == (training and not subm)


def test_a_list_carries_its_plans_through_autograd(ext):
    """As mmcv's convolutions save it for their backward."""
    found = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, features, indice_pairs):
            ctx.save_for_backward(indice_pairs)
            return features.clone()

        @staticmethod
        def backward(ctx, grad):
            found.append(_mmcv_sparse.tables(*ctx.saved_tensors, num, 40, 40, 0))
            return grad, None

    _, indice_pairs, num = pairs(ext, sites(), SHAPE, 3, 1, 1, subm=1)
    Saves.apply(torch.ones(40, 1, requires_grad=True), indice_pairs).sum().backward()
    assert found[0] is _mmcv_sparse.tables(indice_pairs, num, 40, 40, 0)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_the_list_of_pairs_is_that_of_get_indice_pairs(ext, kind):
    stride, padding, subm, transpose, out_shape = CONVOLUTIONS[kind]
    twice = torch.cat([sites(), sites()[:3], torch.full((1, 4), 99).int()])
    got = pairs(ext, twice, out_shape, 3, stride, padding, subm, transpose)
    expected = triops.get_indice_pairs(
        twice, 2, SHAPE, 3, 1 if subm else stride, padding, subm=bool(subm), transpose=bool(transpose)
    )
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


def test_a_list_of_pairs_that_changes_is_read_anew(ext):
    out_indices, indice_pairs, num = pairs(ext, sites(), [3, 3, 4], 3, 2, 1)
    counts = (40, len(out_indices))
    first = _mmcv_sparse.tables(indice_pairs, num, *counts, 0)
    assert _mmcv_sparse.tables(indice_pairs, num, *counts, 0) is first
    assert _mmcv_sparse.tables(indice_pairs, num, *counts[::-1], 1).gather is first.scatter
    indice_pairs[:, 1] = 0
    changed = _mmcv_sparse.tables(indice_pairs, num, *counts, 0)
    assert set(changed.scatter.unique().tolist()) <= {-1, 0}


@pytest.mark.parametrize("written", [False, True])
def test_a_list_with_other_counts_is_read_anew(ext, written):
    out_indices, indice_pairs, num = pairs(ext, sites(), [3, 3, 4], 3, 2, 1)
    counts = (40, len(out_indices))
    first = _mmcv_sparse.tables(indice_pairs, num, *counts, 0)
    assert _mmcv_sparse.tables(indice_pairs, num.long(), *counts, 0) is first
    fewer = num if written else num.clone()
    fewer[0] = 0
    assert first.gather[0].max() >= 0
    assert _mmcv_sparse.tables(indice_pairs, fewer, *counts, 0).gather[0].max() < 0
    assert first.gather[0].max() >= 0


def test_a_list_that_changes_in_inference_mode_is_read_anew(ext):
    with torch.inference_mode():
        _, indice_pairs, num = pairs(ext, sites(), SHAPE, 3, 1, 1, subm=1)
        indice_pairs[:, 1] = 0
        changed = _mmcv_sparse.tables(indice_pairs, num, 40, 40, 0)
    assert set(changed.scatter.unique().tolist()) <= {-1, 0}


def test_a_rulebook_of_fewer_offsets_takes_the_first_filters_as_in_mmcv(ext):
    """Cylinder3D shares one key between kernels (1, 3, 3) and (3, 3, 3)."""
    flat = [[1, 3, 3], [1] * 3, [0, 1, 1], [1] * 3, [0] * 3]
    _, indice_pairs, num = ext.get_indice_pairs_3d_forward(sites(), 2, SHAPE, SHAPE, *flat, 1, 0)
    features, filters, grad = torch.randn(40, 2), torch.randn(3, 3, 3, 2, 4), torch.randn(40, 4)
    out = ext.indice_conv_forward(features, filters, indice_pairs, num, 40, 0, 1)
    assert torch.equal(out, ext.indice_conv_forward(features, filters[:1], indice_pairs, num, 40, 0, 1))
    _, grad_filters = ext.indice_conv_backward(features, filters, grad, indice_pairs, num, 0, 1)
    assert grad_filters.shape == filters.shape
    assert grad_filters[0].any()
    assert not grad_filters[1:].any()
    with pytest.raises(ValueError, match="indicePairs has 9 kernel offsets, and filters"):
        ext.indice_conv_forward(features, filters[:1, :1], indice_pairs, num, 40, 0, 1)


def test_pairs_work_in_inference_mode(ext):
    with torch.inference_mode():
        _, indice_pairs, num = pairs(ext, sites(), SHAPE, 3, 1, 1, subm=1)
        out = ext.indice_conv_forward(torch.ones(40, 1), torch.ones(3, 3, 3, 1, 1), indice_pairs, num, 40, 0, 1)
    assert out.sum() == num.sum()


def test_a_pair_outside_the_features_is_refused(ext):
    _, indice_pairs, num = pairs(ext, sites(), SHAPE, 3, 1, 1, subm=1)
    with pytest.raises(IndexError, match="indicePairs"):
        ext.indice_conv_forward(torch.ones(39, 1), torch.ones(3, 3, 3, 1, 1), indice_pairs, num, 40, 0, 1)


# OpenPCDet

CENTRED = torch.tensor([[0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 0.0]])
NEAR = torch.tensor([[0.0, 0.0, -0.9], [1.005, 0.0, 0.0], [1.000005, 0.0, 0.0], [1.05, 0.0, 0.0]])


def test_openpcdet_has_z_at_the_centre_and_two_margins():
    on_cpu = triops.compat.pcdet.points_in_boxes_cpu(NEAR, CENTRED)
    assert on_cpu.dtype == torch.int32
    assert on_cpu.tolist() == [[1, 1, 1, 0]]
    assert triops.compat.pcdet.points_in_boxes_gpu(NEAR[None], CENTRED[None]).tolist() == [[0, -1, 0, -1]]


def test_openpcdet_answers_arrays_with_arrays():
    got = triops.compat.pcdet.points_in_boxes_cpu(NEAR.numpy(), CENTRED.numpy().astype(np.float64))
    assert isinstance(got, np.ndarray)
    assert got.tolist() == [[1, 1, 1, 0]]


def test_openpcdets_pooling_chooses_its_method_when_called():
    features = torch.tensor([[1.0], [2.0], [3.0], [4.0]], requires_grad=True)
    pool = triops.compat.pcdet.RoIAwarePool3d(out_size=1, max_pts_each_voxel=8)
    assert pool(CENTRED, NEAR, features).flatten().tolist() == [3]
    pool(CENTRED, NEAR, features, pool_method="avg").sum().backward()
    assert features.grad.flatten().tolist() == [0.5, 0, 0.5, 0]


def test_openpcdets_extension_modules_are_supplied(libraries):
    _finder.install("pcdet")
    module = importlib.import_module("pcdet.ops.roiaware_pool3d.utils").roiaware_pool3d_cuda
    first, each = torch.full((1, 4), -1).int(), torch.zeros(1, 4).int()
    assert module.points_in_boxes_gpu(CENTRED[None], NEAR[None], first) == 1
    assert module.points_in_boxes_cpu(CENTRED, NEAR, each) == 1
    assert first.tolist() == [[0, -1, 0, -1]]
    assert each.tolist() == [[1, 1, 1, 0]]
    pooled, argmax, lists = (
        torch.zeros(1, 1, 1, 1, 1),
        torch.zeros(1, 1, 1, 1, 1).int(),
        torch.zeros(1, 1, 1, 1, 8).int(),
    )
    module.forward(CENTRED, NEAR, torch.arange(4.0)[:, None], argmax, lists, pooled, 0)
    assert (pooled.item(), argmax.item()) == (2, 2)
    grad = torch.zeros(4, 1)
    module.backward(lists, argmax, torch.ones(1, 1, 1, 1, 1), grad, 0)
    assert grad.flatten().tolist() == [0, 0, 1, 0]
    extension = importlib.import_module("pcdet.ops.iou3d_nms.utils").iou3d_nms_cuda
    with pytest.raises(NotImplementedError, match="points_to_boxes_gpu"):
        extension.points_to_boxes_gpu(torch.zeros(1, 7))


def test_openpcdets_overlaps_row_by_row_go_by_two_names(libraries):
    _finder.install("pcdet")
    extension = importlib.import_module("pcdet.ops.iou3d_nms.utils").iou3d_nms_cuda
    boxes = torch.tensor([[0.0, 0, 0, 4, 2, 2, 0], [1.0, 0, 0, 4, 2, 2, 0]])
    for name in ("boxes_aligned_overlap_bev_gpu", "paired_boxes_overlap_bev_gpu"):
        shared = torch.zeros(2, 1)
        assert getattr(extension, name)(boxes, boxes.flip(0), shared) == 1
        assert shared.flatten().tolist() == pytest.approx([6, 6])
    ious = torch.zeros(1, 2)
    extension.boxes_iou_bev_cpu(boxes[:1], boxes, ious)
    assert ious.tolist()[0] == pytest.approx([1, 0.6])
    paired = triops.compat.pcdet.paired_boxes_iou3d_gpu(boxes, boxes.flip(0))
    assert paired.tolist() == pytest.approx([0.6, 0.6])


def test_pointnet2_imports_and_raises_by_name(libraries):
    _finder.install("pcdet")
    pointnet2 = importlib.import_module("pcdet.ops.pointnet2.utils").pointnet2
    with pytest.raises(NotImplementedError, match=r"pointnet2_stack_cuda\.a_wrapper_of_the_future"):
        pointnet2.a_wrapper_of_the_future(1, 2)


def test_numbers_within_groups_are_stable(libraries):
    _finder.install("pcdet")
    extension = importlib.import_module("pcdet.ops.ingroup_inds.op").ingroup_inds_cuda
    out = torch.full((5,), -1)
    extension.forward(torch.tensor([3, 1, 3, 3, 1]), out)
    assert out.tolist() == [0, 0, 1, 2, 1]


@pytest.mark.parametrize("package", ["pcdet.ops.bev_pool", "projects.ops.bev_pool"])
def test_features_of_one_cell_are_summed_where_its_coordinates_say(libraries, package):
    """As BEVFusion calls it: points sorted by (h, w, d, b), cells in memory by b, d, h, w."""
    _finder.install("pcdet", "bevfusion")
    extension = importlib.import_module(package).bev_pool_ext
    batch, layers, height, width = 2, 1, 3, 4
    torch.manual_seed(0)
    coords = torch.stack([torch.randint(0, size, (50,)) for size in (height, width, layers, batch)], 1)
    ranks = ((coords[:, 0] * width + coords[:, 1]) * layers + coords[:, 2]) * batch + coords[:, 3]
    ranks, order = ranks.sort(stable=True)
    coords, features = coords[order].int(), torch.randn(50, 5)
    starts = (ranks.diff(prepend=torch.tensor([-1])) != 0).nonzero()[:, 0].int()
    lengths = torch.cat([starts, torch.tensor([50]).int()]).diff()
    geometry = (coords, lengths, starts, batch, layers, height, width)
    out = extension.bev_pool_forward(features, *geometry)
    expected = torch.zeros(batch, layers, height, width, 5)
    for feature, (h, w, d, b) in zip(features, coords.tolist(), strict=True):
        expected[b, d, h, w] += feature
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    back = extension.bev_pool_backward(grad, *geometry)
    assert torch.equal(back, torch.stack([grad[b, d, h, w] for h, w, d, b in coords.tolist()]))


def test_bevfusions_voxels_have_cells_of_x_y_z(libraries):
    _finder.install("bevfusion")
    layer = importlib.import_module("projects.ops.voxel")
    points = torch.tensor([[2.5, 0.5, 0.5, 7.0], [0.5, 1.5, 0.5, 8.0], [2.1, 0.9, 0.1, 9.0], [9.0, 0.0, 0.0, 1.0]])
    size, bounds = [1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 4.0, 2.0, 1.0]
    voxels, cells, counts = torch.zeros(5, 2, 4), torch.zeros(5, 3).int(), torch.zeros(5).int()
    assert layer.hard_voxelize(points, voxels, cells, counts, size, bounds, 2, 5, 3, True) == 2
    assert cells[:2].tolist() == [[2, 0, 0], [0, 1, 0]]
    assert counts.tolist() == [2, 1, 0, 0, 0]
    assert voxels[:2, :, 3].tolist() == [[7, 9], [8, 0]]
    each = torch.zeros(4, 3).int()
    layer.dynamic_voxelize(points, each, size, bounds, 3)
    assert each.tolist() == [[2, 0, 0], [0, 1, 0], [2, 0, 0], [-1, -1, -1]]


def test_pointops_imports_and_raises_by_name(libraries):
    _finder.install("pointops")
    with pytest.raises(NotImplementedError, match=r"pointops\.a_query_of_the_future"):
        importlib.import_module("pointops").a_query_of_the_future(16, torch.zeros(3, 3))
    write(libraries, {"pointops/__init__.py": "from pointops._C import knn_query_cuda\n"})
    del sys.modules["pointops"]
    importlib.invalidate_caches()
    assert importlib.import_module("pointops").__file__ == str(libraries / "pointops/__init__.py")
    assert _finder.is_ours(sys.modules["pointops._C"])


# the real mmcv-lite, where it is installed


@pytest.fixture
def mmcv_ops():
    pytest.importorskip("mmcv", reason="mmcv-lite is an extra")
    if importlib.machinery.PathFinder.find_spec("mmcv._ext", sys.modules["mmcv"].__path__):
        pytest.skip("this mmcv is compiled")
    _finder.install("mmcv")
    return importlib.import_module("mmcv.ops")


def test_every_name_that_mmcv_asserts_is_there(mmcv_ops):
    code = """
import triops.compat.mmcv
from mmcv.utils import ext_loader
names, load = set(), ext_loader.load_ext
ext_loader.load_ext = lambda name, functions: (names.update(functions), load(name, functions))[1]
import mmcv.ops
print(len(names))
"""
    assert run(code) == "112"


def test_mmcvs_sparse_layers_train(mmcv_ops):
    layers = mmcv_ops.SparseSequential(
        mmcv_ops.SubMConv3d(4, 8, 3, indice_key="a"),
        mmcv_ops.SubMConv3d(8, 8, 3, indice_key="a"),
        mmcv_ops.SparseConv3d(8, 8, 3, stride=2, padding=1, indice_key="b"),
        mmcv_ops.SparseMaxPool3d(2, stride=1),
    )
    back = mmcv_ops.SparseInverseConv3d(8, 2, 3, indice_key="b")
    features = torch.randn(40, 4, requires_grad=True)
    tensor = mmcv_ops.SparseConvTensor(features, sites(), SHAPE, 2)
    layers(tensor).dense().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layers.parameters())
    assert features.grad.abs().sum() > 0
    assert back(layers[2](layers[1](layers[0](tensor)))).features.shape == (40, 2)


def test_mmcvs_layers_share_the_tables_of_one_indice_key(mmcv_ops):
    made = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_list_of", "_make_tables"):
            original = getattr(_mmcv_sparse, name)
            patch.setattr(_mmcv_sparse, name, lambda *args, f=original, n=name: made.append(n) or f(*args))
        layers = mmcv_ops.SparseSequential(*(mmcv_ops.SubMConv3d(4, 4, 3, indice_key="a") for _ in range(3)))
        layers(mmcv_ops.SparseConvTensor(torch.randn(40, 4), sites(), SHAPE, 2)).features.sum().backward()
    assert made == ["_list_of"]
