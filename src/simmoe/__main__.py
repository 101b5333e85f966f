"""``python -m simmoe`` is ``simmoe``."""

from simmoe.cli import main

if __name__ == "__main__":
    main()
