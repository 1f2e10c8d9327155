"""``python -m softplus_attention``: the command ``softplus-attention``, also from a source checkout."""

import sys

from softplus_attention.cli import main

if __name__ == "__main__":
    sys.exit(main())
