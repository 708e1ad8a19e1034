"""A machine with NVSwitch whose fabric manager does not run."""
import os
import sys

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "..", "common"))
from fake_tensor import Cuda, Tensor, working

class NotReady(Cuda):
    def is_available(self):
        return False

    def init(self):
        raise RuntimeError("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized")


working(globals(), card=NotReady())
