"""Imports, then dies in the driver when it looks at the card."""
import os
import sys

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "..", "common"))
from fake_tensor import Cuda, Tensor, working

import ctypes


class Crashing(Cuda):
    def get_device_properties(self, index):
        ctypes.string_at(0)


working(globals(), card=Crashing((8, 6), ["sm_86"]))
