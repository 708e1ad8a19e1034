"""Says nothing about its architectures and fails with the first kernel."""
import os
import sys

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "..", "common"))
from fake_tensor import Cuda, Tensor, working

working(globals(), "2.11.0+cu128", "12.8", card=Cuda((6, 1), [], "NVIDIA GeForce GTX 1080"))


class Failing(Tensor):
    def reshape(self, rows, columns):
        return self

    def to(self, *place, **options):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")


globals()["tensor"] = lambda values, dtype=None: Failing(values)
