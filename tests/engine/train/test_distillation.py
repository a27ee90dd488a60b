"""Distillation: its loss and gradients against the formula written out in float64, and training with a teacher."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from minillm.__main__ import run
from minillm.comm import launch
from minillm.data import Tokenizer, Tokens
from minillm.model import ModelConfig, Transformer, save_hf
from minillm.model.distillation import Goals, distillation_sums
from minillm.train import TrainConfig, Trainer
from minillm.train.job import DEFAULTS, TrainingJob
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy

STUDENT = ModelConfig(53, 16, 30, 4, 4, 1, max_seq_len=16, tie_embeddings=True)
TEACHER = Transformer(replace(STUDENT, hidden_size=24, intermediate_size=32, init_std=0.3, head_dim=6), seed=9)
TOKENS = Tokens((np.arange(3000) ** 2 % 53).astype(np.uint16), 53, 0, 1, 9000)


def trainer(share=0.5, batch_size=8, parallel=None, teacher=TEACHER, **settings):
    config = TrainConfig(STUDENT, seq_len=16, batch_size=batch_size, steps=6, lr=1e-2, distil_share=share, **settings)
    return Trainer(config, TOKENS, TOKENS, workers=0, parallel=parallel, teacher=teacher)


def some(*shape, seed=0):
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("weights", [None, torch.rand(2, 5, dtype=torch.float64)])
@pytest.mark.parametrize("share, temperature", [(0.0, 2.0), (0.3, 1.0), (0.7, 4.0), (1.0, 0.5)])
def test_loss_and_gradient_are_those_of_the_formula(share, temperature, weights):
    logits, theirs = some(2, 5, 7).requires_grad_(), some(2, 5, 7, seed=1)
    targets = torch.tensor([[0, 6, 3, -100, 2], [1, 1, -100, 5, 4]])
    total, weight = distillation_sums(logits, targets, weights, Goals(theirs, share, temperature))
    total.backward()
    expected, gradient = 0.0, torch.zeros_like(theirs)
    counted = torch.ones(2, 5).double() if weights is None else weights
    for row in range(2):
        for place in range(5):
            if (target := int(targets[row, place])) < 0:
                continue
            z, t, w = logits[row, place].tolist(), theirs[row, place].tolist(), float(counted[row, place])
            q, q_soft, p = softmax(z, 1), softmax(z, temperature), softmax(t, temperature)
            kl = sum(a * math.log(a / b) for a, b in zip(p, q_soft, strict=True))
            expected += w * ((1 - share) * -math.log(q[target]) + share * temperature**2 * kl)
            for word in range(7):
                hard, soft = q[word] - (word == target), temperature * (q_soft[word] - p[word])
                gradient[row, place, word] = w * ((1 - share) * hard + share * soft)
    assert total.item() == pytest.approx(expected, rel=1e-12)
    assert torch.allclose(logits.grad, gradient, atol=1e-12)
    assert float(weight) == pytest.approx(float((counted * (targets >= 0)).sum()))


def softmax(values, temperature):
    parts = [math.exp(value / temperature) for value in values]
    return [part / sum(parts) for part in parts]


@pytest.mark.parametrize("how", [{}, {"accumulate": 2}, {"documents": True}], ids=str)
def test_without_a_share_it_is_plain_training_to_the_bit(how):
    with trainer(0.0, **how) as ours, trainer(0.0, teacher=None, **how) as plain:
        assert [ours.step().loss for _ in range(3)] == [plain.step().loss for _ in range(3)]
        for mine, other in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(mine, other)


def test_the_loss_falls_and_the_teacher_stays_as_it_was():
    teacher = copy.deepcopy(TEACHER)
    with trainer(1.0, teacher=teacher, warmup_steps=1) as ours:
        losses = [ours.step().loss for _ in range(6)]
        assert losses[-1] < 0.98 * losses[0] and math.isfinite(ours.validate().loss)
    assert all(torch.equal(mine, own) for mine, own in zip(teacher.parameters(), TEACHER.parameters(), strict=True))
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in teacher.parameters())


def test_a_student_that_is_its_teacher_has_nothing_to_learn():
    with trainer(1.0, teacher=Transformer(STUDENT, seed=0)) as ours:
        step = ours.step()
    assert step.loss == pytest.approx(0, abs=1e-6) and step.grad_norm < 1e-5


def test_tokens_see_their_own_document_in_the_teacher_as_well():
    with trainer(1.0, teacher=Transformer(STUDENT, seed=0), documents=True) as ours:
        assert ours.step().grad_norm < 1e-5


LAYOUTS = [
    ParallelConfig(dp=4),
    ParallelConfig(dp=4, zero=2),
    ParallelConfig(dp=4, zero=3),
    ParallelConfig(dp=2, tp=2),
    ParallelConfig(dp=2, tp=2, sequence=True),
    ParallelConfig(dp=2, pp=2, accumulate=2),
    ParallelConfig(dp=2, pp=2, accumulate=2, zero=3),
    ParallelConfig(dp=2, cp=2),
    ParallelConfig(tp=2, pp=2, accumulate=2),
    ParallelConfig(tp=4),
]


def steps_under(group, layouts):
    """How far loss, norm and tokens of two steps are off those of one process, for each layout."""
    torch.set_num_threads(1)
    with trainer() as alone:
        expected = [alone.step() for _ in range(2)]
    found = []
    for layout in layouts:
        with trainer(batch_size=8 // layout.dp, parallel=make_strategy(group, layout)) as ours:
            pairs = [(ours.step(), own) for own in expected]
        off = [abs(step.loss - own.loss) for step, own in pairs]
        off += [abs(step.grad_norm / own.grad_norm - 1) for step, own in pairs]
        found.append(off + [abs(step.tokens - own.tokens) for step, own in pairs])
    return found


def test_every_layout_makes_the_steps_of_one_process():
    for found in launch(steps_under, 4, LAYOUTS, timeout=240):
        for layout, off in zip(LAYOUTS, found, strict=True):
            assert max(off) < 1e-4, layout


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: trainer(teacher=None), "distil_share 0.5 is of a teacher's loss: give a teacher"),
        (lambda: trainer(share=1.5), "distil_share 1.5 is outside 0 .. 1"),
        (lambda: trainer(distil_temperature=0.0), "distil_temperature 0.0 must be a number above 0"),
        (lambda: trainer(compile=True), "compile would begin anew for what a teacher says"),
        (
            lambda: trainer(teacher=Transformer(replace(STUDENT, vocab_size=60))),
            "the teacher's vocabulary is 60, the student's 53",
        ),
        (
            lambda: trainer(teacher=Transformer(replace(STUDENT, max_seq_len=8))),
            "the teacher's context is 8 tokens, seq_len is 16",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


TRAIN = ["train", "--model-size", "tiny", "--data", "text", "--seq-len", "16", "--batch-size", "2"]


def test_the_command_distils_and_goes_on(home, capsys):
    vocab = Tokenizer.load().vocab_size
    save_hf(Transformer(replace(STUDENT, vocab_size=vocab)), home / "teacher")
    Tokenizer.load().save(home / "teacher")
    with_teacher = [*TRAIN, "--teacher", "teacher", "--run", "student"]
    assert run([*with_teacher, "--steps", "2"]) == 0
    assert run([*TRAIN, "--run", "student-2", "--steps", "2", "--distil-share", "0.5"]) == 2
    assert "--distil-share 0.5 is of a teacher's loss: name one with --teacher" in capsys.readouterr().err
    assert run([*TRAIN, "--run", "student-2", "--steps", "2", "--distil-temperature", "4"]) == 2
    assert "--distil-temperature 4.0 is of a teacher's loss" in capsys.readouterr().err
    assert run([*TRAIN, "--teacher", "nowhere", "--run", "student-3"]) == 2
    assert "--teacher nowhere is not a model folder" in capsys.readouterr().err
    save_hf(Transformer(replace(STUDENT, vocab_size=60)), home / "other")
    assert run([*TRAIN, "--teacher", "other", "--run", "student-4"]) == 2
    said = capsys.readouterr().err
    assert "the teacher's vocabulary is 60" in said and said.count("\n") == 1 and not (home / "runs/student-4").exists()


def test_the_command_of_an_export_says_the_share():
    """Without it the command line would take its own."""
    job = TrainingJob(Path("runs"), DEFAULTS | {"teacher": "target"}, ParallelConfig(), export_to=Path("x"))
    assert "--distil-share 0.0" in job.command()


def test_words_that_one_of_the_two_excludes():
    """-inf of the teacher: nothing to learn there. -inf of the student where the teacher hopes: an infinite loss."""
    teacher, student = torch.tensor([[[0.0, 1.0, -torch.inf]]]), torch.tensor([[[0.5, 0.2, 0.1]]])
    target = torch.tensor([[0]])
    loss, _ = distillation_sums(student, target, None, Goals(teacher, 1.0, 1.0))
    p, log_q = teacher.softmax(-1), student.log_softmax(-1)
    assert loss == pytest.approx(float((p[..., :2] * (p[..., :2].log() - log_q[..., :2])).sum()), abs=1e-6)
    student[..., 1] = -torch.inf
    assert distillation_sums(student, target, None, Goals(teacher, 1.0, 1.0))[0] == torch.inf
