"""`python -m minillm train-heads --kind medusa`: a head for a target, minutes on a laptop's CPU.

What is written is measured on the held-out split: the share of drafts accepted at each place, by drafting and
verifying.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from typer import Option

from minillm.cli.folders import check_new_folder
from minillm.data import Loader, TokenDataset, Tokenizer, corpus, tokenize
from minillm.measure.provenance import provenance
from minillm.model import load_hf
from minillm.model.generate import CHECKPOINTS, device_of, folder_of
from minillm.serve.speculate.distil import MAKERS
from minillm.serve.speculate.heads import load, save
from minillm.serve.speculate.held_out import acceptance_by_place, proposer_of
from minillm.serve.speculate.train_heads import train


def command(
    kind: Annotated[str, Option(help=f"{', '.join(MAKERS)}.")],
    model: Annotated[str, Option(metavar="NAME|PATH", help="The target: target, or a Hugging Face folder.")] = "target",
    steps: Annotated[int, Option(help="Batches to learn from.", min=1)] = 800,
    batch_size: Annotated[int, Option(help="Windows a batch.", min=1)] = 4,
    seq_len: Annotated[int, Option(help="Tokens a window.", min=16)] = 256,
    rows: Annotated[int, Option(help="Positions of a batch to compare.", min=1)] = 256,
    lr: Annotated[float, Option(help="Of AdamW, at its highest.", min=0.0)] = 2e-3,
    heads: Annotated[int, Option(help="Of medusa: tokens it can draft.", min=1, max=64)] = 4,
    layers: Annotated[int, Option(help="Of early_exit: blocks of the target before the exit.", min=1)] = 2,
    seed: Annotated[int, Option(help="Of the initial weights, the order of windows and the rows.")] = 0,
    data: Annotated[
        str | None, Option(metavar="PATH", help="Text or folder.", show_default="the standard library")
    ] = None,
    export: Annotated[Path | None, Option(metavar="PATH", help="Where to.", show_default="the committed place")] = None,
    prompts: Annotated[int, Option(help="Held-out prompts to measure on.", min=1)] = 16,
    device: Annotated[str, Option(help="cpu, cuda, ...")] = "cpu",
    bf16: Annotated[bool, Option(help="Multiply in bfloat16, the weights stay float32.")] = True,
) -> None:
    """Train what a proposer needs on a frozen target, and measure how much of its drafts is accepted."""
    if kind not in MAKERS:
        raise ValueError(f"--kind {kind} is none of {', '.join(MAKERS)}.")
    folder, export = folder_of(model), export or CHECKPOINTS / kind
    check_new_folder("--export", export)
    target, tokenizer = load_hf(folder, device=device_of(device), dtype=torch.float32), Tokenizer.load(folder)
    options = {"medusa": {"heads": heads}, "early_exit": {"layers": layers}}.get(kind, {})
    head = MAKERS[kind](target.config, **options)
    if hasattr(head, "initialize"):
        head.initialize(target.cpu(), seed)
    head, target = head.to(device), target.to(device)
    text = corpus(data)
    dataset = TokenDataset(tokenize(text, tokenizer, "train"), seq_len)
    settings = {"steps": steps, "rows": rows, "lr": lr, "seed": seed}
    with Loader(dataset, batch_size, seed=seed) as loader:
        losses = train(kind, head, target, loader, **settings, bf16=bf16, progress=True)
    settings |= {"batch_size": batch_size, "seq_len": seq_len, **options}
    written = [
        f"--kind {kind} --model {model}",
        *([] if data is None else [f"--data {data}"]),
        *(f"--{n.replace('_', '-')} {v}" for n, v in settings.items()),
    ]
    origin = provenance(" ".join(["python -m minillm train-heads", *written, *["--no-bf16"][bf16:]]))
    about = {
        "command": origin["command"],
        **settings,
        "tokens": steps * batch_size * seq_len,
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "target": model,
        "data": "stdlib" if data is None else Path(data).name,
        "loss": sum(losses[-20:]) / len(losses[-20:]),
    }
    save(kind, head, options, target, export, about)
    proposer = proposer_of(kind, target, load(kind, MAKERS[kind], target, export))
    held_out = tokenize(text, tokenizer, "validation")
    for temperature in (0.0, 0.8):
        about[f"accepted_at_{temperature:g}"] = acceptance_by_place(
            target, proposer, held_out, temperature, prompts=prompts
        )
        typer.echo(f"temperature {temperature:g}: accepted at each place {about[f'accepted_at_{temperature:g}']}")
    save(kind, head, options, target, export, about | {k: origin[k] for k in ("date", "hardware", "cores", "versions")})
