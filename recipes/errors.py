"""The mistake of a user."""


class RecipeError(ValueError):
    """The user asked for something that cannot be; the message is one line and says what to do."""
