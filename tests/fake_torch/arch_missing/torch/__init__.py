"""Was compiled for older cards than the one that is here."""
import os
import sys

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "..", "common"))
from fake_tensor import Cuda, Tensor, working

working(globals(), "2.6.0+cu124", "12.4", card=Cuda((12, 0), ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"], "NVIDIA GeForce RTX 5090"))
