"""How many random cases a test tries."""

from hypothesis import settings


def examples(times: int) -> int:
    """Return so many times the examples of the profile: a few, always the same, in `make test`, more in `make fuzz`."""
    return times * settings.default.max_examples
