"""`python -m oracle` on implementations of discrete flows: right ones, which it must accept, and wrong ones,
which it must refuse with the sentence that names the fault."""

import json
import textwrap

import pytest
import torch

from oracle.__main__ import main
from oracle.properties import CONTRACT, PROPERTIES

torch.set_num_threads(1)
DISCRETE = CONTRACT[CONTRACT.index("MixturePath") :]


def hold(tmp_path, capsys, source, *options):
    """Exit code and JSON rows of the command on a file with this source."""
    path = tmp_path / "implementation.py"
    path.write_text("import math\nimport torch\nimport torch.nn.functional as F\n" + textwrap.dedent(source))
    code = main(["--impl", str(path), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


# ---- right implementations: vectorised, in closed form

BASE = """
    class Path:
        def kernel(self, x, x1, t, h, jump="exp", last=False):
            if last:
                return F.one_hot(x1, self.size).double()
            rates = self.rates(x, x1, t)
            z = h * rates.sum(-1, keepdim=True)
            chance = -torch.expm1(-z) if jump == "exp" else z.clamp(max=1)
            moves = torch.where(z > 0, rates / z.clamp(min=1e-300) * h * chance, 0.0)
            return moves + (1 - chance) * F.one_hot(x, self.size)

        def log_kernel_column(self, x, x_next, t, h, jump="exp", last=False):
            V = self.size
            every = torch.arange(V).expand(*x.shape, V)
            start, end = x[..., None].expand_as(every), x_next[..., None].expand_as(every)
            if last:
                return torch.where(every == end, 0.0, -math.inf).double()
            z = h * self.rates(start, every, t).sum(-1)
            stay = -z if jump == "exp" else torch.log1p(-z.clamp(max=1))
            chance = -torch.expm1(-z) if jump == "exp" else z.clamp(max=1)
            move = self.log_rates(start, end, every, t) + chance.log() - (z / h).log()
            return torch.where(start == end, stay, torch.where(z > 0, move, -math.inf))
"""
MIXTURE = """
    class MixturePath(Path):
        def __init__(self, vocab_size, source="uniform", mask_id=None, power=1.0, corrector=0.0):
            self.size, self.power, self.corrector = vocab_size, power, corrector
            self.p0 = torch.full((vocab_size,), 1 / vocab_size, dtype=torch.float64)
            if source == "mask":
                self.p0 = F.one_hot(torch.tensor(mask_id), vocab_size).double()

        def parts(self, t):
            k, speed = t**self.power, self.power * t ** (self.power - 1)
            back = self.corrector * speed / k if self.corrector else 0.0
            return (1 + self.corrector) * speed / (1 - k), back

        def rates(self, x, x1, t):
            ahead, back = self.parts(t)
            rates = ahead * F.one_hot(x1, self.size).double() + back * self.p0
            return rates * (1 - F.one_hot(x, self.size))

        def log_rates(self, x, y, v, t):
            ahead, back = self.parts(t)
            return (ahead * (y == v).double() + back * self.p0[y]).log()
"""
METRIC = """
    class MetricPath(Path):
        def __init__(self, distance, c=3.0, a=0.9):
            self.d, self.size, self.c, self.a = distance, len(distance), c, a

        @classmethod
        def from_embeddings(cls, weight):
            unit = F.normalize(weight, dim=-1)
            return cls((2 - 2 * unit @ unit.T).clamp(min=0) ** 2)

        def log_rates(self, x, y, v, t):
            odds = t / (1 - t)
            log_p = torch.log_softmax(-self.c * odds**self.a * self.d, 0)
            speed = self.c * self.a * odds ** (self.a - 1) / (1 - t) ** 2 if t > 0 else 0.0
            gap = (self.d[x, v] - self.d[y, v]).clamp(min=0)
            return log_p[y, v] + (speed * gap).log()

        def rates(self, x, x1, t):
            every = torch.arange(self.size).expand(*x.shape, self.size)
            return self.log_rates(x[..., None], every, x1[..., None], t).exp()
"""
TRANSITION = """
    def transition_log_prob(path, logits, x, x_next, t, h, *, jump="exp", last=False):
        log_p = logits - torch.logsumexp(logits, -1, keepdim=True)
        column = path.log_kernel_column(x, x_next, t, h, jump, last)
        return torch.logsumexp(log_p + column, -1)
"""
SAMPLE = """
    def sample_step(path, logits, x, t, h, *, jump="exp", last=False, generator=None):
        def pick(p):
            noise = torch.rand(p.shape, generator=generator, dtype=torch.float64)
            return (p / -noise.log()).argmax(-1)

        x1 = pick(logits.softmax(-1))
        return pick(path.kernel(x, x1, t, h, jump, last)), x1
"""
MC = """
    def mc_log_ratio(path, log_p_new, log_p_old, x, x_next, draws, t, h, *, jump="exp"):
        index = draws.movedim(0, -1)
        log_q = path.log_kernel_column(x, x_next, t, h, jump, False).gather(-1, index)
        weights = torch.softmax(log_q, -1)
        return (weights * (log_p_new.gather(-1, index) - log_p_old.gather(-1, index)).exp()).sum(-1).log()
"""
AGGREGATE = """
    def aggregate(log_ratio, mask, how):
        kept = log_ratio.masked_fill(~mask, 0.0)
        if how == "token":
            return kept
        return kept.sum(-1) / (mask.sum(-1) if how == "geometric" else 1)
"""
KL = """
    def posterior_kl(logits, logits_ref):
        p, ref = logits.log_softmax(-1), logits_ref.log_softmax(-1)
        return (p.exp() * (p - ref).masked_fill(p == -math.inf, 0.0)).sum(-1)
"""
ALL = "\n".join([BASE, MIXTURE, METRIC, TRANSITION, SAMPLE, MC, AGGREGATE, KL])
SINGLE = ALL.replace("double()", "float()").replace("dtype=torch.float64", "dtype=torch.float32")
SINGLE = SINGLE.replace("self.d, self", "distance = distance.float()\n            self.d, self")
SINGLE = SINGLE.replace("log_p = logits -", "logits = logits.float()\n        log_p = logits -")
RIGHT = {"float64, vectorised": (ALL, "float64"), "float32 paths and posteriors": (SINGLE, "float32")}


@pytest.mark.parametrize("name", RIGHT)
def test_right_implementations_are_accepted(tmp_path, capsys, name):
    source, arithmetic = RIGHT[name]
    code, rows = hold(tmp_path, capsys, source)
    found = [row for row in rows if row["function"] in DISCRETE]
    assert [row["property"] for row in found if row["verdict"] != "holds"] == [] and code == 0
    assert len(found) == sum(p.function in DISCRETE for p in PROPERTIES)
    paths = {row["arithmetic"] for row in found if row["function"] in ("MixturePath", "MetricPath")}
    assert paths == {arithmetic}


@pytest.mark.parametrize("source", [TRANSITION, SAMPLE, MC, AGGREGATE, KL], ids=DISCRETE[2:])
def test_functions_without_a_path_are_lent_the_oracles(tmp_path, capsys, source):
    code, rows = hold(tmp_path, capsys, source)
    assert code == 0 and len({row["function"] for row in rows if row["verdict"] == "holds"}) == 1


# ---- wrong ones: source, what is replaced by what, and words of the meaning that most failures must have

GAP = "(self.d[x, v] - self.d[y, v])"
WRONG = [
    (MIXTURE, "(1 + self.corrector) *", "", "the corrector acts backward only"),
    (MIXTURE, "self.corrector * speed / k if", "self.corrector * speed / (1 - k) if", "it must be k'/k"),
    (METRIC, GAP + ".clamp(min=0)", GAP + ".abs()", "farther symbols are not 0"),
    (METRIC, "* self.d, 0)", "* self.d, 1)", "normalised over v"),
    (METRIC, "odds ** (self.a - 1)", "odds ** self.a", "the power must be a - 1"),
    (METRIC, ".clamp(min=0) ** 2)", ".clamp(min=0))", "it must be squared twice"),
    (BASE, "F.one_hot(x1, self.size).double()\n", "F.one_hot(x, self.size).double()\n", "step keeps x"),
    (BASE, "rates / z.clamp(min=1e-300) * h * chance", "rates * chance", "not divided by lambda"),
    (BASE, "stay = -z if jump == \"exp\" else torch.log1p(-z.clamp(max=1))",
     "stay = (1 - (1 - (-z).exp())).log() if jump == \"exp\" else torch.log1p(-z.clamp(max=1))",
     "which rounding spoils"),
    (BASE, "+ chance.log() - (z / h).log()", "- (z / h).log()", "the chance to jump is missing"),
    (TRANSITION, "logits - torch.logsumexp(logits, -1, keepdim=True)", "logits", "not normalised"),
    (TRANSITION, "jump, last)\n", "jump, False)\n", "last is ignored"),
    (TRANSITION, "keepdim=True)\n", "keepdim=True).detach()\n", "the gradient is the responsibility alone"),
    (TRANSITION, "return torch.logsumexp(log_p + column, -1)",
     "return torch.where(x == x_next, 0.0, torch.logsumexp(log_p + column, -1))", "tokens that stay"),
    (SAMPLE, "t, h, jump, last)), x1", "t, h, jump, last)), pick(logits.softmax(-1))", "another draw"),
    (SAMPLE, "generator=generator, ", "", "the generator is ignored"),
    (MC, "draws.movedim(0, -1)", "draws[1 if len(draws) > 1 else 0:].movedim(0, -1)", "thrown away"),
    (MC, "torch.softmax(log_q, -1)", "log_q.exp()", "not divided by the sum of the weights"),
    (MC, "log_p_new.gather(-1, index) - log_p_old", "log_p_old.gather(-1, index) - log_p_new", "inverted"),
    (AGGREGATE, "log_ratio.masked_fill(~mask, 0.0)", "log_ratio", "padding counts"),
    (AGGREGATE, "mask.sum(-1) if", "log_ratio.shape[1] if", "divides by all D tokens"),
    (AGGREGATE, " / (mask.sum(-1) if how == \"geometric\" else 1)", "", "the geometric mean is a sum"),
    (KL, "p.exp() * (p - ref)", "ref.exp() * (ref - p)", "the direction is wrong"),
    (KL, ".masked_fill(p == -math.inf, 0.0)", "", "0 log 0 is NaN"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "old", "new", "words"), WRONG, ids=range(len(WRONG)))
def test_wrong_implementations_are_refused_by_name(tmp_path, capsys, source, old, new, words):
    """Those of a path's base class in both paths, alone."""
    assert old in source
    wrong = source.replace(old, new)
    source = {MIXTURE: BASE + wrong, METRIC: BASE + wrong, BASE: wrong + MIXTURE + METRIC}.get(source, wrong)
    code, rows = hold(tmp_path, capsys, source)
    meanings = [row["meaning"] for row in rows if row["verdict"] == "FAILS"]
    assert code == 1 and meanings
    assert words in max(meanings, key=meanings.count), meanings


def test_what_a_wrong_path_spoils_is_said_to_follow_from_it(tmp_path, capsys):
    """The functions that call a path are right: their failures have the path's sentence, or say that they
    follow from it."""
    source = BASE + MIXTURE.replace("(1 + self.corrector) *", "") + TRANSITION
    code, rows = hold(tmp_path, capsys, source)
    failures = [row for row in rows if row["verdict"] == "FAILS"]
    assert code == 1 and {"MixturePath", "transition_log_prob"} <= {row["function"] for row in failures}
    for row in failures:
        known = ("the corrector acts backward only", "follows from the failures of MixturePath")
        assert row["meaning"].startswith(known), row


def test_a_path_that_is_not_implemented_is_not_checked(tmp_path, capsys):
    source = """
    def MetricPath(*args, **kwargs):
        raise NotImplementedError("metric paths")
    """
    code, rows = hold(tmp_path, capsys, BASE + MIXTURE + TRANSITION + source)
    verdicts = {(row["function"], row["verdict"]) for row in rows if "metric path" in row["property"]}
    assert code == 0 and verdicts >= {(name, "not checked") for name in ("MetricPath", "transition_log_prob")}
    assert not any(verdict == "FAILS" for _, verdict in verdicts)
