"""A card that computes one value wrong."""
import os
import sys

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "..", "common"))
from fake_tensor import Cuda, Tensor, working

class Wrong(Tensor):
    def reshape(self, rows, columns):
        made = Wrong(self.values)
        made.values = Tensor(self.values).reshape(rows, columns).values
        return made

    def to(self, *place, **options):
        made = Wrong(self.values)
        made.device = options.get("device", self.device)
        return made

    def __matmul__(self, other):
        made = Wrong(Tensor(self.values) .__matmul__(Tensor(other.values)).values)
        made.values[3][5] += 4.0
        return made


working(globals(), card=Cuda((8, 6), ["sm_86"]))
globals()["tensor"] = lambda values, dtype=None: Wrong(values)
