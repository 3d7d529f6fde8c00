"""Training data: where it comes from and which batch belongs to which step."""
