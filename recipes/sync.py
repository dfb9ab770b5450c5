"""REINFORCE Zero at nominal lag 0: synchronous, the same code drained.

torchrun --standalone --nproc-per-node=2 recipes/sync.py
"""

from recipes.config import Config
from recipes.reinforce_zero import main

if __name__ == "__main__":
    main(Config(nominal_lag=0))
