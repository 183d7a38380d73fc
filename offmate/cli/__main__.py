"""Entry point `python -m offmate.cli`: same as `offmate`, for when the environment's commands are not on the path."""

import sys

from . import main

sys.exit(main())
