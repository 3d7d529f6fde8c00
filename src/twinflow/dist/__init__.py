"""Ranks that work together: groups, the collectives that buckets need, and what all have to agree on."""
