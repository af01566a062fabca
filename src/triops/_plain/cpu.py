"""Growth of labelled regions over a mask: a search with a queue, which no tensor formulation does."""

from __future__ import annotations

import numpy as np

from triops._cpu.jit import jit


@jit
def grow(labels, mask, features, means, limit, queue, count):
    """Labels [H, W] spread from the `count` pixels in the queue, first come, first served, over the mask.

    A pixel is taken while its features [H, W, F] are nearer to the mean [L, F] of the label than the root of `limit`.
    queue [H * W] holds flat pixels, and ends up with all that were taken.
    """
    height, width = labels.shape
    done = 0
    while done < count:
        y, x = queue[done] // width, queue[done] % width
        done += 1
        label = labels[y, x]
        for dy, dx in ((0, -1), (0, 1), (-1, 0), (1, 0)):
            row, column = y + dy, x + dx
            if row < 0 or row >= height or column < 0 or column >= width:
                continue
            if not mask[row, column] or labels[row, column] > 0:
                continue
            distance = np.float32(0)
            for f in range(features.shape[2]):  # each term is rounded to float32, as mmcv does
                part = np.float64(means[label, f] - features[row, column, f])
                distance = np.float32(np.float64(distance) + part * part)
            if distance >= limit:
                continue
            labels[row, column] = label
            queue[count] = row * width + column
            count += 1
