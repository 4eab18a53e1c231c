"""Residual streams, gradients and accuracy over the depth of a model."""
