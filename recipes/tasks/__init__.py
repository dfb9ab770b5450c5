"""Problems, what a model reads of them, and how its answers are rewarded."""
