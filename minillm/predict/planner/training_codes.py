"""Two training codes whose peaks are public: what they hold beside the bytes of `memory.py`, by their own source.

    torchtitan, end of 2024               DTensor's gathered inputs; its parallel loss; outputs, buffers and logits that
                                          torch's pipeline keeps for every microbatch; ring attention in 32 bits
    Megatron-DeepSpeed for BLOOM, 2022    16-bit gradients beside 32-bit sums, and a 32-bit copy of one while it is
                                          added; the input of the embedding's norm; attention that writes its scores

Nothing here is fitted: each term is the size of tensors that the linked lines make. Each function gives the bytes of
one rank of a pipeline stage at the moments at which it can be fullest.
"""

from minillm.predict.planner.architectures import Architecture
from minillm.predict.planner.layout import Layout
from minillm.predict.planner.memory import ELEMENT, LOGIT, in_flight, stage_memory, stage_parameters

CROSS_ENTROPY = 3 * 4  # bytes per logit of F.cross_entropy: log-softmax, its gradient, that of the logits
PARALLEL_LOSS = 4 * 4  # of torch's loss_parallel: log-softmax, one-hot, exponential, and their sum
WIDE = 4  # bytes of an element in 32 bits
SCORE = 2 + 1 + 2  # bytes per attention score that a layer keeps: softmax, mask of dropout, result (Korthikanti, §4.1)


def torchtitan(model: Architecture, layout: Layout, seq: int, stage: int) -> list[float]:
    """In the backward pass of a layer, and in the last stage also at the loss, which is not compiled:
    https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md gives the commits.

    The caching allocator keeps what a layer's forward pass took, and the logits fit into none of it: so a layer is
    counted at the loss, too.
    """
    is_last = stage == layout.pp - 1
    always = _gathered(model, layout, seq) + _pipelined(model, layout, seq, stage)
    layer = stage_memory(model, layout, seq, stage, logit=0).total + _attention(model, layout, seq)
    moments = [always + layer]
    if is_last:
        loss = PARALLEL_LOSS if layout.tp > 1 else CROSS_ENTROPY
        moments.append(always + stage_memory(model, layout, seq, stage, loss).total)
    return moments


def megatron_deepspeed(model: Architecture, layout: Layout, seq: int, stage: int) -> list[float]:
    """In the backward pass of a microbatch.

    `update_hp_grads` of https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/bf16_optimizer.py adds
    `lp.grad.to(float32)`, and keeps lp.grad until the next backward pass. The embedding has a norm, and attention no
    flash kernel: https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/tr11-176B-ml.slurm.
    A stage's outputs stay until its backward pass (`_exec_backward_pass` of runtime/pipe/engine.py).
    """
    tokens, flight = _tokens(layout, seq), in_flight(layout, stage)
    stream = tokens * model.hidden_size * ELEMENT
    has_table = stage in (0, layout.pp - 1)
    largest = model.table if has_table else model.hidden_size * model.intermediate_size
    gradients = ELEMENT * sum(stage_parameters(model, layout, stage)) + WIDE * largest / layout.tp
    outputs = flight * stream * (stage < layout.pp - 1)
    norm_inputs = flight * stream * (stage == 0)
    scores = SCORE * tokens * seq * model.num_heads / layout.tp
    return [stage_memory(model, layout, seq, stage, LOGIT).total + gradients + outputs + norm_inputs + scores]


def _tokens(layout: Layout, seq: int) -> float:
    return layout.micro_batch * seq / layout.cp


def _gathered(model: Architecture, layout: Layout, seq: int) -> float:
    """DTensor keeps the gathered inputs of attention and MLP for backward, and makes the gradient of one of them;
    Megatron gathers them again (Korthikanti et al. 2022, §4.2.2)."""
    return 3 * _tokens(layout, seq) * model.hidden_size * ELEMENT * (1 - 1 / layout.tp)


def _attention(model: Architecture, layout: Layout, seq: int) -> float:
    """Keys and values are repeated for every query head (`repeat_kv` of torchtitan's model). Ring attention gathers
    them from all ranks and adds up three gradients in 32 bits (`allgather`, `convert_to_f32` of torch's
    https://github.com/pytorch/pytorch/tree/main/torch/distributed/tensor/experimental/_context_parallel)."""
    tokens, width = _tokens(layout, seq), model.query_width / layout.tp
    repeated = 2 * tokens * (width - model.num_kv_heads * model.head_dim / layout.tp) * ELEMENT
    if layout.cp == 1:
        return repeated
    return repeated + 2 * layout.cp * tokens * width * ELEMENT + 3 * tokens * width * WIDE


def _pipelined(model: Architecture, layout: Layout, seq: int, stage: int) -> float:
    """What a stage of torch's pipeline holds for every microbatch of a step, not for those in flight: its outputs
    (https://github.com/pytorch/pytorch/pull/153383 frees them, half a year later), buffers that receive inputs and
    gradients (https://github.com/pytorch/pytorch/issues/136380), and in the last stage the 16-bit logits
    (https://github.com/pytorch/pytorch/issues/159251)."""
    if layout.pp == 1:
        return 0.0
    tokens, is_last = _tokens(layout, seq), stage == layout.pp - 1
    stream = tokens * model.hidden_size * ELEMENT / (layout.tp if layout.sequence else 1)
    sent, received = layout.chunks - is_last, layout.chunks - (stage == 0)
    idle = layout.microbatches - in_flight(layout, stage)  # their inputs are counted among the activations
    logits = layout.microbatches * tokens * model.vocab_size / layout.tp * ELEMENT * is_last
    return (2 * layout.microbatches * sent + idle * received) * stream + logits
