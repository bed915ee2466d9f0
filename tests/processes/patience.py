"""How long tests wait for what real processes do, and whether they take their time."""

import os

FULL = os.environ.get("COTERIE_FULL") == "1"
"""Whether what takes longer is tested, too."""

WAIT_S = 60.0
"""For anything; a machine under load needs some of it."""

PAUSE_S = 0.02
"""Between two looks at something that no event tells of."""
