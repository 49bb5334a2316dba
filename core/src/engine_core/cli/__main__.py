"""``python -m engine_core.cli`` is the ``engine`` command."""

from __future__ import annotations

import sys

from engine_core.cli import main

sys.exit(main())
