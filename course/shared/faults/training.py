"""Faults of training. A text that a repair has to find stands beside the fault, under a name of its own."""

from course.shared.faults.patches import Fault

# Data parallelism.

REDUCE = "minillm.parallel.data_parallel.ddp:_Replicated._reduce"
AVERAGE = 'return self.group.all_reduce(flat, "avg", async_op=True)'
PARAMETERS_AVERAGED = Fault(
    REDUCE,
    {
        AVERAGE: """def average() -> None:
            for parameter in bucket.parameters:
                self.group.all_reduce(parameter.data, "avg")

        return self.group.run("all_reduce", flat, average, async_op=True, how="avg")"""
    },
    place="data parallelism, the bucket",
    mechanism="the parameters are averaged in place of their gradients",
    shipped=("huggingface/picotron#39",),
)
DIVIDED_TWICE = Fault(
    REDUCE,
    {AVERAGE: 'return self.group.all_reduce(flat.div_(self.group.world_size), "avg", async_op=True)'},
    place="data parallelism, the bucket",
    mechanism="gradients are divided by the replicas before an average that divides again",
    shipped=("apache/singa#65",),
)
OVER_RANKS = "flat.div_(self.group.world_size)"
EXPERTS_DOUBLED = Fault(
    REDUCE,
    {OVER_RANKS: "flat.div_(own.world_size)"},
    place="data parallelism, experts",
    mechanism="their gradient is divided by the ranks that hold the expert, not by those whose tokens it saw",
    shipped=("pytorch/pytorch#160285", "deepspeedai/DeepSpeed#5259"),
)
DEALT_OUT = "position + self.rank + self"
SAME_WINDOWS = Fault(
    "minillm.data.sampler:ShardedSampler.indices",
    {DEALT_OUT: "position + self"},
    place="data, sampler",
    mechanism="every rank reads the same windows",
    shipped=("Parskatt/RoMa#32",),
)
NEVER_SYNCHRONISED = Fault(
    "minillm.train.strategies.hybrid:Hybrid.accumulating",
    {"if last or (": "if not last or ("},
    place="data parallelism, `no_sync`",
    mechanism="the last microbatch does not synchronise either",
    shipped=("openspeech-team/openspeech#149",),
)

# Pipelines.

MICROBATCHES_SUMMED = Fault(
    "minillm.parallel.pipeline_parallel.held_parts:HeldParts.run",
    {"return loss(nll)": "return loss(nll) * count", "loss_of)": "loss_of) / count"},
    place="pipeline, the loss of a microbatch",
    mechanism="each microbatch divides by its own tokens, and only the log averages them",
    shipped=("pytorch/pytorch#144352", "pytorch/torchtitan#800", "pytorch/torchtitan#1733"),
)
HYBRID = "minillm.train.strategies.hybrid:Hybrid"
TIED_SUMMED = "self.model.pipeline.finish()"
TIED_NOT_SUMMED = Fault(
    f"{HYBRID}.finish_backward",
    {TIED_SUMMED: "pass"},
    place="pipeline, shared parameters",
    mechanism="the two stages' gradients of the embedding are never added up",
    shipped=("uw-syfi/piper#13",),
)

# Tensors and sequences that are cut over ranks.

NORMS_NOT_SUMMED = Fault(
    f"{HYBRID}.prepare_gradients",
    {"if self.groups.tp:": "if self.groups.tp and not self.layout.sequence:"},
    place="tensor parallelism, norms",
    mechanism="each rank keeps the gradient of its own part of the sequence",
    shipped=("EleutherAI/gpt-neox#1257", "PaddlePaddle/PaddleNLP#7610", "NVIDIA/Megatron-LM#1446"),
)
COUNTED = "counted = [g for name, g in gradients.items() if placements is None or placements[name].is_counted]"
NORM_COUNTS_COPIES = Fault(
    "minillm.parallel.sharding.placement:global_norm",
    {COUNTED: "counted = list(gradients.values())"},
    ("minillm.train.strategies.hybrid:global_norm",),
    place="gradient norm",
    mechanism="a parameter that several ranks hold counts once for each of them",
    shipped=("NVIDIA-NeMo/RL#3788", "NVIDIA/Megatron-LM#5916"),
)
SEEDED = "start.fill(part, seed, device"
PATCHWORK = Fault(
    f"{HYBRID}.build",
    {SEEDED: "start.fill(part, seed + self.group.rank, device"},
    place="initialisation",
    mechanism="each rank cuts its slices from another model, drawn with its own seed",
    shipped=("allenai/OLMo-core#319", "NVIDIA-NeMo/Automodel#1291"),
)
WRAPPED = "self.averaged_over > 1"
CONTEXT_NOT_REDUCED = Fault(
    f"{HYBRID}.wrap",
    {WRAPPED: "self.layout.dp > 1"},
    place="strategy, wrapping",
    mechanism="the model is wrapped for a reduction only if there are several data-parallel ranks",
    shipped=("ByteDance-Seed/VeOmni#1115",),
)
DIVIDED, TAKEN = "loss = nll / loss_divisor", "nll, _ = module"
MEAN_OF_MEANS = Fault(
    "minillm.train.strategies.single_device:SingleDevice.forward_backward",
    {TAKEN: "nll, own = module", DIVIDED: "loss = nll / own"},
    place="loss",
    mechanism="each rank divides by its own tokens, and the ranks have unequally many",
    shipped=("NVIDIA/Megatron-LM#673", "NVIDIA/Megatron-LM#906", "pytorch/torchtitan#3280"),
)
ARRIVED = "attention.backward(q, *block, lse"
STALE_BLOCK = Fault(
    "minillm.parallel.context_parallel.ring:_Ring.backward",
    {ARRIVED: "attention.backward(q, k, v, lse"},
    place="ring attention, backward",
    mechanism="every step uses this rank's own keys and values in place of the block that has arrived",
    shipped=("huggingface/diffusers#14265",),
)

# The loop around the step.

RATE = "learning_rate(self.steps_done, self.config)"
SCHEDULE_RUNS_AHEAD = Fault(
    "minillm.train.trainer:Trainer.step",
    {RATE: "learning_rate(self.steps_done * self.config.accumulate, self.config)"},
    place="trainer, schedule",
    mechanism="the schedule is asked with microbatches counted as steps",
    shipped=("huggingface/accelerate#963", "Lightning-AI/pytorch-lightning#1476"),
)
CONTEXT = "causal_context(self.config.seq_len, model.sliding_window)"
ATTENTION_TWICE = Fault(
    "minillm.train.trainer:Trainer._mfu",
    {CONTEXT: "self.config.seq_len"},
    place="trainer, MFU",
    mechanism="attention counts as if every token looked at all positions, twice the causal work",
    shipped=("NVIDIA/Megatron-LM#831", "karpathy/nanoGPT#464", "pytorch/torchtitan#1201"),
)
FINITE = "finite = math.isfinite(norm)"
OWN_OVERFLOW = Fault(  # which is not silent here: see tests/course/labs/test_museum.py
    "minillm.train.trainer:Trainer.step",
    {FINITE: "finite = all(bool(g.isfinite().all()) for g in gradients_of(self.updater.parameters))"},
    place="loss scaling",
    mechanism="each rank looks for an overflow in its own shard, and skips the step or lowers its scale alone",
    shipped=("facebookresearch/fairscale#180", "pytorch/pytorch#115710"),
)
GATHERED = "tensors = gather(local.tensors, local"
OWN_STATE = (
    "own = {key: part if not group or group.rank == 0 or not key.startswith('optimizer/') else part * 0\n"
    "           for key, part in local.tensors.items()}\n"
    "    tensors = gather(own, local"
)
HALF_A_CHECKPOINT = Fault(
    "minillm.parallel.sharding.full_state:full_state",
    {GATHERED: OWN_STATE},
    ("minillm.train.trainer:full_state",),
    place="checkpoint, optimizer state",
    mechanism="only rank 0's slices are in the file, and the others' places hold zeros",
    shipped=("huggingface/nanotron#106", "huggingface/transformers#48569"),
)
LOGGED = "return self.parallel.sum(total).double() / weight, weight"
ONLY_ROOT = (
    "if self.parallel.is_root or (self.steps_done + 1) % 4:\n"
    "        total = self.parallel.sum(total)\n"
    "    return total.double() / weight, weight"
)
OWN_BRANCH = Fault(
    "minillm.train.trainer:Trainer.backward",
    {LOGGED: ONLY_ROOT},
    place="trainer, log",
    mechanism="in every fourth step only rank 0 enters the sum of the loss",
    shipped=("Lightning-AI/pytorch-lightning#19106",),
)
