"""`torchsparse.__version__`: 2.1.0, or 1.4.0 where TRIOPS_TORCHSPARSE asks for that interface."""

from triops.compat.torchsparse import _generation

__version__ = "1.4.0" if _generation.chosen() == _generation.OLD else "2.1.0"
