"""Entry point `python -m offmate`: same as `offmate`, for when the environment's commands are not on the path."""

import sys

from .cli import main

sys.exit(main())
