"""Has the sampler converged? Every usual statistic for all quantities at once, and a verdict in plain words.

`summary` takes draws, a DataTree, a Dataset or an array and equals ArviZ 1 to rounding (DESIGN 5); `bfmi` judges
the energies of Hamiltonian samplers. The one place where a library is replaced, because it takes minutes there.
"""

from msrm.diagnostics.estimators import bfmi, block_statistics
from msrm.diagnostics.table import Summary, summary

__all__ = ["Summary", "bfmi", "block_statistics", "summary"]
