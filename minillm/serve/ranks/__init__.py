"""One engine over the ranks of a `Group`: each holds a part of the model, and rank 0 says what the next step is.

    rank 0     scheduler ──▶ StepInputs ─┬─▶ pass, logits joined, sampling ──▶ tokens read ──▶ scheduler ...
                                         │        ▲ all-reduces, all-gather
    rank 1..   told once a step ◀────────┴─▶ pass, logits joined, sampling

    launch(lambda group: over_ranks(group, "FOLDER", lambda llm: llm.generate(["def "])), 2)[0]

Reading order:
1. `engine.py`    `over_ranks`: every rank loads its part; rank 0 uses the engine, the others follow it
2. `message.py`   a step as one row of numbers, and how it reaches the other ranks
3. `runner.py`    a `Runner` whose steps are told, and whose logits are joined only where they are read whole
4. `part.py`      a rank's part of a model as an engine takes it; what the ranks have to agree on beforehand
5. `adapters.py`  beside a part, each rank's part of the adapters
With stages, which have some of the layers each and are shared by ranks in turn:
6. `stage.py`              a stage's layers, taken out of the whole model
7. `stage_runner.py`       hidden states from stage to stage
8. `reply.py`              tokens from the last stage to rank 0
9. `../run/pipelined.py`   as many steps under way as there are stages
The layers are those that train (`minillm/parallel/tensor_parallel`, `pipeline_parallel`), and so is what cuts and loads
them.

Every rank that has logits samples, each from the same bits: a row's logits are gathered, not computed twice, and its
random number is among the step's inputs. So without stages no token travels, and with asynchronous scheduling the next
pass finds the tokens of the one before it on its own device. Only rank 0 reads them, and what it then tells overrides
all else. Of stages only the last has logits, and its first rank sends the tokens to rank 0.
"""
