"""NUTS on the latent-marginal density of GP-MSRM (DESIGN 5): NumPyro's sampler, the rotation of the factors removed."""
