"""JAX as this package uses it: float64 and the highest matmul precision. Importing the module switches both on.

Every module that makes JAX arrays imports it first; JAX cannot change the precision of arrays that exist.
"""

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_default_matmul_precision", "highest")

FLOAT = jax.numpy.float64


def compiler_options() -> dict[str, int]:
    """What functions are compiled with: on a GPU without generating and timing kernels of its own for small products.

    A third of the compilation, and cuBLAS's kernels, which remain, are faster in float64.
    """
    return {} if jax.default_backend() == "cpu" else {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
