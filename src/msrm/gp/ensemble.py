"""Predictions of a posterior: a few draws as fitted models, and mixtures over them (DESIGN 5).

Members are draws turned to one common rotation of the factors, in raw features, each a
:class:`~msrm.gp.fitted.FittedGP`; whatever a fitted model answers, the ensemble answers by the law of total
variance: mean of means, mean of variances plus variance of means. So variances include what is not known of the
parameters.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy.special import logsumexp, ndtr

from msrm.gp.fitted import FittedGP, TrainingNodes
from msrm.gp.prediction import shared_data
from msrm.nodes import GroupStatistics
from msrm.recording import Recording

__all__ = ["Ensemble", "mixture", "with_densities"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Ensemble:
    """Some draws of a posterior, ready to predict.

    Attributes
    ----------
    base : FittedGP
        The MAP, or whatever gives the members all but their parameters.
    parameters : {name: (member, ...)}
        In raw features.
    precision : {(run, modality): (member, P, K, K)}
    information : {(run, modality): (member, node, K)}
        What the training data say of their nodes at each member.
    coefficients : {(run, modality): (member, node, 2)}
        Of differenced nodes.
    members : (member, 2) int
        Chain and draw of each.
    weights : (member,), optional
        Of mixtures, summing to 1; equal by default.
    """

    base: FittedGP
    parameters: dict[str, Array]
    precision: dict[tuple[str, str], Array]
    information: dict[tuple[str, str], Array]
    coefficients: dict[tuple[str, str], Array]
    members: NDArray[np.intp]
    weights: Array | None = None

    def __len__(self) -> int:
        return len(next(iter(self.parameters.values())))

    def __iter__(self) -> Iterator[FittedGP]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, member: int) -> FittedGP:
        runs: dict[str, dict[str, TrainingNodes]] = {}
        for run, groups in self.base.runs.items():
            runs[run] = {}
            for modality, nodes in groups.items():
                place = run, modality
                seen = self.coefficients.get(place)
                statistics = GroupStatistics(
                    self.precision[place][member],
                    nodes.statistics.index,
                    self.information[place][member],
                    None if seen is None else seen[member],
                )
                runs[run][modality] = replace(nodes, statistics=statistics)
        parameters = {name: np.asarray(values[member]) for name, values in self.parameters.items()}
        return replace(self.base, parameters=parameters, runs=runs)

    def average(self, answer: Callable[[FittedGP], xr.DataTree]) -> xr.DataTree:
        """The mixture over members of trees whose nodes hold `mean` and `variance`."""
        with shared_data():
            return mixture([answer(member) for member in self], self.weights)

    @cached_property
    def nbytes(self) -> int:
        """Size in memory."""
        parts: tuple[Mapping[Any, Array], ...] = (self.parameters, self.precision, self.information, self.coefficients)
        return sum(array.nbytes for part in parts for array in part.values())


def with_densities(predicted: xr.DataTree, truth: Recording) -> xr.DataTree:
    """A member's predictions with ``log_density`` and ``probability`` of the values of a recording at their times."""
    nodes = {}
    for leaf in predicted.leaves:
        data, (participant, run, modality) = leaf.to_dataset(inherit=False), leaf.path.strip("/").split("/")
        if truth.has(participant, run, modality):
            stream = truth.stream(participant, run, modality)
            if not np.array_equal(stream.times, data["time"].values):
                raise ValueError(
                    f"{stream.label}: truth is needed at the predicted times, {data.sizes['time']} of them."
                )
            sd = np.sqrt(data["variance"].values)
            deviation = (np.asarray(stream.data.values, float) - data["mean"].values) / sd
            density = -0.5 * deviation**2 - np.log(sd) - 0.5 * np.log(2.0 * np.pi)
            data = data.assign(
                log_density=(data["mean"].dims, density), probability=(data["mean"].dims, ndtr(deviation))
            )
        nodes[leaf.path] = data
    return xr.DataTree.from_dict(nodes)


def mixture(trees: list[xr.DataTree], weights: Array | None = None) -> xr.DataTree:
    """The mixture of answers of the same shape.

    Parameters
    ----------
    trees : list of DataTree
        Nodes with `mean` and `variance`, perhaps `covariance`, `supported`, `log_density` and `probability`.
    weights : (tree,), optional
        Summing to 1; equal by default.

    Returns
    -------
    DataTree
        Moments by the laws of total expectation and variance; `supported` where every member is.
    """
    nodes = {}
    for node in trees[0].subtree:
        if "mean" in node.data_vars:
            path = node.relative_to(trees[0])
            nodes[path] = _mixed([_dataset(tree, path) for tree in trees], weights)
    return xr.DataTree.from_dict(nodes)


def _dataset(tree: xr.DataTree, path: str) -> xr.Dataset:
    node = tree[path]
    assert isinstance(node, xr.DataTree)
    return node.to_dataset(inherit=False)


def _mixed(members: list[xr.Dataset], weights: Array | None) -> xr.Dataset:
    first = members[0]

    def averaged(values: Array) -> Array:
        return values.mean(axis=0) if weights is None else np.tensordot(weights, values, 1)

    means = np.array([member["mean"].values for member in members])
    centre = averaged(means)
    variance = averaged(np.array([member["variance"].values for member in members])) + averaged((means - centre) ** 2)
    variables: dict[str, Any] = {
        "mean": (first["mean"].dims, centre),
        "variance": (first["variance"].dims, variance),
    }
    if "supported" in first:
        variables["supported"] = (first["supported"].dims, np.all([m["supported"].values for m in members], axis=0))
    if "covariance" in first:
        within = averaged(np.array([member["covariance"].values for member in members]))
        variables["covariance"] = (first["covariance"].dims, within + _between(first, means - centre, weights))
    if "log_density" in first:
        heights = np.array([member["log_density"].values for member in members])
        share = np.full(len(members), 1.0 / len(members)) if weights is None else weights
        total = logsumexp(heights, axis=0, b=share.reshape(-1, *(1,) * (heights.ndim - 1)))
        variables["log_density"] = (first["log_density"].dims, total)
        below = averaged(np.array([member["probability"].values for member in members]))
        variables["probability"] = (first["probability"].dims, below)
    return xr.Dataset(variables, first.coords)


def _between(first: xr.Dataset, deviations: Array, weights: Array | None) -> Array:
    """Covariance of the members' means, laid out like `covariance`: its dimensions name which entries go together."""
    letters = {dim: chr(ord("a") + i) for i, dim in enumerate(first["covariance"].dims)}
    own = "".join(letters[dim] for dim in first["mean"].dims)
    other = "".join(letters.get(f"other_{dim}", letters[dim]) for dim in first["mean"].dims)
    out = "".join(letters.values())
    share = np.full(len(deviations), 1.0 / len(deviations)) if weights is None else weights
    return np.einsum(f"z,z{own},z{other}->{out}", share, deviations, deviations, optimize=True)
