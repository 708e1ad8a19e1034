"""Imports, then waits for a card that does not answer."""
import os
import sys

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "..", "common"))
from fake_tensor import Cuda, Tensor, working

import time


class Waiting(Cuda):
    def is_available(self):
        time.sleep(3600)


working(globals(), card=Waiting((8, 6), ["sm_86"]))
