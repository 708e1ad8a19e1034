"""The parts of `rehearse.py`: they run in the interpreter under test and import nothing else of this program.

Python puts a script's folder first on its path, so `rehearse.py` finds this folder wherever both lie.
"""


class CannotRehearse(Exception):
    """The reason in one line."""


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
