"""The overlap runtime: copies gradients to the host, updates weights there and copies them back while the model runs."""
