"""How long tests wait for what real processes do."""

WAIT_S = 60.0
"""For anything; a machine under load needs some of it."""

PAUSE_S = 0.02
"""Between two looks at something that no event tells of."""
