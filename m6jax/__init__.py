"""Pretraining of Mixture-of-Experts transformers that do not fit the accelerators at hand."""

__version__ = "0.1.0"
