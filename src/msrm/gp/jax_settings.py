"""JAX as this package uses it: float64 and the highest matmul precision. Importing the module switches both on.

Every module that makes JAX arrays imports it first; JAX cannot change the precision of arrays that exist.
"""

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_default_matmul_precision", "highest")

FLOAT = jax.numpy.float64
