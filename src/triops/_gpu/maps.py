"""Feature maps [N, C, H, W] from one memory format to the other, in one pass and in any dtype."""

import triton.language as tl

from triops import _gpu
from triops._rois import empty_in_format

SIDE = 64  # of a tile, in pixels and in channels


def in_format(maps, channels_last, dtype=None, target=None):
    """A copy of maps [N, C, H, W] that lie contiguous in the other format, of their dtype or another; or into `target`,
    which lies in this one."""
    if target is None:
        target = empty_in_format(maps.shape, dtype or maps.dtype, maps.device, channels_last)
    if maps.numel():
        batch, channels, height, width = maps.shape
        side = _gpu.block(SIDE, interpreted=256)
        blocks = _gpu.cdiv(height * width, side), _gpu.cdiv(channels, side)
        _copy_kernel[(batch * blocks[0] * blocks[1],)](
            maps, target, channels, height * width, *blocks, TO_LAST=channels_last, SIDE=side, num_warps=4
        )
    return target


@_gpu.kernel(specialize=("channels",))
def _copy_kernel(
    source, target, channels, pixels, blocks_of_pixels, blocks_of_channels, TO_LAST: tl.constexpr, SIDE: tl.constexpr
):
    """A program copies a tile [pixels, channels] of one image; lanes load and store along what is contiguous there."""
    block = tl.program_id(0)
    c = (block % blocks_of_channels * SIDE + tl.arange(0, SIDE)).to(tl.int64)[None, :]
    block = block // blocks_of_channels
    p = (block % blocks_of_pixels * SIDE + tl.arange(0, SIDE)).to(tl.int64)[:, None]
    image = tl.cast(block // blocks_of_pixels, tl.int64) * channels * pixels
    mask = (p < pixels) & (c < channels)
    planes = image + c * pixels + p
    last = image + p * channels + c
    value = tl.load(source + (planes if TO_LAST else last), mask=mask)
    tl.store(target + (last if TO_LAST else planes), value.to(target.dtype.element_ty), mask=mask)
