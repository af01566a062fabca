"""What `make dist` runs in an environment that holds the wheel and what it asks for, and nothing else."""

import torch

import triops
import triops.nn

points = torch.tensor([[[1.0, 0.5, 0.0], [5.0, 0.0, 0.0]]])
boxes = torch.tensor([[[0.0, 0.0, 0.0, 4.0, 2.0, 2.0, 0.0]]])
assert triops.points_in_boxes(points, boxes).tolist() == [[0, -1]]
layer = triops.nn.MeanVoxels((1, 1, 1), (0, 0, 0, 8, 8, 8), max_points=5, max_voxels=100)
made = triops.nn.SubMConv3d(3, 4, 3)(layer([torch.rand(50, 3) * 8]))
made.features.sum().backward()
print(f"triops {triops.__version__} from {triops.__file__.split('.venv-smoke')[-1]}: right")
