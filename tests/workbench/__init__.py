"""A package, so that its conftest is not the one of tests/."""
