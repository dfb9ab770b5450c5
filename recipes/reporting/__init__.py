"""The parts of ``recipes/report.py``."""
