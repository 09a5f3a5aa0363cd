"""A code-generating kernel fuser for PyTorch."""

__version__ = "0.1.0"
