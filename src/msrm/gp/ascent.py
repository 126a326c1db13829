"""The MAP objective as points of a search: packed parameters, gradient, and the metric that whitens them (DESIGN 5).

The objective is ``-(log likelihood + log prior)`` over the physical parameters, searched in loadings, offsets, log
noise variances and bounded scalars. At fixed latents the Hessian in a row [w b] of a pair is ``Gram / v + P``, Gram
the expected second moment of [g 1] over the pair's observations and P the prior precision, and N/2 in log v: its
inverse is the metric, so that a full step in the loadings is the M-step of EM. Scalars are scaled by their own
curvature, measured by differences of the gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from msrm.gp.likelihood import Likelihood, PairMoments
from msrm.gp.parameters import Layout, Parameters

_DIFFERENCE = 1e-4  # of a scalar's range or value, for curvature by differences
_FAR = 600.0  # of a log variance: beyond, it over- or underflows


@dataclass(frozen=True, eq=False)
class Ascent:
    """The objective of one likelihood in packed coordinates.

    Attributes
    ----------
    likelihood : Likelihood
    curvature : {name: float}
        Second derivatives of the objective in scalars other than noise.
    """

    likelihood: Likelihood
    curvature: dict[str, float] = field(default_factory=dict)

    @cached_property
    def layout(self) -> Layout:
        """Names, shapes and order of the packed parameters."""
        return self.likelihood.layout

    @cached_property
    def is_log(self) -> np.ndarray:
        """Coordinates that are logarithms: noise variances."""
        out = np.zeros(self.layout.size, bool)
        for name, span in self.layout.slices.items():
            out[span] = name.startswith("noise/")
        return out

    @cached_property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper bounds of the packed coordinates."""
        lower, upper = np.full(self.layout.size, -np.inf), np.full(self.layout.size, np.inf)
        for name, (low, high) in self.layout.bounds.items():
            lower[self.layout.slices[name]], upper[self.layout.slices[name]] = low, high
        with np.errstate(divide="ignore"):
            return (
                np.where(self.is_log, np.log(np.where(self.is_log, lower, 1.0)), lower),
                np.where(self.is_log, np.log(np.where(self.is_log, upper, 1.0)), upper),
            )

    def packed(self, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
        """Search coordinates of parameters, within the bounds."""
        x = self.layout.packed(parameters)
        return np.clip(np.where(self.is_log, np.log(np.where(self.is_log, x, 1.0)), x), *self.bounds)

    def parameters(self, x: np.ndarray) -> Parameters:
        """Parameters at search coordinates."""
        out = self.layout.unpacked(np.where(self.is_log, np.exp(np.where(self.is_log, x, 0.0)), x))
        for name, (low, high) in self.layout.bounds.items():
            # The exponential of a bound's logarithm rounds to either side of it.
            out[name] = np.clip(out[name], low, high)
        return out

    def point(self, x: np.ndarray) -> "MapPoint | None":
        """The evaluated point, or None where the likelihood cannot be computed."""
        if np.any(np.abs(x[self.is_log]) > _FAR):
            return None
        parameters = self.parameters(x)
        log_prior = self.layout.log_prior(parameters)
        if not np.isfinite(log_prior):
            return None
        value, gradient, moments = self.likelihood.value_gradient_moments(parameters)
        if not np.isfinite(value):
            return None
        prior = self.layout.log_prior_gradient(parameters)
        total = -(value + log_prior)
        slope = -self.layout.packed({name: gradient[name] + prior[name] for name in gradient})
        slope = np.where(self.is_log, slope * np.exp(np.where(self.is_log, x, 0.0)), slope)
        if not (np.isfinite(total) and np.isfinite(slope).all()):
            return None
        return MapPoint(self, x, float(total), slope, parameters, moments)

    def diagnostic(self, parameters: Parameters) -> str:
        """Which term is not finite at some parameters, for a message; empty when none."""
        for name, value in parameters.items():
            if not np.isfinite(value).all():
                return f"{name} is not finite"
            prior = self.layout.scalar_priors.get(name)
            if prior is not None and not np.isfinite(prior.log_density(value)):
                return f"the log prior of {name} is {float(prior.log_density(value))} at {float(value):g}"
        told = self.likelihood.diagnostic(parameters)
        if told:
            return f"the log likelihood of {told}"
        gradient = self.likelihood.value_and_gradient(parameters)[1]
        return next(
            (f"the gradient in {name} is not finite" for name, g in gradient.items() if not np.isfinite(g).all()), ""
        )

    def with_curvature(self, point: "MapPoint") -> "Ascent":
        """The same objective with the scalars' curvature measured at a point."""
        curvature = {}
        lower, upper = self.bounds
        for name in self.scalars:
            at = self.layout.slices[name].start
            room = upper[at] - lower[at]
            size = _DIFFERENCE * (room if np.isfinite(room) else abs(point.x[at]))
            moved = point.x.copy()
            moved[at] += size if moved[at] + size <= upper[at] else -size
            other = self.point(moved)
            if other is not None:
                curvature[name] = abs((other.gradient[at] - point.gradient[at]) / (moved[at] - point.x[at]))
        return Ascent(self.likelihood, curvature)

    @cached_property
    def scalars(self) -> tuple[str, ...]:
        """Scalars other than noise: response parameters, timescales, length scale."""
        return tuple(
            name for name, shape in self.layout.shapes.items() if shape == () and not name.startswith("noise/")
        )

    def on(self, likelihood: Likelihood) -> "Ascent":
        """The same search on another likelihood of the same data, for example a finer grid."""
        return Ascent(likelihood, self.curvature)


@dataclass(frozen=True, eq=False)
class MapPoint:
    """An evaluated point of the search (:class:`msrm.quasi_newton.Point`).

    Attributes
    ----------
    ascent : Ascent
    x : (coordinate,)
    value : float
        -(log likelihood + log prior).
    gradient : (coordinate,)
    parameters : {name: array}
    moments : {(participant, modality): PairMoments}
    """

    ascent: Ascent
    x: np.ndarray
    value: float
    gradient: np.ndarray
    parameters: Parameters
    moments: Mapping[tuple[str, str], PairMoments]

    @cached_property
    def _axes(self) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
        """Per pair: T (K + 1, K + 1) and denominators (coordinate, K + 1) of ``(s Gram / v + P)^-1 = T (1/d) T'``."""
        layout, out = self.ascent.layout, {}
        for pair, moments in self.moments.items():
            loading, offset = (layout.normal_sd(f"{kind}/{pair[0]}/{pair[1]}") for kind in ("loading", "offset"))
            assert loading is not None
            assert offset is not None
            sd = np.append(np.full(layout.specification.n_factors, loading), offset)
            values, vectors = np.linalg.eigh(moments.gram * moments.scale * sd[:, None] * sd)
            out[pair] = sd[:, None] * vectors, 1.0 + moments.share[:, None] * np.maximum(values, 0.0)
        return out

    def inverse_metric(self, gradient: np.ndarray) -> np.ndarray:
        """The inverse metric times a gradient."""
        layout, out = self.ascent.layout, gradient.copy()
        for (participant, modality), (turn, denominators) in self._axes.items():
            name = f"{participant}/{modality}"
            loading, offset = layout.slices[f"loading/{name}"], layout.slices[f"offset/{name}"]
            rows = np.column_stack([gradient[loading].reshape(len(denominators), -1), gradient[offset]])
            rows = ((rows @ turn) / denominators) @ turn.T
            out[loading], out[offset] = rows[:, :-1].ravel(), rows[:, -1]
            noise = layout.slices[f"noise/{name}"]
            out[noise] = gradient[noise] / (0.5 * self.moments[participant, modality].scalars + 1.0)
        for name in self.ascent.scalars:
            at = layout.slices[name]
            curvature = self.ascent.curvature.get(name, 0.0)
            out[at] = gradient[at] / (curvature if curvature > 0.0 else max(self._any_scale, 1.0))
        return self._run_offsets(gradient, out)

    @property
    def _any_scale(self) -> float:
        return sum(moments.scalars for moments in self.moments.values())

    def _run_offsets(self, gradient: np.ndarray, out: np.ndarray) -> np.ndarray:
        layout = self.ascent.layout
        for name in layout.shapes:
            sd = layout.normal_sd(name)
            if name.startswith("run_offset/") and sd is not None:
                _, participant, run, modality = name.split("/")
                moments = self.moments[participant, modality]
                precision = moments.scale * moments.run_rows[run] * moments.share + 1.0 / sd**2
                out[layout.slices[name]] = gradient[layout.slices[name]] / precision
        return out

    def stepped(self) -> np.ndarray:
        """The M-step of EM: a full step in the metric, scalars held."""
        step = self.inverse_metric(self.gradient)
        for name in self.ascent.scalars:
            step[self.ascent.layout.slices[name]] = 0.0
        # A noise variance far too large would overshoot on the log scale.
        step[self.ascent.is_log] = np.clip(step[self.ascent.is_log], -1.0, 1.0)
        return np.clip(self.x - step, *self.ascent.bounds)


def expectation_steps(point: MapPoint, count: int) -> MapPoint:
    """A few EM steps, each kept only while the objective falls."""
    for _ in range(count):
        other = point.ascent.point(point.stepped())
        if other is None or other.value >= point.value:
            break
        point = other
    return point


Watch = Callable[[MapPoint], None]
