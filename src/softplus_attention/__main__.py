"""``python -m softplus_attention`` is the command ``softplus-attention``, also where it runs from source."""

import sys

from softplus_attention.cli import main

if __name__ == "__main__":
    sys.exit(main())
