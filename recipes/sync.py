"""REINFORCE Zero at nominal lag 0: synchronous, the same code drained.

torchrun --standalone --nproc-per-node=2 recipes/sync.py
"""

from recipes.reinforce_zero import Config, main

if __name__ == "__main__":
    main(Config(nominal_lag=0))
