"""Problems made from shapes and rates, for tests, scaling and published tables."""
