"""A torch that works and whose card computes right."""
import os
import sys

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "..", "common"))
from fake_tensor import Cuda, Tensor, working

working(globals(), card=Cuda((8, 6), ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]))
