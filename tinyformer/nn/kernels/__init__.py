"""Kernels: functions from queries, keys and values to the heads' outputs, which all give the same result.

`eager` computes the definition, softmax(q kᵀ / √head_dim) v, as written; `sdpa`, `flash` and `flex` call fused kernels,
which never hold the attention weights in memory. In `choose`, `KernelRequirements` describes a call, `LACKS` lists what
each kernel cannot compute, and `fastest` chooses a kernel. `nn.maps.KernelObserver` records torch's kernels.
"""
