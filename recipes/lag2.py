"""REINFORCE Zero at nominal lag 2.

torchrun --standalone --nproc-per-node=2 recipes/lag2.py
"""

from recipes.config import Config
from recipes.reinforce_zero import main

if __name__ == "__main__":
    main(Config(nominal_lag=2))
