"""What holds for every test."""

from hypothesis import settings

# How long one example takes says more about the machine's load than about the code.
settings.register_profile("steady", settings.default, deadline=None)
settings.load_profile("steady")
