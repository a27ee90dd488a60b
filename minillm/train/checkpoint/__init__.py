"""A run's state on disk: sharded, checked, committed at once, and readable in any other layout.

    runs/NAME/checkpoints/save-0007-step-1400/manifest.json    what is where, with checksums; it is written last
                                              rank-0000.bin    what rank 0 wrote: tensors' parts, one after the other
                                              rank-0001.bin    ...
    runs/NAME/checkpoints/.save-0008-step-1600/                a save that is not done, or was killed: nobody reads it

Every rank writes what it alone holds, and 1/k of what k ranks hold. A restore looks up, for every part that it needs,
which bytes of which files these are, and reads those and no others. Where the parts of a tensor lie is said by
`parallel/sharding/placement.py` and nowhere else.

Reading path: ../../parallel/sharding/state.py (what is saved, by global names), shares.py (who writes what), writer.py
(a save, and when it counts), manifest.py (what a checkpoint is on disk), reader.py (which bytes a rank needs). Beside
them: runs.py (where a part's bytes lie), checksum.py (how a part that several ranks read is checked), background.py
(the thread that writes), torch_format.py (torch.distributed.checkpoint in and out), export.py (Hugging Face's layout),
generators.py (random number generators).
"""
