"""python -m offmate.cli: as `offmate`, where the environment's commands are not on the path."""

import sys

from . import main

sys.exit(main())
