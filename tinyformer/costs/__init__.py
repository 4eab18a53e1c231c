"""The cost of a model: parameters, FLOPs and memory."""
