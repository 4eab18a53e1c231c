"""Train small transformers and see exactly what every attention head does."""
