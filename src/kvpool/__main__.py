"""``python -m kvpool``: the console command."""

from kvpool.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
