"""Settings of every test."""

import hypothesis

# The same cases in every run, nothing kept between runs, and no deadline: a slow machine is no failure.
hypothesis.settings.register_profile("project", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("project")
