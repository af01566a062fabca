"""Import hooks that supply modules which nothing else supplies: extension modules of mmcv and OpenPCDet, and packages.

After `triops activate` every start of Python runs this file, which must cost next to nothing to programs that import
none of them. So triops is imported when a supplied module is, and of the standard library only what every start has
loaded anyway: no `typing`, no `importlib.machinery`, no `__future__`.
"""

import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import PathFinder, SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any

# Modules of mmcv whose Python functions are replaced: see `triops.compat.mmcv.replace_wrappers`.
WRAPPERS = (
    "mmcv.ops.points_in_boxes", "mmcv.ops.diff_iou_rotated", "mmcv.ops.furthest_point_sample", "mmcv.ops.knn",
    "mmcv.ops.carafe",
)  # fmt: skip

# Modules that look for compiled functions when they are executed, the library of ours that has these, and the module of
# triops whose `complete` then is given them.
COMPLETED = {
    "torch_geometric.typing": ("torch_cluster", "triops.compat.torch_cluster._geometric"),
    "torchvision.extension": ("torchvision", "triops.compat.torchvision"),
}

# Modules of kernels in `numba.cuda`, which fail to import or to run without a CUDA toolkit that fits. They are Python
# files that every installation has, so ours is found first where it was asked for.
REPLACED = {
    "mmdet3d.evaluation.functional.kitti_utils.rotate_iou": "mmdet3d",
    "mmdet3d.core.evaluation.kitti_utils.rotate_iou": "mmdet3d",
    "pcdet.datasets.kitti.kitti_object_eval_python.rotate_iou": "pcdet",
    "pcdet.datasets.once.once_eval.iou_utils": "pcdet",
}

# Packages supplied as a whole, and the package of triops that holds their names, submodule by submodule.
PACKAGES = {
    "spconv": "triops.spconv",
    "cumm": "triops.spconv.cumm",
    "torch_scatter": "triops.compat.torch_scatter",
    "torch_cluster": "triops.compat.torch_cluster",
    "torchsparse": "triops.compat.torchsparse",
    "MinkowskiEngine": "triops.compat.minkowski_engine",
    "MinkowskiEngineBackend": "triops.compat.minkowski_engine.backend",
}

# Modules of MinkowskiEngine, and the modules of ours that have their names. It puts its folder on the path, so that
# programs import them by themselves, too.
MINKOWSKI = {
    "MinkowskiBroadcast": "broadcast",
    "MinkowskiChannelwiseConvolution": "channelwise",
    "MinkowskiCommon": "common",
    "MinkowskiConvolution": "convolution",
    "MinkowskiCoordinateManager": "manager",
    "MinkowskiFunctional": "functional",
    "MinkowskiInterpolation": "interpolation",
    "MinkowskiKernelGenerator": "kernels",
    "MinkowskiNetwork": "network",
    "MinkowskiNonlinearity": "nonlinearity",
    "MinkowskiNormalization": "normalization",
    "MinkowskiOps": "ops",
    "MinkowskiPooling": "pooling",
    "MinkowskiPruning": "pruning",
    "MinkowskiSparseTensor": "sparse_tensor",
    "MinkowskiTensor": "tensor",
    "MinkowskiTensorField": "tensor_field",
    "MinkowskiUnion": "union",
    "sparse_matrix_functions": "sparse_matrix",
}
LIBRARIES = (
    "mmcv", "mmdet3d", "pcdet", "bevfusion", "pointops", "pointnet2", "ms_deform_attn", "detectron2", "torchvision",
    *PACKAGES,
)  # fmt: skip

# Extension modules by their full name, and the library that each belongs to.
EXTENSIONS = {
    "mmcv._ext": "mmcv",
    "pointops": "pointops",
    "pointops._C": "pointops",
    "pointgroup_ops": "pointops",
    "pointops2_cuda": "pointops",
    "sptr_cuda": "pointops",
    "softgroup.ops.ops": "pointops",
    "pointnet2": "pointnet2",
    "pointnet2._ext": "pointnet2",
    "pointnet2_ops._ext": "pointnet2",
    "chamfer": "pointnet2",
    "chamferdist._C": "pointnet2",
    "MultiScaleDeformableAttention": "ms_deform_attn",
    "groundingdino._C": "ms_deform_attn",
    "detrex._C": "ms_deform_attn",
    "DCNv3": "ms_deform_attn",
    "detectron2._C": "detectron2",
}
PARENTS = ("pointops", "pointnet2")  # of the above those that others lie in

# Extension modules that programs carry somewhere in their own packages: how the package's name ends, and the library.
CARRIED = {
    "bev_pool_ext": (".ops.bev_pool", "bevfusion"),
    "bev_pool_v2_ext": (".ops.bev_pool_v2", "bevfusion"),
    "occ_pool_ext": (".ops.occ_pooling", "bevfusion"),
    "voxel_pooling_train_ext": (".ops.voxel_pooling_train", "bevfusion"),
    "voxel_pooling_inference_ext": (".ops.voxel_pooling_inference", "bevfusion"),
    "voxel_layer": (".ops.voxel", "bevfusion"),
    "ingroup_inds_cuda": (".ops.ingroup_inds", "pcdet"),
    "iou3d_nms_cuda": (".ops.iou3d_nms", "pcdet"),
    "deformable_aggregation_ext": (".ops", "ms_deform_attn"),
}

# What mmdetection3d compiled under `mmdet3d.ops` before 1.0; the voxels are among the above.
OF_MMDET3D = (
    "iou3d_cuda", "roiaware_pool3d_ext", "ball_query_ext", "knn_ext", "interpolate_ext", "group_points_ext",
    "gather_points_ext", "furthest_point_sample_ext", "assign_score_withk_ext", "sparse_conv_ext",
)  # fmt: skip


def extension_library(fullname: str) -> "str | None":
    """The library that an extension module belongs to; the module of that name in `triops.compat` makes it."""
    package, _, leaf = fullname.rpartition(".")
    if fullname in REPLACED:
        return REPLACED[fullname]
    if fullname in EXTENSIONS:
        return EXTENSIONS[fullname]
    if package.startswith("pcdet.ops.") and leaf.endswith(("_cuda", "_ext")):
        return "pcdet"
    if package.startswith("mmdet3d.ops.") and leaf in OF_MMDET3D:
        return "mmdet3d"
    end, library = CARRIED.get(leaf, ("", None))
    return library if package.endswith(end) else None


def package_source(fullname: str) -> "str | None":
    """The module of triops whose names a supplied package, or a module in it, has; None for every other module."""
    library, dot, rest = fullname.partition(".")
    if fullname in MINKOWSKI:
        return f"{PACKAGES['MinkowskiEngine']}.{MINKOWSKI[fullname]}"
    if library == "MinkowskiEngine":
        rest = MINKOWSKI.get(rest, rest)
    return PACKAGES[library] + dot + rest if library in PACKAGES else None


def import_module(name: str) -> "Any":
    __import__(name)
    return sys.modules[name]


class ExtensionLoader:
    def create_module(self, spec: ModuleSpec) -> "ModuleType":
        library = extension_library(spec.name)
        if library is None:
            made: ModuleType = import_module("triops.compat._extension").same_names(
                spec.name, package_source(spec.name)
            )
        else:
            made = import_module(f"triops.compat.{library}").extension(spec.name)
        return made

    def exec_module(self, module: "ModuleType") -> None:
        """The module is complete as created."""


class ExtensionFinder:
    """Stands last in `sys.meta_path`, so that an installed module, which the others find, wins."""

    def __init__(self) -> None:
        self.libraries: set[str] = set()

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        top, dot, rest = fullname.partition(".")
        if top in PARENTS and dot and "." not in rest and is_ours(sys.modules.get(top)):
            # A folder of that name may have come onto the path since, as a package without `__init__.py` would see.
            spec = PathFinder.find_spec(fullname, [f"{entry or '.'}/{top}" for entry in sys.path], target)
            if spec is not None:
                return spec
        source = package_source(fullname)
        if fullname in MINKOWSKI:
            top, dot = "MinkowskiEngine", "."  # a module of it, by itself
        if (top if source is not None else extension_library(fullname)) not in self.libraries:
            return None
        if dot and source is not None and not is_ours(sys.modules.get(top)):
            return None  # the package is somebody else's, and so are all modules in it
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:  # came after us, and may know better
            if finder.find_spec(fullname, path, target) is not None:
                return None
        is_package = source is not None or fullname in PARENTS
        if dot and source is not None:
            from importlib.util import find_spec

            found = find_spec(str(source))
            if found is None:
                return None
            is_package = found.submodule_search_locations is not None
        loader: Any = ExtensionLoader()  # of the old protocol
        return ModuleSpec(fullname, loader, origin="triops", is_package=is_package)


class WrapperLoader(SourceFileLoader):
    def exec_module(self, module: "ModuleType") -> None:
        super().exec_module(module)
        if module.__name__ in COMPLETED:
            if not has_all(module):
                import_module(COMPLETED[module.__name__][1]).complete(module)
            return
        extension: Any = getattr(module, "ext_module", None)
        if extension is not None and is_ours(extension):
            import_module("triops.compat.mmcv").replace_wrappers(module)


class WrapperFinder:
    """Stands first in `sys.meta_path`: supplies the replaced modules, and has the wrappers of mmcv replaced, and other
    modules completed, as soon as they are executed."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname in REPLACED:
            finder = installed()
            loader: Any = ExtensionLoader()
            asked = finder is not None and REPLACED[fullname] in finder.libraries
            return ModuleSpec(fullname, loader, origin="triops") if asked else None
        if fullname in COMPLETED:
            finder = installed()
            if finder is None or COMPLETED[fullname][0] not in finder.libraries:
                return None
        elif fullname not in WRAPPERS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        spec.loader = WrapperLoader(spec.loader.name, spec.loader.path)
        return spec


def has_all(module: "ModuleType") -> bool:
    """Whether `torchvision.extension` has found operators, for GPUs too where torch is built for them."""
    found: Any = getattr(module, "_has_ops", None)
    if found is None or not found():
        return False
    torch = sys.modules["torch"]
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    return not (torch.version.cuda or torch.version.hip) or bool(known("torchvision::nms", "CUDA"))


def is_ours(module: "ModuleType | None") -> bool:
    spec = getattr(module, "__spec__", None)
    return spec is not None and isinstance(spec.loader, ExtensionLoader)


def installed() -> "ExtensionFinder | None":
    return next((finder for finder in sys.meta_path if isinstance(finder, ExtensionFinder)), None)


def install(*libraries: str) -> None:
    """Supply the modules of these `LIBRARIES` from now on."""
    finder = installed()
    if finder is None:
        finder = ExtensionFinder()
        sys.meta_path.append(finder)
        sys.meta_path.insert(0, WrapperFinder())
    finder.libraries.update(libraries)


def uninstall() -> None:
    """Supply nothing any more. Modules that are imported already stay."""
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, ExtensionFinder | WrapperFinder)]
