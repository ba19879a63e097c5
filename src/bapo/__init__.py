"""BAPO: balanced policy optimization with adaptive clipping, as a PyTorch Lightning research template."""

__version__ = "0.1.0"
