"""Intervals of estimates whose errors come from seeds, documents and the slope of a tangent."""

import dataclasses
import functools
import math

import numpy as np

LEVEL = 0.95
NODES = np.polynomial.legendre.leggauss(200)


@functools.cache
def t_quantile(freedom):
    """t with P(|T| <= t) = LEVEL. With T = sqrt(v) tan(a), the density of a is ~ cos(a)^(v - 1)."""
    freedom = min(1e7, freedom)  # 1e7 if it is NaN
    nodes, weights = NODES
    half = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    scale = 2 * math.exp(half) / math.sqrt(math.pi)

    def inside(t):
        end = math.atan(t / math.sqrt(freedom))
        angles = end * (nodes + 1) / 2
        return scale * end / 2 * np.sum(weights * np.cos(angles) ** (freedom - 1))

    low, high = 0.0, 1.0
    while inside(high) < LEVEL:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < LEVEL else (low, middle)
    return (low + high) / 2


@functools.cache
def table_of_t():
    """1 / v and log t, which is smooth in 1 / v."""
    inverse = np.linspace(1e-6, 1.0, 300)
    return inverse, np.log([t_quantile(1 / x) for x in inverse])


def t_quantiles(freedom):
    """t_quantile of every element of an array."""
    return np.exp(np.interp(1 / np.maximum(freedom, 1.0), *table_of_t()))


def reach(by_estimator, freedom, documents, document_freedom):
    """t_v sqrt(S + D), for numbers or arrays."""
    seeds = sum(by_estimator.values())
    total = seeds + documents
    # (S / V) / v_S with Satterthwaite's v_S = S^2 / sum(S_e^2 / v_e)
    inverse = sum(s**2 / freedom[e] for e, s in by_estimator.items()) / (seeds * total)
    inverse += (documents / total) ** 2 / document_freedom
    return t_quantiles(1 / inverse) * np.sqrt(total)


def sum_of_variances(variances):
    """The sum of (variance, degrees of freedom), by Satterthwaite."""
    total = sum(v for v, _ in variances)
    squares = sum(v**2 / f for v, f in variances)
    return total, total**2 / squares if squares > 0 else 1.0


def influence(losses, targets):
    """Influence of every cluster on sum(losses) / sum(targets); its squares add up to the variance.
    losses: [..., cluster]"""
    share = targets / targets.sum()
    ratio = losses.sum(-1, keepdims=True) / targets.sum()
    correction = 1 - 2 * share + np.sum(share**2)
    residual = (losses - ratio * targets) / targets.sum()
    return np.where(correction > 0, residual / np.sqrt(np.maximum(correction, 1e-300)), 0.0)


def document_freedom(targets):
    share = targets / targets.sum()
    return np.sum(share**1.5) ** 2 / np.sum(share**3) - 1


@dataclasses.dataclass
class Estimate:
    value: float
    seeds: list  # of (source, estimator, signed standard deviation)
    freedom: dict  # by estimator
    residuals: dict  # of the runs of a rung, by source
    documents: float  # variance
    document_freedom: float
    influence: np.ndarray  # of all clusters of all domains
    held_out_documents: float  # the part of `documents` from held-out text
    held_out_freedom: float

    def by_estimator(self):
        """{estimator: variance}: what is estimated together adds up first."""
        of = {}
        for _, estimator, deviation in self.seeds:
            of[estimator] = of.get(estimator, 0.0) + deviation**2
        return of

    def half_width(self):
        return float(
            reach(self.by_estimator(), self.freedom, self.documents, self.document_freedom)
        )

    def interval(self, factor=1.0):
        half = factor * self.half_width()
        return self.value, self.value - half, self.value + half


def simultaneous_factor(estimates, draws=200_000, seed=1):
    """Half-width with which all intervals hold together, over that of one interval alone."""
    estimates = [e for e in estimates if not math.isnan(e.half_width())]
    if len(estimates) < 2:
        return 1.0
    random = np.random.default_rng(seed)
    freedom = {k: v for e in estimates for k, v in e.freedom.items()}
    relative = {k: random.chisquare(v, draws) / v for k, v in freedom.items()}
    normal = {s: random.standard_normal(draws) for e in estimates for s, _, _ in e.seeds}
    # Seeds of a rung move its members as their residuals are correlated.
    by_run = {
        rung: random.standard_normal((draws, len(residuals)))
        for rung, residuals in estimates[0].residuals.items()
    }
    rows = np.stack([e.influence for e in estimates])
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
    values, vectors = np.linalg.eigh(rows @ rows.T)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    text = root @ random.standard_normal((len(estimates), draws))
    of_text = estimates[0].document_freedom
    relative_text = random.chisquare(of_text, draws) / of_text
    largest = np.zeros(draws)
    for a, e in enumerate(estimates):
        error = math.sqrt(e.documents) * text[a]
        for source, _, deviation in e.seeds:
            residuals = e.residuals.get(source, np.zeros(1))
            length = np.linalg.norm(residuals)
            same = by_run[source] @ residuals / length if length > 0 else normal[source]
            error = error + deviation * same
        drawn = {k: v * relative[k] for k, v in e.by_estimator().items()}
        half = reach(drawn, e.freedom, e.documents * relative_text, e.document_freedom)
        largest = np.maximum(largest, np.abs(error) / half)
    return max(1.0, float(np.quantile(largest, LEVEL)))
