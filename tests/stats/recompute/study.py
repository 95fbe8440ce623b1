"""A study: which of its budgets can be compared, and the numbers Delta_end, E and R."""

import dataclasses
import functools
import math

import numpy as np

from .curve import Curve, parabola, secant, unit
from .intervals import Estimate, document_freedom, influence, reach, sum_of_variances

TEST, HELD_OUT = "test", "held_out"
CURVE, TANGENT, RECALL_TANGENT = "curve", "tangent", "recall tangent"  # of Delta_end, E and R
RUNGS, CONTENDERS, SLOPE = -1, -2, -3  # estimators of variance; 0, 1, ... are single rungs
MATURITY_FALL = 0.1
RECALL_LEAD = 0.2
OVERFIT_RISE = 0.03
EPOCHS_RATIO = 1.25
MEMORISING_GAP = 0.1
EPOCHS_TOLERANCE = 0.05
TOKENS_TOLERANCE = 0.01


@dataclasses.dataclass
class Group:
    """The runs of one model with one budget. losses[text, targets]: by domain, [run, cluster]."""

    model: str
    tokens: float
    epochs: float
    held_out: np.ndarray
    training_loss: np.ndarray
    losses: dict
    tangents: dict = None  # by line
    usable: bool = False

    @property
    def seeds(self):
        return len(self.held_out)


@dataclasses.dataclass(frozen=True)
class Measure:
    """Targets "all", "recall", "other" or "bounded" of these domains (indices) of a text."""

    text: str
    targets: str
    domains: tuple
    name: str  # in a table of variances


@dataclasses.dataclass
class Contrast:
    value: float
    on_loss: np.ndarray  # by group
    on_held_out: np.ndarray
    slope_error: float = 0.0


def differ(epochs, others):
    """Less than one epoch is no repetition; False where epochs are unknown."""
    ratio = max(1.0, epochs) / max(1.0, others)
    known = math.isfinite(epochs) and math.isfinite(others)
    return known and max(ratio, 1 / ratio) > EPOCHS_RATIO


def line_of(measure):
    return RECALL_TANGENT if measure.text == HELD_OUT else TANGENT


class Study:
    """groups: of the reference in order of tokens, then of the contenders. targets[text, "all" or
    "recall"]: by domain, [cluster]. domains[text]: names."""

    def __init__(self, domains, targets, groups, rungs, table):
        self.domains = domains
        self.targets = targets
        self.groups = groups
        self.rungs = rungs
        self.table = table
        self.models = {}
        for index, group in enumerate(groups[rungs:], rungs):
            self.models.setdefault(group.model, []).append(index)
        self.all = self.measure(TEST, "all")
        self.held_out = np.array([g.held_out.mean() for g in groups])
        self.curve = Curve(self.held_out[:rungs], self.means(self.all)[:rungs])
        self.examine()

    def measure(self, text, targets, domain=None):
        names = self.domains[text]
        chosen = tuple(range(len(names))) if domain is None else (names.index(domain),)
        name = targets if domain is None else f"domain:{domain}"
        if text == HELD_OUT:
            name = "recall_in_domain" + ("" if domain is None else f":{domain}")
        return Measure(text, targets, chosen, name)

    def denominators(self, measure):
        own = measure.text == HELD_OUT and measure.targets == "recall"
        return self.targets[measure.text, "recall" if own else "all"]

    @functools.cache
    def by_run(self, index, measure):
        of_domain = self.groups[index].losses[measure.text, measure.targets]
        targets = self.denominators(measure)
        return np.mean([of_domain[d].sum(-1) / targets[d].sum() for d in measure.domains], axis=0)

    @functools.cache
    def means(self, measure):
        return np.array([self.by_run(i, measure).mean() for i in range(len(self.groups))])

    # ---- The reference

    def examine(self):
        """Where the reference allows a comparison."""
        rungs = self.groups[: self.rungs]
        recall = []
        self.lead = []
        for group in rungs:
            per_target, other = [], []
            for d, tokens in enumerate(self.targets[TEST, "all"]):
                of_recall = self.targets[TEST, "recall"][d].sum()
                losses = group.losses[TEST, "recall"][d].sum(-1).mean()
                per_target.append(losses / of_recall)
                rest = group.losses[TEST, "other"][d].sum(-1).mean()
                other.append(rest / (tokens.sum() - of_recall))
            recall.append(np.mean(per_target))
            self.lead.append(np.mean(other) - np.mean(per_target))
        doublings = [math.log2(b.tokens / a.tokens) for a, b in zip(rungs, rungs[1:])]
        # How much more the loss on recall targets falls than the loss on the other targets.
        pairs = zip(recall, recall[1:], self.lead, self.lead[1:], doublings)
        self.falls = [min(a - b, after - before) / min(1, n) for a, b, before, after, n in pairs]
        loss = self.means(self.all)[: self.rungs]
        gap = [g.held_out.mean() - g.training_loss.mean() for g in rungs]
        self.lowest = np.minimum.accumulate(loss)
        self.rise = [loss[b + 1] - self.lowest[b + 1] for b in range(self.rungs - 1)]
        self.memorises = [not gap[b + 1] <= MEMORISING_GAP for b in range(self.rungs - 1)]
        self.repeated = [
            (self.rise[b] > OVERFIT_RISE and loss[b + 1] > loss[b])
            or (self.memorises[b] and differ(rungs[b].epochs, rungs[b + 1].epochs))
            for b in range(self.rungs - 1)
        ]
        every = np.concatenate([g.held_out for g in rungs])
        self.low = every.min()
        self.high = every.max()
        for group in self.groups[self.rungs :]:
            h = group.held_out.mean()
            group.inside = bool(self.low <= h <= self.high)
            group.caveat = self.caveat(group) if group.inside else "outside"
            group.usable = group.inside and not group.caveat
            group.tangents = {line: self.tangent(group, line) for line in (TANGENT, RECALL_TANGENT)}

    def caveat(self, group):
        h = group.held_out.mean()
        b = self.curve.segment(h)
        means = self.curve.held_out
        next_segment = b
        for rung in range(1, self.rungs - 1):
            if 0 <= h - means[rung] <= 0.05 * (means[rung - 1] - means[rung]):
                next_segment = rung
        # The lead is read at the later rung around h, the fall after a rung that h is at.
        if self.lead[b + 1] < RECALL_LEAD or self.falls[next_segment] > MATURITY_FALL:
            return "immature"
        f = self.curve.weights(h) @ self.means(self.all)[: self.rungs]
        if self.rise[b] > OVERFIT_RISE and f - self.lowest[b + 1] > OVERFIT_RISE / 3:
            return "overfits"
        own_gap = h - group.training_loss.mean()
        memorises = self.memorises[b] or not own_gap <= MEMORISING_GAP
        if memorises and differ(group.epochs, self.epochs_at(h)):
            return "repeated"
        return ""

    def epochs_at(self, h):
        """Epochs of the reference where it ends with h. The curve of its held-out loss over log
        tokens gives the tokens, up to a doubling past the rungs; log epochs are straight lines over
        them.
        """
        rungs = self.groups[: self.rungs]
        logs = np.log([g.tokens for g in rungs])
        losses = self.curve.held_out
        over_tokens = Curve(-logs, losses)
        few, many = logs[0] - math.log(2), logs[-1] + math.log(2)
        for _ in range(60):
            middle = (few + many) / 2
            above = over_tokens.weights(-middle) @ losses > h
            few, many = (middle, many) if above else (few, middle)
        b = int(np.clip(np.searchsorted(logs, few) - 1, 0, self.rungs - 2))
        share = (few - logs[b]) / (logs[b + 1] - logs[b])
        return rungs[b].epochs ** (1 - share) * rungs[b + 1].epochs**share

    def tangent(self, group, line):
        """(rung, weights of the slope as a function of H, other segments), or None."""
        # The recall loss in domain does not depend on repetition.
        repeated = self.repeated if line == TANGENT else [False] * (self.rungs - 1)
        for b, rung in enumerate(self.groups[: self.rungs]):
            if abs(group.tokens / rung.tokens - 1) > TOKENS_TOLERANCE:
                continue
            if differ(group.epochs, rung.epochs):
                return None
            # No line of the reference reaches farther than its ladder is wide.
            width = self.high - self.low
            if not self.low - width <= group.held_out.mean() <= self.high + width:
                return None
            mature = [self.falls[s] <= MATURITY_FALL for s in range(self.rungs - 1)]
            recalls = [self.lead[s + 1] >= RECALL_LEAD for s in range(self.rungs - 1)]
            used = [
                s for s in self.curve.segments_at(b) if mature[s] and recalls[s] and not repeated[s]
            ]
            if not used:
                return None
            near = used if len(used) == 2 else [used[0] - 1, used[0] + 1]
            # Slopes of an immature reference show how much the slope changes, too.
            others = [s for s in near if 0 <= s < self.rungs - 1 and not repeated[s]]
            if len(used) == 2:
                return b, lambda held_out: parabola(held_out, b), others
            return b, lambda held_out: secant(held_out, used[0]), others
        return None

    # ---- Contrasts of one group

    @functools.cache
    def difference(self, index, measure):
        """Delta_end: to the curve at equal held-out loss."""
        h = self.held_out[index]
        means = self.means(measure)
        of_rungs = means[: self.rungs]
        weights = self.curve.weights(h)
        on_loss = unit(len(self.groups), index)
        on_loss[: self.rungs] -= weights
        on_held_out = np.zeros(len(self.groups))
        on_held_out[index] = -self.curve.derivative_by_h(h) @ of_rungs
        moved = self.curve.derivative_by_rungs(lambda held_out: self.curve.weights(h, held_out))
        on_held_out[: self.rungs] -= moved @ of_rungs
        return Contrast(means[index] - weights @ of_rungs, on_loss, on_held_out)

    @functools.cache
    def equal_tokens(self, index, measure):
        """E or R: to the tangent at the rung with the same tokens."""
        b, slope_weights, others = self.groups[index].tangents[line_of(measure)]
        means = self.means(measure)
        of_rungs = means[: self.rungs]
        weights = slope_weights(self.curve.held_out)
        slope = weights @ of_rungs
        distance = self.held_out[index] - self.held_out[b]
        on_loss = unit(len(self.groups), index) - unit(len(self.groups), b)
        on_loss[: self.rungs] -= distance * weights
        on_held_out = -slope * (unit(len(self.groups), index) - unit(len(self.groups), b))
        moved = self.curve.derivative_by_rungs(slope_weights)
        on_held_out[: self.rungs] -= distance * moved @ of_rungs
        steps = [abs(slope - secant(self.curve.held_out, s) @ of_rungs) for s in others]
        error = max(steps) / 2 if steps else abs(slope) / 2
        value = means[index] - means[b] - slope * distance
        return Contrast(value, on_loss, on_held_out, error * distance)

    # ---- Variances

    def residuals(self, index, contrast, measure):
        group = self.groups[index]
        z = contrast.on_loss[index] * self.by_run(index, measure)
        z = z + contrast.on_held_out[index] * group.held_out
        return z - z.mean()

    @functools.cache
    def pool(self, line):
        contenders = range(self.rungs, len(self.groups))
        if line != CURVE:
            return [i for i in contenders if self.groups[i].tangents[line]]
        usable = [i for i in contenders if self.groups[i].usable]
        if self.table or any(self.groups[i].seeds > 1 for i in usable):
            return usable
        return list(contenders)

    @functools.cache
    def contender_variance(self, measure, line):
        """Variance of the residual of one run, with its degrees of freedom."""
        squares = 0.0
        freedom = 0
        contrast = self.difference if line == CURVE else self.equal_tokens
        for index in self.pool(line):
            squares += np.sum(self.residuals(index, contrast(index, measure), measure) ** 2)
            freedom += self.groups[index].seeds - 1
        key = measure.name
        if line == TANGENT and measure.text == TEST:
            key = "equal_tokens" if key == "all" else f"equal_tokens:{key}"
        for row in self.table:
            if key in row["variance"]:
                squares += row["variance"][key] * (row["seeds"] - 1)
                freedom += row["seeds"] - 1
        return (squares / freedom if freedom else math.nan), max(1, freedom)

    def along_curve(self, rung, measure):
        """Residuals of a rung's runs along the curve."""
        slope = self.curve.derivative_by_h(self.held_out[rung]) @ self.means(measure)[: self.rungs]
        z = self.by_run(rung, measure) - slope * self.groups[rung].held_out
        return z - z.mean()

    def estimate(self, contrast, measure, line):
        seeds = []
        freedom = {SLOPE: 1e9}  # taken as known
        residuals = {}
        for b, rung in enumerate(self.groups[: self.rungs]):
            residuals[b] = self.residuals(b, contrast, measure)
            if rung.seeds > 1:
                freedom[b] = rung.seeds - 1
                variance = np.sum(residuals[b] ** 2) / freedom[b]
                seeds.append((b, b, math.sqrt(variance / rung.seeds)))
                continue
            squares = [np.sum(self.along_curve(k, measure) ** 2) for k in range(self.rungs)]
            freedom[RUNGS] = sum(g.seeds - 1 for g in self.groups[: self.rungs])
            variance = sum(squares) / freedom[RUNGS]
            seeds.append((b, RUNGS, contrast.on_loss[b] * math.sqrt(variance)))
        variance, freedom[CONTENDERS] = self.contender_variance(measure, line)
        for index in range(self.rungs, len(self.groups)):
            weight = contrast.on_loss[index]
            if weight:
                deviation = weight * math.sqrt(variance / self.groups[index].seeds)
                seeds.append((index, CONTENDERS, deviation))
        if contrast.slope_error:
            seeds.append((SLOPE, SLOPE, contrast.slope_error))
        documents = self.documents(contrast, measure, line)
        return Estimate(contrast.value, seeds, freedom, residuals, *documents)

    def documents(self, contrast, measure, line):
        """Variance and degrees of freedom of the documents, influence of every cluster, and the
        variance and degrees of freedom of the held-out text alone."""
        variances = []
        held_out = []
        influences = []
        luck = 0.0
        for text, d in [(t, d) for t in (TEST, HELD_OUT) for d in range(len(self.domains[t]))]:
            total = 0.0
            for index, weights in enumerate(zip(contrast.on_loss, contrast.on_held_out)):
                if any(weights):
                    total = total + self.cluster_influence(index, weights, measure, text, d)
                    luck += self.luck(index, weights, measure, line, text, d)
            freedom = max(1.0, document_freedom(self.targets[text, "all"][d]))
            variances.append((np.sum(total**2), freedom))
            held_out += variances[-1:] if text == HELD_OUT else []
            influences.append(total)
        everything, freedom = sum_of_variances(variances)
        variance = max(0.0, everything - luck)
        return variance, freedom, np.concatenate(influences), *sum_of_variances(held_out)

    def cluster_influence(self, index, weights, measure, text, d, deviations=False):
        """Influence of every cluster on the means of a group's runs, or on deviations from them."""
        counted = text == measure.text and d in measure.domains
        outcome = weights[0] * counted / len(measure.domains)
        axis = weights[1] * (text == HELD_OUT) / len(self.domains[text])
        out = np.zeros(len(self.targets[text, "all"][d]))
        for weight, targets, counts in (
            (outcome, measure.targets, self.denominators(measure)),
            (axis, "all", self.targets[text, "all"]),
        ):
            if weight:
                losses = self.groups[index].losses[text, targets][d]
                mean = losses.mean(0)
                out = out + weight * influence(losses - mean if deviations else mean, counts[d])
        return out

    def luck(self, index, weights, measure, line, text, d):
        """Variance that the runs' own noise on documents adds. It is part of the seeds' variance
        already, so it is pooled over the same groups as that variance."""
        seeds = self.groups[index].seeds
        alike = [index] if seeds > 1 else range(self.rungs)
        alike = self.pool(line) if index >= self.rungs else alike
        squares = 0.0
        for k in alike:
            squares += np.sum(self.cluster_influence(k, weights, measure, text, d, True) ** 2)
        freedom = sum(self.groups[k].seeds - 1 for k in alike)
        return squares / freedom / seeds if freedom else 0.0

    # ---- The three numbers

    def delta(self, index, measure=None):
        measure = measure or self.all
        return self.estimate(self.difference(index, measure), measure, CURVE)

    def number(self, indices, measure):
        """E or R over these budgets, weighted by their runs."""
        seeds = [self.groups[i].seeds for i in indices]
        fields = [dataclasses.astuple(self.equal_tokens(i, measure)) for i in indices]
        means = [sum(n * x for n, x in zip(seeds, field)) / sum(seeds) for field in zip(*fields)]
        return self.estimate(Contrast(*means), measure, line_of(measure))

    def over_domains(self, of_measure):
        """The interval of the mean with the domains as a sample; of_measure gives estimates."""
        mean = of_measure(self.all)
        domains = self.domains[TEST]
        if len(domains) < 2:
            return None
        values = [of_measure(self.measure(TEST, "all", d)).value for d in domains]
        drawn = np.var(values, ddof=1) / len(values)
        held_out = mean.held_out_documents, mean.held_out_freedom
        total, freedom = sum_of_variances([(drawn, len(values) - 1), held_out])
        half = reach(mean.by_estimator(), mean.freedom, total, freedom)
        return mean.value, mean.value - half, mean.value + half

    def judged(self, model):
        """The budget of Delta_end: the largest of the least repeated ones without a problem."""
        inside = [i for i in self.models[model] if self.groups[i].inside]
        usable = [i for i in inside if self.groups[i].usable]
        if usable and all(math.isfinite(self.groups[i].epochs) for i in usable):
            least = min(max(1.0, self.groups[i].epochs) for i in usable)
            limit = least * (1 + EPOCHS_TOLERANCE)
            usable = [i for i in usable if max(1.0, self.groups[i].epochs) <= limit]
        return (usable or inside or [None])[-1]

    def carries_verdict(self, model):
        """Whether Delta_end does: not at a budget with a caveat, and not without an interval."""
        index = self.judged(model)
        if index is None or not self.groups[index].usable:
            return False
        return not math.isnan(self.delta(index).half_width())

    def with_tangent(self, model, measure):
        return [i for i in self.models[model] if self.groups[i].tangents[line_of(measure)]]
