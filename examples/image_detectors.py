"""What the tests and the benchmark of mmdetection's networks share: whole detectors of images, running on triops.

Each network is built from the config that mmdetection ships, with random weights. Images are synthetic, so nothing has
to be downloaded. docs/dropin/mmdetection.md says how to install mmdetection.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectors import reference_in_backward
from torch import Tensor

import triops
import triops.compat.mmcv  # supplies mmcv._ext, which mmdetection imports below

SMALL = 96, 160  # height, width of an image
BOXES = ((10, 12, 50, 60), (60, 20, 120, 90), (20, 64, 50, 92))  # x1, y1, x2, y2 of its objects
MOST = {
    "num_layers": 2,
    "num_blocks": 1,
    "num_queries": 40,
    "num_dn_queries": 20,
    "nms_pre": 200,
    "max_per_img": 40,
    "num": 64,
}


@dataclass(frozen=True)
class Network:
    title: str
    config: str  # where mmdetection keeps it
    operators: set[str]  # what it cannot do without
    masks: bool = False


NETWORKS = {
    "faster_rcnn": Network(
        "Faster R-CNN", "faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py", {"roi_align_forward", "roi_align_backward", "nms"}
    ),
    "mask_rcnn_dcnv2": Network(
        "Mask R-CNN with DCNv2",
        "dcnv2/mask-rcnn_r50-mdconv-c3-c5_fpn_1x_coco.py",
        {"deform_conv2d", "deform_conv2d_backward", "roi_align_forward", "roi_align_backward", "nms"},
        masks=True,
    ),
    "reppoints": Network(
        "RepPoints",
        "reppoints/reppoints-moment_r50_fpn-gn_head-gn_1x_coco.py",
        {"deform_conv2d", "deform_conv2d_backward", "nms"},
    ),
    "dyhead": Network(
        "DyHead",
        "dyhead/atss_r50_fpn_dyhead_1x_coco.py",
        {"deform_conv2d", "deform_conv2d_backward", "nms"},
    ),
    "deformable_detr": Network(
        "Deformable DETR",
        "deformable_detr/deformable-detr_r50_16xb2-50e_coco.py",
        {"ms_deform_attn", "ms_deform_attn_backward"},
    ),
    "dino": Network("DINO", "dino/dino-4scale_r50_8xb2-12e_coco.py", {"ms_deform_attn", "ms_deform_attn_backward"}),
}


def build(network: Network, device: str = "cpu", small: bool = False) -> Any:
    """The network of a config with random weights.

    small: the backbone a quarter as wide and convolutions behind it an eighth, two layers of a transformer, few
    proposals and queries, since the reference takes boxes one by one.
    """
    import mmdet
    from mmdet.registry import MODELS
    from mmdet.utils import register_all_modules
    from mmengine.config import Config
    from mmengine.logging import MMLogger

    MMLogger.get_instance("mmengine", log_level="WARNING")  # else every weight's initialisation is a line
    warnings.filterwarnings("ignore", module="mm(cv|det|engine)")
    register_all_modules()
    settings = Config.fromfile(Path(mmdet.__file__).parent / ".mim" / "configs" / network.config).model
    settings.backbone.init_cfg = None  # no weights to download
    if small:
        backbone = settings.pop("backbone")
        _shrink(settings, channels=1 if "encoder" in settings else 8)
        backbone.update(base_channels=16)  # where a ResNet has 64
        neck = settings.neck[0] if isinstance(settings.neck, list) else settings.neck
        neck.in_channels = [channels // 4 for channels in neck.in_channels]
        settings.backbone = backbone
    torch.manual_seed(0)
    model = MODELS.build(settings)
    model.init_weights()
    _make_confident(model)
    return model.to(device)


def _shrink(settings: Any, channels: int) -> None:
    """Divides numbers of channels and limits those of layers, proposals and queries, wherever they stand."""
    for key, value in settings.items():
        if isinstance(value, dict):
            _shrink(value, channels)
        elif isinstance(value, list | tuple):
            for one in value:
                if isinstance(one, dict):
                    _shrink(one, channels)
        elif isinstance(value, int) and value > 1:
            if key.endswith("channels"):
                settings[key] = value // channels
            else:
                settings[key] = min(value, MOST.get(key, value))


def _make_confident(model: Any) -> None:
    """An untrained network is sure of nothing; with this its scores vary, as those of a trained one do."""
    for name, parameter in model.named_parameters():
        if name.endswith(("fc_cls.weight", "reppoints_cls_out.weight", "atss_cls.weight")):
            torch.nn.init.normal_(parameter, std=0.2)


def picture(
    network: Network,
    size: tuple[int, int] = SMALL,
    boxes: Sequence[Sequence[int]] = BOXES,
    seed: int = 0,
) -> dict[str, Any]:
    """A noisy image with bright rectangles, as mmdetection takes it."""
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    height, width = size
    image = torch.randint(0, 80, (3, height, width), generator=torch.Generator().manual_seed(seed))
    masks = np.zeros((len(boxes), height, width), np.uint8)
    for i, (x1, y1, x2, y2) in enumerate(boxes):
        image[i % 3, y1:y2, x1:x2] = (image[i % 3, y1:y2, x1:x2] + 150).clamp(max=255)
        masks[i, y1:y2, x1:x2] = 1
    sample = DetDataSample()
    sample.set_metainfo({"img_shape": size, "ori_shape": size, "scale_factor": (1.0, 1.0), "img_id": seed})
    labels = torch.tensor([(0, 2, 7)[i % 3] for i in range(len(boxes))])
    sample.gt_instances = InstanceData(bboxes=torch.tensor(boxes, dtype=torch.float32), labels=labels)
    if network.masks:
        sample.gt_instances.masks = BitmapMasks(masks, height, width)
    return {"inputs": [image.to(torch.uint8)], "data_samples": [sample]}


def losses(model: Any, data: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """The loss to differentiate, and its parts by name."""
    model.train()
    data = {**data, "data_samples": [copy.deepcopy(sample) for sample in data["data_samples"]]}
    total, parts = model.parse_losses(model(**model.data_preprocessor(data, training=True), mode="loss"))
    return total, parts


@torch.no_grad()
def predict(model: Any, data: dict[str, Any]) -> list[Any]:
    """For each image bboxes, scores and labels."""
    model.eval()
    data = {**data, "data_samples": [copy.deepcopy(sample) for sample in data["data_samples"]]}
    return [sample.pred_instances for sample in model(**model.data_preprocessor(data, training=False), mode="predict")]


@dataclass
class Outcome:
    """Of a prediction and a loss."""

    parts: dict[str, float]  # of the loss
    boxes: Tensor  # [K, 4]
    scores: Tensor
    labels: Tensor
    loss: Tensor  # to be differentiated
    model: Any

    def gradients(self, by_reference: bool = False) -> dict[str, Tensor | None]:
        """By the name of the weight.

        by_reference: of the same forward pass, by the reference. Where a ReLU's input is within rounding of 0, two
        forward passes may differ in all that follows.
        """
        self.model.zero_grad()
        if by_reference:
            with reference_in_backward():
                self.loss.backward(retain_graph=True)
        else:
            self.loss.backward(retain_graph=True)
        return {name: p.grad for name, p in self.model.named_parameters() if p.requires_grad}

    def unlike(self, expected: Outcome) -> list[int]:
        """The boxes that the other outcome has not, within a hundredth of a pixel and of the same label."""
        return [
            i
            for i, (box, label) in enumerate(zip(self.boxes, self.labels, strict=True))
            if not (((expected.boxes - box).abs().amax(1) < 1e-2) & (expected.labels == label)).any()
        ]


def apart(gradients: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest distance of a weight's two gradients, as a part of the second's length."""
    return max(
        float((gradient - expected[name]).norm() / expected[name].norm().clamp(min=1e-6))
        for name, gradient in gradients.items()
    )


def run(model: Any, data: dict[str, Any]) -> Outcome:
    """A prediction and a loss, from the same state each time."""
    model = copy.deepcopy(model)
    torch.manual_seed(0)
    np.random.seed(0)  # heads draw samples
    found = predict(model, data)[0]
    torch.manual_seed(0)
    loss, parts = losses(model, data)
    values = {name: float(value.detach()) for name, value in parts.items()}
    return Outcome(values, found.bboxes, found.scores, found.labels, loss, model)


def run_reference(model: Any, data: dict[str, Any]) -> Outcome:
    with triops.reference_backend():
        return run(model, data)


def attention(value: Tensor, shapes: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    """What mmcv does on a GPU. On a CPU it takes a formulation in torch, which knows nothing of its extension."""
    from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttnFunction

    sizes = shapes.prod(1)
    return MultiScaleDeformableAttnFunction.apply(value, shapes, sizes.cumsum(0) - sizes, locations, weights, 64)


@contextmanager
def own_attention() -> Iterator[Callable[..., Tensor]]:
    """mmcv's attention through its extension; yields the formulation that it would take on a CPU."""
    from mmcv.ops import multi_scale_deform_attn as module

    before = module.multi_scale_deformable_attn_pytorch
    module.multi_scale_deformable_attn_pytorch = attention
    try:
        yield before
    finally:
        module.multi_scale_deformable_attn_pytorch = before
