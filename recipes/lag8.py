"""REINFORCE Zero at nominal lag 8.

torchrun --standalone --nproc-per-node=2 recipes/lag8.py
"""

from recipes.config import Config
from recipes.reinforce_zero import main

if __name__ == "__main__":
    main(Config(nominal_lag=8))
