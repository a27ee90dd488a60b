"""The watch around a learner's functions: what they may change, and what nobody notices."""

import pytest
import torch

from course.kit.exercises import CheckFailed
from course.kit.untouched import watched


def reference(x, parts, options=None, *, scale=1.0):
    return x * scale


def test_a_changed_argument_is_named():
    def spoils(x, parts, options=None, *, scale=1.0):
        parts.append(1)
        return x

    with pytest.raises(CheckFailed, match=r"`spoils` changed its input `parts`.*clone"):
        watched(spoils, reference, (), CheckFailed)(torch.ones(2), [torch.ones(1)])
    assert watched(spoils, reference, ("parts",), CheckFailed)(3, []) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda x, parts, options: x.add_(1),
        lambda x, parts, options: parts[0].zero_(),
        lambda x, parts, options: parts.reverse(),
        lambda x, parts, options: options.pop("a"),
        lambda x, parts, options: options["a"].append(2),
    ],
)
def test_changes_are_found_wherever_they_are(change):
    def learner(x, parts, options=None, *, scale=1.0):
        change(x, parts, options)

    with pytest.raises(CheckFailed, match="changed its input"):
        watched(learner, reference, (), CheckFailed)(torch.zeros(2), [torch.ones(1), torch.ones(2)], {"a": [1]})


def test_what_is_left_alone_passes():
    def learner(x, parts, options=None, *, scale=1.0):
        return x + parts[0].sum() * scale

    call = watched(learner, reference, (), CheckFailed)
    nan = torch.tensor([float("nan"), 1.0], requires_grad=True)
    call(nan, [torch.ones(2)]).sum().backward()
    assert nan.grad.tolist() == [1.0, 1.0]
    assert call.__name__ == "learner"


def test_classes_and_objects_are_as_they_were():
    assert watched(dict, reference, (), CheckFailed) is dict
    one, other = watched((reference, dict), (reference, dict), (), CheckFailed)
    assert one.__wrapped__ is reference and other is dict


def test_a_wrong_call_raises_what_it_raised_before():
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        watched(reference, reference, (), CheckFailed)(1)
