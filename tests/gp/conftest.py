"""What the tests of GP-MSRM share."""

import pytest

from msrm.runtime import blas_threads


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Many tiny LAPACK calls of oracles are many times slower with several threads."""
    with blas_threads(1):
        yield
