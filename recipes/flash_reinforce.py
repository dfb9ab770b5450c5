"""FlashREINFORCE at nominal lag 8: one response per prompt, the batch's mean, a gate on whole responses.

torchrun --standalone --nproc-per-node=2 recipes/flash_reinforce.py
"""

from recipes.config import Config
from recipes.reinforce_zero import main

if __name__ == "__main__":
    main(Config(nominal_lag=8, objective="flash_reinforce", prompts_per_update=256, group_size=1))
