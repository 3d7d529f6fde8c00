"""The overlap runtime: copies gradients to the host, updates there and copies weights back, while the model runs."""
