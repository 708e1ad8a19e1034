"""A CPU build."""
import os
import sys

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "..", "common"))
from fake_tensor import Cuda, Tensor, working

working(globals(), "2.11.0+cpu", None)
