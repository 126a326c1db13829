"""R-MSRM, the regularized point estimate: NumPy and SciPy only (DESIGN 2).

`domain` says where and how strongly a stream enters, `problem` turns a recording into small arrays, `statistics`,
`latents` and `filters` own the terms of the `objective`, `starts`, `position`, `solver`, `alternation` and `search`
minimize it, `assembly` makes the fitted `model`, `inference`, `prediction` and `calibration` use it, `tree` stores it.
"""

from msrm.estimator import NotFittedError
from msrm.regularized.estimator import RMSRM, ConvergenceWarning
from msrm.regularized.search import Start

__all__ = ["RMSRM", "ConvergenceWarning", "NotFittedError", "Start"]
