"""REINFORCE Zero at nominal lag 8.

torchrun --standalone --nproc-per-node=2 recipes/lag8.py
"""

from recipes.reinforce_zero import Config, main

if __name__ == "__main__":
    main(Config(nominal_lag=8))
