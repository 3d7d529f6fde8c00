"""What a run shows: progress while it runs, metrics on disk, a report page at the end."""
