"""Ready-made recipes, each started with ``torchrun``; everything they use is importable on its own."""
