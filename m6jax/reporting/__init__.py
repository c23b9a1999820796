"""What a run shows: metrics in files, progress on the screen, and plots."""
