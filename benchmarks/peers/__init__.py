"""Other engines' block managers, run from their own wheels with stand-ins for what they import."""
