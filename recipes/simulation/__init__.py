"""The parts of ``recipes/simulate.py``."""
