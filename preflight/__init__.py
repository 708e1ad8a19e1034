"""Can I fine-tune this model, here?  Shared parts of the preflight scripts."""

__version__ = "0.1.0"
