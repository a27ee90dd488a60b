"""Command lines that `python -m minillm COMMAND --help` ends with. A test parses each of them."""

EXAMPLES = {
    "lab": ("lab", "lab 03 --no-browser"),
    "doctor": ("doctor",),
    "progress": ("progress", "progress --reset"),
    "tour": ("tour", "tour --labs 00,01"),
    "machine": ("machine", "machine --refresh --json machine.json"),
    "oracle": (
        "oracle --dp 2 --zero 0,1,2,3 --cases tied",
        "oracle --dp 2 --tp 2 --sp 0,1 --pp 2 --microbatches 2",
    ),
    "plan": (
        "plan --model llama-3-70b --gpus 64 --batch 512",
        "plan --model llama-3-70b --gpus 16 --serve --prompt 2000 --output 500 --tpot-ms 50",
        "plan --published",
    ),
    "scaling": ("scaling --ranks 1,2,4 --figure scaling.png",),
    "bench": ("bench comm --world-sizes 2,4 --sizes 64k,1M", "bench serve --json serve.json"),
    "interview": ("interview --minutes 20 --topic data", "interview --round design --level senior", "interview --due"),
    "museum": ("museum", "museum slow-with-clipping", "museum --plant 7 --out broken_run"),
    "train": (
        "train --model-size tiny --steps 300 --run first",
        "train --resume --run first --export model",
        "train --data notes.txt --dp 2 --zero 2",
        "train --model-size draft --tp 2 --pp 2 --schedule zero_bubble",
    ),
    "plot": ("plot first", "plot first --out pictures"),
    "train-heads": ("train-heads --kind medusa --export heads",),
    "quantize": (
        "quantize --method awq --bits 4 --group 128 --out target-int4 --report",
        "quantize --bits 8 --report",
    ),
    "generate": (
        'generate "def main"',
        'generate "def main" --temperature 0 --max-new-tokens 50',
        "generate --batch prompts.txt --json answers.json",
    ),
    "serve": (
        "serve",
        "serve --model my-model --port 0 --speculate none",
        "serve --model my-model --speculate none --tp 2",
        "serve --host 0.0.0.0 --api-keys keys.txt",
    ),
    "route": (
        "route --spawn 2",
        "route --replicas http://127.0.0.1:8001,http://127.0.0.1:8002 --port 0 --policy prefix-affinity",
        "route --spawn 2 -- --model my-model --speculate none",
    ),
    "autoscale": (
        "autoscale http://127.0.0.1:8000 --most 4 --target 8",
        "autoscale http://127.0.0.1:8000 --policy predictive --capacity 6 --pool 1 -- --model my-model",
    ),
    "load": (
        "load http://127.0.0.1:8000 --rate 4,8,16 --figure load.png",
        "load http://127.0.0.1:8000 --rate 8 --cv 4 --lengths 16-128:8-64 --json load.json",
        "load http://127.0.0.1:8000 --trace day.jsonl",
    ),
    "notebooks": ("notebooks 01", "notebooks --check"),
    "figures": ("figures 01 --out pictures",),
}


def examples_of(command: str) -> list[str]:
    """Example command lines of a command, as they are typed; none if it has no examples."""
    return [f"python -m minillm {line}" for line in EXAMPLES.get(command, ())]
