"""Checks that the sizes of a network fit together; they do without torch, so that mistakes show before its import."""

from tinyformer.errors import ArgumentError, require_at_least, require_at_most


def require_sizes(num_layers: int, d_model: int, max_seq_len: int, vocab_size: int | None = None) -> None:
    """Refuse sizes below 1, and more than 10,000 layers."""
    sizes = {"num_layers": num_layers, "vocab_size": vocab_size, "d_model": d_model, "max_seq_len": max_seq_len}
    require_at_least(1, {"vocab_size": 256, "d_model": 128, "max_seq_len": 128}, **sizes)
    require_at_most(10_000, {"num_layers": 4}, num_layers=num_layers)


def head_dim_of(d_model: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> int:
    """The size of each head: `head_dim`, or d_model / num_heads if that is None.

    The error suggests the largest valid number of heads below an invalid one.
    """
    require_at_least(1, {"head_dim": 32, "d_model": 128}, head_dim=head_dim, d_model=d_model)
    if num_heads < 1 or (head_dim is None and d_model % num_heads):
        # An even head_dim, which rotary positions need.
        works = max((n for n in range(1, min(num_heads, d_model) + 1) if d_model % (2 * n) == 0), default=1)
        raise ArgumentError("num_heads", num_heads, f"must divide `d_model`={d_model}", {"num_heads": works})
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        works = max((n for n in range(1, min(num_kv_heads, num_heads) + 1) if num_heads % n == 0), default=1)
        reason = f"must divide `num_heads`={num_heads}"
        raise ArgumentError("num_kv_heads", num_kv_heads, reason, {"num_kv_heads": works})
    return head_dim or d_model // num_heads
