"""``python -m softplus_attention.cli``, for torchrun."""

import sys

from softplus_attention.cli import main

if __name__ == "__main__":
    sys.exit(main())
