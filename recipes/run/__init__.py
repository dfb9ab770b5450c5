"""What a run writes down, and how it goes on from there."""
