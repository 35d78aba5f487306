"""``python -m async_rl`` is the command line ``async-rl``."""

from async_rl.cli import main

if __name__ == "__main__":
    main()
