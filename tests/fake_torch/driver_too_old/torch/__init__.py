"""A CUDA 13 build on a driver that knows CUDA 12 only."""
import os
import sys

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "..", "common"))
from fake_tensor import Cuda, Tensor, working

import warnings

TEXT = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver."


class OldDriver(Cuda):
    def is_available(self):
        warnings.warn("CUDA initialization: " + TEXT)
        return False

    def init(self):
        raise RuntimeError(TEXT)


working(globals(), "2.15.0+cu132", "13.2", card=OldDriver())
