"""One conversation and N rules in, N verdicts out. Knows nothing of HTTP. Importing this package
imports neither torch nor vLLM: an engine does so when it starts.
"""

from serve.engine.call import Call, OpenCheck
from serve.engine.engine import CODE, GuardEngine
from serve.engine.score import Check, Refusal, Score, ScoreRequest

__all__ = ["CODE", "Call", "Check", "GuardEngine", "OpenCheck", "Refusal", "Score", "ScoreRequest"]
