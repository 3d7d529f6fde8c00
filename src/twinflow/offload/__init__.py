"""The overlap runtime: gradients out, host updates and weights back, hidden behind forward and backward."""
