"""What the kernels' tests share: where they run, and how near a reference they must come.

Triton's interpreter must be chosen before Triton is imported, so test_kernels.py runs these tests in a process of its
own, with ``TRITON_INTERPRET=1``; on a GPU they run without it. The interpreter cuts float32 down to bfloat16 where a
GPU rounds: that is held to twice its precision.
"""

import numpy as np
import torch

from swbn_lightning.norms.passes import kernels

DEVICE = torch.device("cpu" if kernels.interpreted() else "cuda")
EPS = 1e-3
TOLERANCE = {torch.float32: 2e-6 if DEVICE.type == "cpu" else 1e-5, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}


def exactly(values):
    """What a tensor holds, in float64."""
    return values.detach().double().cpu().numpy()


def vectors(*arrays):
    return [torch.from_numpy(np.asarray(array)).to(DEVICE, torch.float32) for array in arrays]


def assert_near(found, expected, tolerance):
    """The error of the whole, against the size of the whole."""
    found, expected = (exactly(v) if isinstance(v, torch.Tensor) else v for v in (found, expected))
    assert np.isfinite(found).all()
    error, size = np.linalg.norm(found - expected), np.linalg.norm(expected)
    assert error <= tolerance * size, error / size
