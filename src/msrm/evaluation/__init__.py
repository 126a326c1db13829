"""Is it better than nothing? Held-out scores beside baselines, and penalties chosen by cross-validation (DESIGN 5, 9).

`score` judges a fitted model on runs it has not seen, `evaluate` fits on parts of a recording and judges on the rest,
`select_penalties` chooses settings inside a training recording.
"""

from msrm.evaluation.crossvalidation import select_penalties
from msrm.evaluation.report import evaluate, score

__all__ = ["evaluate", "score", "select_penalties"]
