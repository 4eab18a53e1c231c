"""Kernels: functions from queries, keys and values to the heads' outputs, which all compute the same.

`eager` is the definition, softmax(q kᵀ / √head_dim) v, as written; `sdpa`, `flash` and `flex` call fused kernels, which
never hold the attention weights in memory. `case` describes a call, `support` is the table of what each kernel can
compute, `fastest` chooses among those that can, and `observe` sees which of torch's kernels really ran.
"""
